"""Runs the fleet service as a process, with parts that are made from the fleet's folder."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

from hushfleet.aggregator.fleet.lock_out import LockOut
from hushfleet.aggregator.fleet.page.server import PageServer
from hushfleet.aggregator.fleet.reload_lists import ReloadLists
from hushfleet.aggregator.fleet.retained import ClearRetained
from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.sightings import Listener
from hushfleet.aggregator.fleet.software.newest import TellingNewest
from hushfleet.aggregator.fleet.software.rollout import Updating
from hushfleet.aggregator.fleet.tasks.seasons import SeasonStarter
from hushfleet.aggregator.fleet.trust import keys, membership_list
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.authority import Authority
from hushfleet.aggregator.fleet.trust.enrolment import Enroller
from hushfleet.aggregator.fleet.trust.folder import SERVICE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.watching.home_assistant import HomeAssistant, will
from hushfleet.aggregator.fleet.watching.watch import FleetWatch
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.errors import BadInput, StoreFull
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.mqtt import MqttLink

log = logging.getLogger("hushfleet.fleet")


class _Applied:
    """Writes the files that are derived from the registry, and logs once that a membership list waits to be signed."""

    def __init__(self, folder: FleetFolder, registry: FleetRegistry, register: ActivityStore) -> None:
        self._folder, self._registry, self._register = folder, registry, register
        self._warned_of, self._begun = "", False

    def apply(self) -> None:
        """Writes the files. Raises `StoreError`."""
        try:
            changes = apply(self._folder, self._registry, self._register, anew=not self._begun)
            self._begun = True
            told = f"{membership_list.describe_waiting(changes)}: {membership_list.export_command()}" if changes else ""
        except BadInput as error:  # boards must still be able to enrol
            told = f"the membership list of secure aggregation stays as it is: {error}"
        if told and told != self._warned_of:
            log.warning("%s", told)
        self._warned_of = told


def serve(path: Path, stop: threading.Event) -> None:
    """Runs the fleet service of the folder `path` until `stop` is set."""
    folder = FleetFolder(path)
    identity, ca_file = keys.service(folder), folder.ca / "ca.pem"
    mine = folder.service
    password = mine / "enrolment.password"
    for_enrolment = BrokerAddress.parse(
        folder.local_enrolment, ca_file=ca_file, username=SERVICE_NAME, password_file=password
    )
    fleet = BrokerAddress.parse(
        folder.local_broker, ca_file=ca_file, cert_file=mine / "cert.pem", key_file=mine / "cert.key"
    )
    with FleetRegistry(folder.path) as registry, ActivityStore(folder.aggregator) as register:
        applied = _Applied(folder, registry, register)
        parts: list[ServicePart] = [
            Listener(registry),
            TellingNewest(folder, registry),
            Updating(folder, registry),
            ReloadLists(folder),
            LockOut(folder, registry),
            ClearRetained(registry),
            SeasonStarter(folder),
        ]
        enroller = Enroller(
            folder.config,
            registry,
            register,
            Authority.load(folder.ca),
            on_granted=applied.apply,
        )
        federation, for_home = folder.config.federation, folder.config.home_assistant.enabled
        if for_home:
            parts.append(HomeAssistant(federation, FleetWatch(folder).view))
        service = FleetService(
            federation=federation,
            identity=identity,
            # only the owner of the service's key knows this client id, so nobody else can take the session
            enrolment_link=MqttLink(for_enrolment, client_id=identity.client_id(SERVICE_NAME)),
            fleet=MqttLink(fleet, client_id=SERVICE_NAME, will=will(federation) if for_home else None),
            enroller=enroller,
            apply=applied.apply,
            was_changed=registry.was_changed,
            parts=parts,
        )
        with contextlib.ExitStack() as opened:
            try:
                page = opened.enter_context(PageServer.of(folder))
                log.info(
                    "the status page listens on port %d; its address: hushfleet fleet status %s --page", page.port, path
                )
            except (BadInput, StoreFull) as error:  # boards must still be able to enrol
                log.error("there is no status page: %s", error)
            service.run(stop)
