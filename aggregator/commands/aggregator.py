"""`hushfleet aggregator`: run a task with the boards behind a broker."""

from __future__ import annotations

import contextlib
import time
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.options import Option, with_options
from hushfleet.errors import BadInput

if TYPE_CHECKING:
    from hushfleet.aggregator.commands.of_fleet import OfFleet
    from hushfleet.aggregator.results.answers import EvaluationRow
    from hushfleet.wire.link.interface import Link, Will

INTERRUPTED = 130
REPLACED = 75
"""Exit code of a fleet's aggregator that has to begin again, with the task that the fleet was given meanwhile."""
_OF_A_FLEET = ("federation", "devices", "enrolment", "roster", "out", "identity", "ca_file", "cert_file", "key_file")
_FILE = {"metavar": "FILE", "exists": True, "dir_okay": False}


DeviceName = StrEnum("DeviceName", ["auto", "cpu", "cuda"])
EnrolmentMode = StrEnum("EnrolmentMode", ["closed", "open"])


@dataclass(frozen=True, kw_only=True)
class AggregatorOptions:
    """A run in the field: its broker, its devices and its files."""

    # fmt: off
    broker: Annotated[str | None, Option(metavar="URL", help="mqtt://host:1883 or mqtts://host:8883.")] = None
    fleet: Annotated[Path | None, Option(metavar="DIR", help="Folder of a fleet, with its task, broker, certificates, key and devices. An unfinished run is resumed.")] = None
    federation: Annotated[str, Option(help="Name of the federation, as in the devices' files.")] = "default"
    devices: Annotated[Path | None, Option(metavar="FILE|RUN", help="Devices that may take part: a TOML list of ids and keys, or the folder of an earlier run. `hushfleet fleet add|block|forget RUN` changes it during the run.")] = None
    roster: Annotated[Path | None, Option(help="Signed list of the devices in secure sums, from `hushfleet fleet roster sign`. Default: all accepted devices.", **_FILE)] = None
    enrolment: Annotated[EnrolmentMode, Option(help="`open`: every device that reaches the broker takes part and shares the noise; for labs only.")] = EnrolmentMode.closed
    device: Annotated[DeviceName, Option(help="Processor that holds the sums; auto: cuda where torch finds one. The result is equal bit by bit.")] = DeviceName.auto
    out: Annotated[Path | None, Option(help="Run folder; default: runs/TASK-TIME.")] = None
    resume: Annotated[bool, Option("--resume", help="Resume the run in --out, if there is one.")] = False
    data_dir: Annotated[Path | None, Option(help="Folder with the files of the test set.")] = None
    settings: Annotated[list[str] | None, Option("--set", metavar="KEY=VALUE", help="Override any key of the task file.")] = None
    identity: Annotated[Path | None, Option(help="This aggregator's key, which devices pin; default: one for each federation in the user's configuration folder.")] = None
    run_id: Annotated[str | None, Option(help="Last part of the task id; default: random.")] = None
    ca_file: Annotated[Path | None, Option(help="CA that signed the broker's certificate.", **_FILE)] = None
    cert_file: Annotated[Path | None, Option(help="This aggregator's certificate.", **_FILE)] = None
    key_file: Annotated[Path | None, Option(help="Private key of that certificate.", **_FILE)] = None
    username: Annotated[str | None, Option(help="User name for the broker.")] = None
    password_file: Annotated[Path | None, Option(help="File with the password for the broker.", **_FILE)] = None
    # fmt: on


@with_options
def aggregator(
    context: typer.Context,
    options: AggregatorOptions,
    task_file: Annotated[
        Path | None, typer.Argument(metavar="TASK.toml", help="Task file; see `tasks/` for examples.")
    ] = None,
) -> None:
    """Run a task with the devices behind a broker. Safe to kill at any time; `--resume` goes on.

    Examples:

    `hushfleet aggregator tasks/digits-fedglp-adp.toml --broker mqtt://localhost:1883 --enrolment open`

    `hushfleet aggregator task.toml --broker mqtts://broker:8883 --ca-file ca.pem --devices devices.toml --out runs/a --resume`

    `hushfleet aggregator --fleet greenhouse`
    """
    from rich.markup import escape

    from hushfleet.aggregator.commands.field_run import (
        enrolment_of,
        nobody_is_known,
        prepared_under_its_id,
        resume_command,
        run_rounds,
        sum_facts_of,
        torch_device,
        wait_until,
    )
    from hushfleet.aggregator.commands.older_copy import refuse_older_copy
    from hushfleet.aggregator.config.notes import notes_of
    from hushfleet.aggregator.config.task import load_task
    from hushfleet.aggregator.devices.activity import FILES
    from hushfleet.aggregator.devices.devices_file import read_devices
    from hushfleet.aggregator.devices.fleet_members import Members
    from hushfleet.aggregator.devices.list_file import roster_file
    from hushfleet.aggregator.devices.register import DeviceRegister
    from hushfleet.aggregator.observe.console import Console
    from hushfleet.aggregator.observe.progress import show_progress
    from hushfleet.aggregator.planning.evaluation_error import useless_evaluation
    from hushfleet.aggregator.planning.pay import images_of, pay
    from hushfleet.aggregator.results.metrics import newest_evaluation
    from hushfleet.aggregator.results.server_sees import server_sees
    from hushfleet.aggregator.rounds.engine import RoundEngine
    from hushfleet.aggregator.rounds.thresholds import of_task
    from hushfleet.aggregator.storage.charged_keys import ChargedKeys
    from hushfleet.aggregator.storage.identity_file import (
        default_path,
        epoch_file,
        last_epoch,
        load_or_create,
        next_epoch,
    )
    from hushfleet.aggregator.storage.store import AggregatorStore, refuse_used
    from hushfleet.user_files import checked_folder, refuse_others
    from hushfleet.wire.format.topics import check_name
    from hushfleet.wire.link.address import BrokerAddress
    from hushfleet.wire.link.mqtt import MqttLink

    fleet: OfFleet | None = None
    if options.fleet is not None:
        for name in ("task_file", "broker", *_OF_A_FLEET):
            if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE":
                word = "TASK.toml" if name == "task_file" else f"--{name.replace('_', '-')}"
                raise BadInput(f"{word} cannot be combined with --fleet, whose folder sets it: remove {word}")
        from hushfleet.aggregator.commands.of_fleet import OfFleet

        fleet = OfFleet(options.fleet)
        task_file, options = fleet.folder.task, fleet.options(options)

    def replaced() -> bool:
        return fleet is not None and fleet.is_replaced

    def note(words: str) -> None:
        console.print(f"[yellow]note:[/] {escape(words)}", highlight=False, soft_wrap=True)

    if task_file is None or options.broker is None:
        raise BadInput("give TASK.toml and --broker URL, or --fleet DIR")
    if options.resume and options.out is None:
        raise BadInput("--resume goes on with the run in --out: give its folder, or leave --resume out for a new run")
    noted = contextlib.nullcontext if fleet is None else fleet.noted_end
    with noted():
        task = load_task(task_file, tuple(options.settings or ()))
    if options.roster is not None and fleet is None and task.privacy.accounting != "secure":
        raise BadInput(
            f"--roster needs secure sums, and the task has accounting = {task.privacy.accounting!r}: remove --roster"
        )
    folder = checked_folder(options.out or Path("runs") / f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    check_name(options.federation, "the federation's name")
    address = BrokerAddress.parse(
        options.broker, username=options.username, password_file=options.password_file,
        ca_file=options.ca_file, cert_file=options.cert_file, key_file=options.key_file,
    )  # fmt: skip
    if fleet is None and not (options.resume and AggregatorStore.exists(folder)):
        refuse_used(folder)
        refuse_others(folder, FILES)  # which `hushfleet fleet add` makes, also before the first start
    console = Console()
    closed = options.enrolment is EnrolmentMode.closed
    listed = [] if options.devices is None else read_devices(options.devices)
    if fleet is None and closed and not (listed or AggregatorStore.exists(folder) or DeviceRegister.exists(folder)):
        raise nobody_is_known(folder)
    with ExitStack() as opened:
        opened.enter_context(noted())
        store = opened.enter_context(AggregatorStore(folder))
        known: Members = DeviceRegister(folder) if fleet is None else fleet.members
        opened.enter_context(known)
        policy = enrolment_of(store, known, listed, closed=closed, fleet=options.fleet, console=console)
        with show_progress(console):
            prepared = prepared_under_its_id(task, store, data_dir=options.data_dir, run_id=options.run_id)
        for words in notes_of(task):
            note(words)

        def pays(newest: EvaluationRow | None) -> str:
            if fleet is None:
                found = pay(task, evaluation=newest)
            else:
                found = fleet.pay(task, boards=policy.count, evaluation=newest)
            return "" if found is None else found.in_words

        if said := pays(newest_evaluation(store)):
            console.print(f"{escape(said)}. See: hushfleet plan --help", highlight=False, soft_wrap=True)
        engine = RoundEngine(store, prepared, device=torch_device(options.device.value))
        needed = of_task(task, blocked=policy.blocked).devices
        begun = engine.plan is not None or engine.closed_rounds
        if fleet is not None and not begun:
            fleet.check_use(task, boards=policy.count, needed=needed)
        useless = useless_evaluation(task, devices=task.cohort_size, images=images_of(task))
        if fleet is None and not begun and useless is not None:
            note(useless)
        if fleet is None and closed and policy.count < needed:  # `fleet up` says so of a fleet
            few = f"a round opens with {needed} devices, and {policy.count} may take part"
            note(f"{few}: it waits until you add more (hushfleet fleet add {folder} ID --key KEY)")
        key_path = options.identity or default_path(options.federation)
        key = load_or_create(key_path)
        seen = opened.enter_context(ChargedKeys(key_path))

        def connect(will: Will | None) -> Link:
            return MqttLink(address, client_id=key.client_id(f"aggregator-{options.federation}"), will=will)

        if last := last_epoch(key_path):
            counter = epoch_file(key_path)
            refuse_older_copy(connect(None), key, federation=options.federation, last=last, counter=counter)
        epoch = next_epoch(key_path)
        roster = None if options.roster is None else roster_file(options.roster)
        facts, secure = sum_facts_of(store, fleet and fleet.sums, roster), engine.spec.privacy.secure
        if secure is not None:
            said = server_sees(facts, min_devices=secure.min_devices)
            console.print(escape(said), highlight=False, soft_wrap=True)
        finished = run_rounds(
            engine,
            connect,
            key,
            policy,
            roster=roster,
            charges=fleet and fleet.charges(engine),
            thresholds=fleet and fleet.thresholds(task),
            seen=seen,
            pause=fleet and fleet.folder.paused,
            replaced=replaced,
            epoch=epoch,
            federation=options.federation,
            console=console,
        )
        if finished:
            from hushfleet.aggregator.commands.field_results import (
                write_results,  # with the plots: a run may last months
            )

            lifetimes = fleet and fleet.lifetimes(engine)
            write_results(
                store, prepared, console, sums=facts, federation=options.federation, lifetimes=lifetimes, pays=pays
            )
    if finished and task.season is not None and fleet is not None:
        console.print("[bold]waits[/] for the next season, which the fleet service begins")
        wait_until(replaced)
    if replaced():
        console.print("the fleet has another task; the aggregator begins again")
        raise typer.Exit(REPLACED)
    if not finished:
        if fleet is not None:
            path = escape(str(fleet.folder.path))
            words = f"[bold]stopped[/]; the run goes on when the fleet does: hushfleet fleet up {path}"
        else:
            words = f"[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(resume_command(context, folder))}"
        console.print(f"\n{words}", highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
