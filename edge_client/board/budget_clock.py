"""The time that a board counts for its budget: a wrong clock may hold it back, and cannot set it forward.

A board without a battery wakes with a wrong clock, and whoever answers its questions for the time can set it. If a jump
of the clock began a new period, a spent budget would be there again. So counted time grows in two ways alone: by the
seconds that the client has run, by the monotonic clock; and up to the earlier of the board's clock and the newest
signed word of the fleet service (`hushfleet.release.Newest.said_at`, once a day), which covers the time without power.
Neither the clock nor the service can set it forward alone, and the two must agree: else a broker that has kept old
words, or a clock that is set step by step, could open the periods in which a board was off one after the other, and
have the budget of each spent within days. It never goes back.

The clock with which counting begins may be far behind, as on a new card that inherits what an earlier one has spent. If
clock and word set the time forward when they agree for the first time, all that was charged before counts as of then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from hushfleet.errors import HushfleetError, LedgerError
from hushfleet.privacy.ledger import CountedTime, Ledger

SAVE_EVERY_S = 3600
"""What a client that is killed has counted since is lost."""

AGREE_S = 2 * 86400
"""The clock and the word set the time forward where they are no further apart."""

_log = logging.getLogger("hushfleet.edge")


class BudgetClock:
    """Counts the time of a ledger's device.

    :param wall: the board's clock, unix seconds.
    :param monotonic: monotonic seconds.
    :param witness: the newest time that somebody else has signed, unix seconds; 0: none.
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
            with contextlib.suppress(HushfleetError):  # each round says what is wrong
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
        """Goes on from what is kept. Before the first charge there is nothing to refresh, and the clock counts."""
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
        except LedgerError as error:  # a full disk: it is counted on, and kept when there is room
            _log.warning("%s", error)
            return False
        self._kept = time
        return True
