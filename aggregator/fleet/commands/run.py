"""`hushfleet fleet serve|up|task`: the fleet service, all four processes in one terminal, and what they train."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.fleet import words
from hushfleet.aggregator.fleet.access import apply
from hushfleet.aggregator.fleet.authority import Authority
from hushfleet.aggregator.fleet.commands.desk import Dir
from hushfleet.aggregator.fleet.enrolment import Enroller
from hushfleet.aggregator.fleet.folder import SERVICE_NAME, FleetFolder
from hushfleet.aggregator.fleet.lock_out import LockOut
from hushfleet.aggregator.fleet.next_task import set_task
from hushfleet.aggregator.fleet.processes import run_fleet
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.service import FleetService, Part
from hushfleet.aggregator.fleet.sightings import Listener, key_of
from hushfleet.aggregator.fleet.updating import Updating
from hushfleet.aggregator.fleet.watch import FleetWatch
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.errors import BadInput
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.mqtt import MqttLink

log = logging.getLogger("hushfleet.fleet")


def register(fleet: typer.Typer) -> None:
    """Adds the sub-commands."""
    fleet.command("serve")(_serve)
    fleet.command("up")(_up)
    fleet.command("task")(_task)


def _up(path: Dir) -> None:
    """Run broker, fleet service and aggregator in this terminal, until Ctrl-C. Start it again to go on.

    For labs. In the field they are services: DIR/systemd has their units.
    """
    logging.getLogger("hushfleet").setLevel(logging.INFO)
    run_fleet(FleetFolder(path), _stop_on_signals())


def _task(
    path: Dir,
    task: Annotated[Path, typer.Argument(metavar="TASK.toml", help="The next task, with a name of its own.", exists=True, dir_okay=False)],
    now: Annotated[bool, typer.Option("--now", help="Also where the present one is not finished; it can go on later.")] = False,
) -> None:  # fmt: skip
    """Give the fleet its next task. Each run has its own folder, DIR/runs/NAME; boards go on with their ledgers.

    `fleet up` takes it at once. To go on with an earlier run, give its file: DIR/runs/NAME/task.toml.
    """
    folder = FleetFolder(path)
    watch = FleetWatch(folder)
    run = watch.view().run
    watch.close()
    if run is not None and not run.finished and not now:
        raise BadInput(f"{words.progress(run)}; wait for the others, or say --now to leave it for later")
    goes_on = set_task(folder, task)
    print(
        f"the fleet's task is {folder.run.name}; its run {'goes on' if goes_on else 'begins'} in {folder.run} when the "
        "aggregator is started: fleet up does so, else sudo systemctl restart hushfleet-aggregator"
    )


def _serve(path: Dir) -> None:
    """Run the fleet service until it is stopped: it enrols boards and watches over them. Safe to kill at any time."""
    logging.getLogger("hushfleet").setLevel(logging.INFO)
    serve(path, _stop_on_signals())


def _stop_on_signals() -> threading.Event:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def serve(path: Path, stop: threading.Event) -> None:
    """The fleet service of the folder `path`, until `stop` is set."""
    from hushfleet.aggregator.fleet.page.server import PageServer  # with a web server, which other commands do without

    folder = FleetFolder(path)
    operator, ca_file = load_or_create(folder.operator_key), folder.ca / "ca.pem"
    mine = folder.service
    password = mine / "enrolment.password"
    strangers = BrokerAddress.parse(
        folder.local_enrolment, ca_file=ca_file, username=SERVICE_NAME, password_file=password
    )
    fleet = BrokerAddress.parse(
        folder.local_broker, ca_file=ca_file, cert_file=mine / "cert.pem", key_file=mine / "cert.key"
    )
    with FleetRegistry(folder.path) as registry, DeviceRegister(folder.path) as register:
        known = partial(key_of, registry, register)
        parts: list[Part] = [Listener(registry, known), Updating(folder, registry, known), LockOut(folder, registry)]
        enroller = Enroller(
            folder.config,
            registry,
            register,
            Authority.load(ca_file, folder.ca / "ca.key"),
            on_granted=lambda: apply(folder, registry),
        )
        service = FleetService(
            federation=folder.config.federation,
            operator=operator,
            # only who has the operator's key can tell this client id, so no stranger can take the session
            strangers=MqttLink(strangers, client_id=operator.client_id(SERVICE_NAME)),
            fleet=MqttLink(fleet, client_id=SERVICE_NAME),
            enroller=enroller,
            apply=lambda: apply(folder, registry),
            was_changed=registry.was_changed,
            parts=parts,
        )
        with contextlib.ExitStack() as opened:
            try:
                page = opened.enter_context(PageServer.of(folder))
                log.info("the status page listens on port %d; its address: hushfleet fleet page %s", page.port, path)
            except BadInput as error:  # boards must come in all the same
                log.error("there is no status page: %s", error)
            service.run(stop)
