"""Counts the time of a board for its budget: a wrong clock may hold it back, but cannot set it forward.

A board without a battery starts with a wrong clock, and anyone who answers its time requests can set it. If a jump of
the clock started a new period, a spent budget would be available again. Therefore counted time grows in only two ways:
by the seconds that the client has run, on the monotonic clock; and up to the earlier of the board's clock and the
newest signed time of the fleet service (`hushfleet.release.Newest.said_at`, once a day), which covers the time without
power. Neither the clock nor the service can set it forward alone; the two must agree. Otherwise a broker that has kept
old signed times, or a clock that is set step by step, could open the periods in which a board was off one after the
other, and the budget of each period could be spent within days. Counted time never goes back.

The clock may be far behind when counting starts, as on a new card that inherits the charges of an earlier one. If clock
and signed time set the time forward when they agree for the first time, all earlier charges count as made then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from hushfleet.errors import HushfleetError, LedgerError
from hushfleet.privacy.ledger import CountedTime, Ledger

SAVE_EVERY_S = 3600
"""Interval between two saves; a client that is killed loses what it has counted since the last one."""

AGREE_S = 2 * 86400
"""The clock and the signed time set the time forward only if they differ by at most this."""

_log = logging.getLogger("hushfleet.edge")


class BudgetClock:
    """Counts the time of a ledger's device.

    :param wall: the board's clock, unix seconds.
    :param monotonic: monotonic seconds.
    :param witness: returns the newest time that somebody else has signed, unix seconds; 0 if there is none.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        witness: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._ledger, self._wall, self._monotonic, self._witness = ledger, wall, monotonic, witness
        self._kept: CountedTime | None = None
        self._counted = self._counted_at = self._due_at = 0.0

    def tick(self) -> None:
        """Counts while no round asks for the time; call it often."""
        if self._kept is None or self._monotonic() >= self._due_at:
            with contextlib.suppress(HushfleetError):  # each round reports what is wrong
                self.now()

    def now(self) -> int:
        """Returns counted unix seconds, and keeps them now and then. Raises `LedgerError` if the ledger was changed."""
        kept = self._kept or self._begin()
        at = self._monotonic()
        self._counted += max(0.0, at - self._counted_at)
        self._counted_at = at
        wall, said = self._wall(), self._witness()
        if said and abs(wall - said) <= AGREE_S:
            agreed = max(self._counted, min(wall, said))
            began = int(agreed) if agreed > self._counted + AGREE_S else kept.began
            if kept.confirmed or self._keep(CountedTime(began, int(agreed), True)):
                self._counted = agreed
        self._due_at, kept = at + SAVE_EVERY_S, self._kept or kept
        if self._counted >= kept.now + SAVE_EVERY_S:
            self._keep(CountedTime(kept.began, int(self._counted), kept.confirmed))
        return int(self._counted)

    def _begin(self) -> CountedTime:
        """Continues from the stored time. Before the first charge there is no budget to renew, and the clock counts."""
        kept, entries = self._ledger.counted(), self._ledger.entries()
        if kept is None or not entries:
            began = max(1, int(self._wall()))
            kept = CountedTime(began, began)
            self._ledger.keep_counted(kept)
        self._counted, self._counted_at = float(max([kept.now, *(entry.at for entry in entries)])), self._monotonic()
        self._kept = kept
        return kept

    def _keep(self, time: CountedTime) -> bool:
        try:
            self._ledger.keep_counted(time)
        except LedgerError as error:  # a full disk: counting continues, and is stored when there is room
            _log.warning("%s", error)
            return False
        self._kept = time
        return True
