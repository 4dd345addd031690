"""Counts the time of a board for its budget: a wrong clock may hold it back, but cannot set it forward.

A board without a battery starts with a wrong clock, and anyone who answers its time requests can set it. If a jump of
the clock started a new period, a spent budget would be available again. Therefore counted time grows in only two ways:
by the seconds that the client has run, on a clock that nobody sets; and up to the earlier of the board's clock and the
newest signed time of the fleet service (`Newest.said_at`, once a day), which covers the time without
power. Neither the clock nor the service can set it forward alone; the two must agree. Otherwise a broker that has kept
old signed times, or a clock that is set step by step, could open the periods in which a board was off one after the
other, and the budget of each period could be spent within days. Counted time never goes back.

A board that was off continues with the counted time at which it stopped, and does not know how far it is behind. If it
spent what is left of that period, then heard the time, and spent the present period's budget and the next one's, three
budgets could be spent within hours. Therefore after a start nothing is spent until a statement is heard that agrees
with the clock, or an hour has been counted. The hour goes on after a restart in which nothing was spent. A statement
that was known before the start does not count: a clock that stood while the board was off agrees with it.

When they agree, the true time lies between the two: it is not before the earlier, which sets the counted time, and not
after the later, which tells how far the counted time is behind (`CountedTime.lag`). Entries that are written without
this knowledge keep their distance to the counted time when it is set forward (`Ledger.keep_counted`), also those that
a new card inherits. `hushfleet.privacy.budget` says which bound follows. If both are behind the true time by up to d (a
clock that stood, and a statement of yesterday), the bound holds for intervals that are shorter by d.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable

from hushfleet.errors import HushfleetError, LedgerError
from hushfleet.privacy.ledger import CountedTime, Ledger

WAIT_S = 3600
"""Counted seconds after a start in which nothing is spent, unless the time is heard."""

SAVE_EVERY_S = 3600
"""Longest interval between two saves; a client that is killed loses what it has counted since the last one, and
`status` shows the time of the last one."""

SAVES_A_PERIOD = 60
"""Least number of saves in a period of the owner's limits, as long as they are a minute apart."""

SAVE_EVERY_WAITING_S = 300
"""The same while nothing is spent: a board whose power fails each hour must end its wait at some time."""

LOOK_EVERY_S = 5.0
"""Interval between two looks for a statement while nothing is spent."""

LISTEN_S = 120.0
"""Seconds after a start in which the fleet's statement usually comes, and a round may wait for it."""

AGREE_S = 2 * 86400
"""The clock and the signed time set the time forward only if they differ by at most this."""

_log = logging.getLogger("hushfleet.edge")


def since_boot() -> float:
    """Returns seconds that nobody sets, and that also pass while the board sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class BudgetClock:
    """Counts the time of a ledger's device.

    :param wall: the board's clock, unix seconds.
    :param monotonic: monotonic seconds.
    :param witness: returns the newest time that somebody else has signed, unix seconds; 0 if there is none yet. None:
        nobody signs any.
    :param waits: False in simulations only, where nothing waits after a start.
    :param period_s: length of the period of the owner's limits, seconds; 0: there is none.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = since_boot,
        witness: Callable[[], float] | None = None,
        waits: bool = True,
        period_s: float = 0.0,
    ) -> None:
        self._save_s = min(SAVE_EVERY_S, max(60.0, period_s / SAVES_A_PERIOD)) if period_s else SAVE_EVERY_S
        self._ledger, self._wall, self._monotonic, self._witness = ledger, wall, monotonic, witness
        self._waits = waits
        self._kept: CountedTime | None = None
        self._counted = self._counted_at = self._due_at = self._began_at = 0.0
        self._said_before = self._agreed_with = 0.0 if witness is None else witness()

    def listens(self) -> bool:
        """Returns whether nothing may be spent yet, but a statement may come within a minute. Raises `LedgerError`."""
        waits = self.now() < (self._kept or self._begin()).waits_until
        return waits and self._witness is not None and self._monotonic() - self._began_at < LISTEN_S

    def tick(self) -> None:
        """Counts while no round asks for the time; call it often."""
        if self._kept is None or self._monotonic() >= self._due_at:
            with contextlib.suppress(HushfleetError):  # each round reports what is wrong
                self.now()

    def now(self) -> int:
        """Returns counted unix seconds, and keeps them now and then. Raises `LedgerError` if the ledger was changed."""
        kept, at = self._kept or self._begin(), self._monotonic()
        self._counted += max(0.0, at - self._counted_at)
        self._counted_at = at
        if self._witness is not None:
            kept = self._compared(kept, self._wall(), self._witness())
        waits = self._counted < kept.waits_until
        save_s = min(self._save_s, SAVE_EVERY_WAITING_S) if waits else self._save_s
        self._due_at = at + (LOOK_EVERY_S if waits else save_s)
        if self._counted >= kept.now + save_s:
            self._keep(kept._replace(now=int(self._counted)))
        return int(self._counted)

    def save(self) -> None:
        """Keeps the time at a clean stop, so that none is lost."""
        if self._kept is not None and (now := self.now()) > self._kept.now:
            self._keep(self._kept._replace(now=now))

    def _begin(self) -> CountedTime:
        """Continues from the stored time. Before the first charge there is no budget to renew, and the clock counts."""
        kept, charged = self._ledger.counted(), self._ledger.rounds_charged() > 0
        if kept is None or not charged:
            began = max(1, int(self._wall()))
            kept = CountedTime(began, began)
        waits_until = kept.waits_until if kept.waits_until > kept.now else kept.now + WAIT_S
        kept = kept._replace(
            lag=0 if self._witness is None else None, waits_until=waits_until if charged and self._waits else 0
        )
        self._ledger.keep_counted(kept)
        if self._witness is not None and not kept.confirmed:
            self._ledger.doubt_times()
        self._counted, self._counted_at = float(kept.now), self._monotonic()
        self._kept, self._began_at = kept, self._counted_at
        return kept

    def _compared(self, kept: CountedTime, wall: float, said: float) -> CountedTime:
        """Sets the time forward up to the earlier of clock and statement, if they agree. Returns what is kept then.

        A statement that was known before the start does not tell the lag, and does not shorten the wait.
        """
        if not said or abs(wall - said) > AGREE_S:
            return kept
        agreed = max(self._counted, min(wall, said))
        moved = int(agreed) - int(self._counted)
        if said == self._said_before:
            waits = self._counted < kept.waits_until
            after = kept._replace(now=int(agreed), waits_until=kept.waits_until + moved * waits)
        else:
            lag = max(0, math.ceil(max(wall, said)) - int(agreed))
            if said == self._agreed_with:  # the clock may have been set since
                lag = max(lag, kept.lag or 0)
            after, moved = CountedTime(kept.began, int(agreed), True, lag), moved + lag
        if (int(agreed) > int(self._counted) or after[2:] != kept[2:]) and self._keep(after, moved=moved):
            self._counted, self._agreed_with = agreed, said
        return self._kept or kept

    def _keep(self, time: CountedTime, *, moved: int = 0) -> bool:
        try:
            self._ledger.keep_counted(time, moved=moved)
        except LedgerError as error:  # a full disk: counting continues, and is stored when there is room
            _log.warning("%s", error)
            return False
        self._kept = time
        return True
