"""Renews a board's certificate in time, while it has a connection."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hushfleet.at_need import at_need
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.tls_identity import TlsIdentity
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import HushfleetError, StoreError
from hushfleet.wire.format.fleet_messages import EnrolAnswer
from hushfleet.wire.format.messages import peek_kind
from hushfleet.wire.format.topics import ParsedTopic, Topics
from hushfleet.wire.link.interface import Link

if TYPE_CHECKING:
    from hushfleet.edge_client.fleet import enrol
else:
    enrol = at_need("hushfleet.edge_client.fleet.enrol")

LOOK_EVERY_S = 3600.0  # between checks of the clock, which may be set in the meantime
MOST_FAILURES = 8

_log = logging.getLogger("hushfleet.edge")


class AskAgain(HushfleetError):
    """The agent should end, and the board should ask for a certificate at the address for boards without one."""


class Renewal(Duty):
    """Renews the certificate over the fleet's own broker while the broker accepts the current one.

    :param wall: unix seconds; `clock`: monotonic seconds.
    """

    def __init__(
        self,
        config: DeviceConfig,
        store: DeviceStore,
        tls: TlsIdentity,
        *,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._store, self._tls, self._wall, self._clock = config, store, tls, wall, clock
        self._topics, self._device = Topics(config.device.federation), config.device.id
        self.filters = (self._topics.fleet(self._device),)
        self._asking: enrol.CertificateRequest | None = None
        self._failures = 0
        self.due_at = clock()

    def connected(self) -> None:
        self._failures = 0
        self.due_at = self._clock()
        if self._asking is not None:
            self._asking.connected()

    def lost(self) -> None:
        """Raises `AskAgain` if the certificate has ended, or if connections fail repeatedly."""
        self._failures += 1
        if not self._tls.is_usable(now=self._wall()):
            raise AskAgain("the certificate has ended")
        if self._failures >= MOST_FAILURES:
            raise AskAgain(f"{self._failures} connections in a row have failed")

    def take(self, topic: ParsedTopic, payload: bytes) -> None:
        if topic.kind == "fleet" and self._asking is not None and payload and peek_kind(payload) is EnrolAnswer:
            self._asking.take(payload)
            if self._asking.granted:
                self._asking, self.due_at = None, self._clock() + LOOK_EVERY_S

    def advance(self, link: Link, now: float, *, busy: bool) -> None:
        validity = self._tls.validity()
        if validity is None or self._wall() < validity.renew_at:
            self.due_at = now + LOOK_EVERY_S
            return
        if self._asking is None:
            _log.info("two thirds of the certificate's life are over; asking for the next one")
            self._asking = enrol.CertificateRequest(self._config, self._store, self._tls, clock=self._clock)
        if self._clock() >= self._asking.due_at:
            try:
                link.publish(self._topics.renewal(self._device), self._asking.frame())
            except StoreError as error:
                _log.error("%s", error)
        self.due_at = self._asking.due_at
