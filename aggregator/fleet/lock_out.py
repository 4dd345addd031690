"""Ends the connection of a board that was locked out, without a restart of the broker.

Mosquitto reads its lists again on a signal, but closes no connection because of them: a connected board would stay
connected, could neither send nor receive, and would not know why. But MQTT ends the older of two connections with the
same client id, and the fleet's broker takes the client id from the certificate. So the authority signs a certificate in
the board's name, and this service connects with it once. Nobody else can, because the key is made here and discarded.
The board's own certificate is revoked by then; the board asks for another one, and is told why it gets none.

This also ends a session that the broker was asked to keep, with all messages that wait in it. Messages that the board
had the broker retain are cleared.
"""

from __future__ import annotations

import datetime
import logging
import tempfile
from pathlib import Path

from hushfleet.aggregator.fleet.retained import ever_retained
from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.trust.authority import Authority, make_key, private_pem
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.errors import BadInput
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.interface import LinkUp
from hushfleet.wire.link.mqtt import MqttLink

LOOK_EVERY_S = 1.0
PATIENCE_S = 15.0
_LISTS_READ_S = 3.0  # the broker has the new lists by then, so that the board does not come back
_DAYS = 1 / 24

log = logging.getLogger("hushfleet.fleet")


class LockOut(ServicePart):
    """A part of the fleet service. It acts once for each locked-out board, and again after the service's start."""

    every_s = LOOK_EVERY_S

    def __init__(self, folder: FleetFolder, registry: FleetRegistry) -> None:
        self._folder, self._registry = folder, registry
        self._since: dict[str, float] = {}  # when it was seen to be locked out
        self._done: set[str] = set()
        self._taking: _Session | None = None

    def advance(self, service: FleetService, now: float) -> None:
        if self._taking is not None and self._taking.has_ended(now):
            self._taking = None
        if self._taking is None:
            super().advance(service, now)

    def act(self, service: FleetService, now: float) -> None:
        blocked = set(self._registry.locked_out())
        self._since = {device: self._since.get(device, now) for device in blocked}
        self._done &= blocked
        ripe = [device for device, since in self._since.items() if now >= since + _LISTS_READ_S]
        # the latest first: after its start the service has to handle all boards that were ever locked out
        for device in sorted(set(ripe) - self._done, key=lambda each: (-self._since[each], each))[:1]:
            for topic in ever_retained(service.topics, device):
                service.clear(topic)
            self._done.add(device)
            try:
                self._taking = _Session(self._folder, device, give_up=now + PATIENCE_S)
            except (BadInput, OSError) as error:
                log.error("the connection of %s could not be ended: %s", device, error)


class _Session:
    """A second connection in a board's name. Its files are needed until it is up, and nobody else may read them."""

    def __init__(self, folder: FleetFolder, device: str, *, give_up: float) -> None:
        ca_file, key, now = folder.ca / "ca.pem", make_key(), datetime.datetime.now(datetime.UTC)
        signed = Authority.load(folder.ca).sign_client(device, key.public_key(), days=_DAYS, now=now)
        self._device, self._give_up = device, give_up
        self._files = tempfile.TemporaryDirectory(prefix="hushfleet-")
        cert_file, key_file = (Path(self._files.name) / name for name in ("cert.pem", "cert.key"))
        cert_file.write_bytes(signed.pem)
        key_file.write_bytes(private_pem(key))
        address = BrokerAddress.parse(folder.local_broker, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        self._link = MqttLink(address, client_id=device)
        self._link.open()

    def has_ended(self, now: float) -> bool:
        """Returns whether the connection was up, or has waited for too long; in both cases it is closed."""
        came = isinstance(self._link.receive(0.0), LinkUp)
        if came:
            log.info("%s is locked out, and its connection has ended", self._device)
        elif now < self._give_up:
            return False
        else:
            log.warning(
                "whether %s is still connected could not be seen; it is deaf and mute in any case", self._device
            )
        self._link.close()
        self._files.cleanup()
        return True
