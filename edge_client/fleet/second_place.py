"""Compares a board's ledger with what its boot partition says, and keeps the line for the boot partition.

A missing or damaged line stops nothing, because FAT may lose a file without power; `status` tells it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hushfleet.atomic_file import write_whole
from hushfleet.edge_client.board.config import FleetSection
from hushfleet.edge_client.duties import Duty
from hushfleet.edge_client.fleet.client_files import ChargeLine
from hushfleet.edge_client.storage.state_files import CHARGED
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import ROUNDING, stop_as_copy
from hushfleet.errors import LedgerError, StoreFull
from hushfleet.wire.link.interface import Link

LOOK_EVERY_S = 30.0

_log = logging.getLogger("hushfleet.edge")


class SecondPlace(Duty):
    """The line of a fleet's board.

    :param now: monotonic seconds.
    """

    def __init__(self, fleet: FleetSection, store: DeviceStore, *, now: float) -> None:
        self._handed_over, self._store = Path(fleet.releases), store
        self._written = -1
        self.due_at = now

    def check(self) -> None:
        """Stops for good with `CopiedStore` if the boot partition knows of more charges than the ledger."""
        told = ChargeLine.read(self._handed_over)
        here = self._line()
        if told is None or here is None or told.key != here.key:
            return
        if here.rounds < told.rounds or here.weight < told.weight * (1 - ROUNDING):
            stop_as_copy(
                self._store,
                f"the boot partition says that this board's key has charged {told.rounds} rounds, with the sum "
                f"{told.weight:.6g}, and this store has {here.rounds}, with the sum {here.weight:.6g}",
            )

    def advance(self, link: Link, now: float, *, busy: bool) -> None:
        """Writes the line if the ledger has grown; root's timer copies it."""
        self.due_at = now + LOOK_EVERY_S
        try:
            if (count := self._store.ledger.count) != self._written and (line := self._line()) is not None:
                write_whole(self._store.path.with_name(CHARGED), line.text.encode(), durable=True)
                self._written = count
        except (StoreFull, LedgerError) as error:  # each round meets the full disk or the damaged ledger, too
            _log.warning("%s", error)

    def problem(self) -> str | None:
        """Describes a line that the boot partition has lost; None if nothing is wrong, or there is no such place."""
        found = (self._handed_over / CHARGED).exists() and self._store.ledger.count
        if not found or ChargeLine.read(self._handed_over) is not None:
            return None
        return (
            "the boot partition had no readable number of charges at the last start. It is written anew within a "
            "minute; only the fleet can tell whether this store is an old copy"
        )

    def _line(self) -> ChargeLine | None:
        try:
            ledger = self._store.ledger
            return ChargeLine(self._store.identity.public_key.hex(), ledger.rounds_charged(), ledger.weight())
        except LedgerError as error:
            _log.error("%s", error)
            return None
