"""The fleet service as a process: its parts are made of the fleet's folder, and run."""

from __future__ import annotations

import contextlib
import logging
import threading
from functools import partial
from pathlib import Path

from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.fleet.access import apply
from hushfleet.aggregator.fleet.authority import Authority
from hushfleet.aggregator.fleet.enrolment import Enroller
from hushfleet.aggregator.fleet.folder import SERVICE_NAME, FleetFolder
from hushfleet.aggregator.fleet.lock_out import LockOut
from hushfleet.aggregator.fleet.page.server import PageServer
from hushfleet.aggregator.fleet.read_again import ReadAgain
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.retained import ClearRetained
from hushfleet.aggregator.fleet.service import FleetService, Part
from hushfleet.aggregator.fleet.sightings import Listener, key_of
from hushfleet.aggregator.fleet.updating import Updating
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.errors import BadInput
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.mqtt import MqttLink

log = logging.getLogger("hushfleet.fleet")


def serve(path: Path, stop: threading.Event) -> None:
    """The fleet service of the folder `path`, until `stop` is set."""
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
    with FleetRegistry(folder.path) as registry, DeviceRegister(folder.aggregator) as register:
        known = partial(key_of, registry, register)
        parts: list[Part] = [
            Listener(registry, known),
            Updating(folder, registry, known),
            ReadAgain(folder),
            LockOut(folder, registry),
            ClearRetained(registry),
        ]
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
