"""Maps a task's schedule to the virtual clock, whose second 0 is a date and time of the calendar."""

from __future__ import annotations

import math
from datetime import datetime
from zoneinfo import ZoneInfo

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.rounds.policy import may_open
from hushfleet.aggregator.rounds.schedule import Schedule
from hushfleet.simulator.world.outcomes import STARTS

_ROUNDING_S = 1e-3  # the rounding error of sums with unix seconds


class Calendar:
    """The times at which the rounds of one virtual run may be open, in virtual seconds.

    :param starts: date and time at which the run starts.
    """

    def __init__(self, section: ScheduleSection | None = None, *, starts: datetime = STARTS) -> None:
        self._schedule = Schedule(section) if section is not None and section.is_set else None
        self._starts = starts.replace(tzinfo=ZoneInfo(self._schedule.zone)).timestamp() if self._schedule else 0.0
        self._last: float | None = None
        self._looks_at = 0.0
        self.idle_since = 0.0

    def opens(self, now: float) -> float:
        """Returns when the next round may open: `now` or later; infinity if no more rounds open."""
        return now if self._schedule is None else self._next(self._schedule, now, self._last)

    def is_over(self, now: float) -> bool:
        """Returns whether no more rounds open because the schedule's last day is over."""
        return math.isinf(self.opens(now))

    def goes_on(self, now: float) -> float:
        """Returns when a round continues that stopped at the end of its window."""
        return now if self._schedule is None else self._next(self._schedule, now, None)

    def left_s(self, now: float) -> float:
        """Returns seconds until the open window ends: 0 if no window is open, infinity without a schedule."""
        if self._schedule is None:
            return math.inf
        left_s = self._schedule.ends(self._starts + now) - self._starts - now
        return left_s if left_s > _ROUNDING_S else 0.0

    def may_open(
        self, now: float, rules: RoundSection, present: int, *, least: int, closed_rounds: int, rate: float
    ) -> bool:
        """Returns whether the next round may open, as `RoundCycle` decides; parameters as for `policy.may_open`."""
        if (opens := self.opens(now)) > now:
            self.idle_since = opens
            return False
        waited_s = now - self.idle_since
        if waited_s >= self.left_s(now) / 3:
            waited_s = math.inf
        return may_open(rules, present, least=least, closed_rounds=closed_rounds, waited_s=waited_s, rate=rate)

    def look_again(self, now: float, rules: RoundSection) -> float | None:
        """Returns when to try again to open a round after `may_open` has refused; None if no retry is needed."""
        if self._schedule is None:
            return None
        patience_at = (
            self.idle_since + min(rules.deadline_s, (now + self.left_s(now) - self.idle_since) / 4) + _ROUNDING_S
        )
        moments = (self.idle_since, patience_at, now + self.left_s(now), now + _ROUNDING_S)  # the last: a window ends
        at = next(each for each in moments if each > now)
        if math.isinf(at) or at == self._looks_at:
            return None
        self._looks_at = at
        return at

    def opened(self, now: float) -> None:
        """Records that a round has been opened."""
        self._last = self._starts + now

    def _next(self, schedule: Schedule, now: float, last: float | None) -> float:
        at = schedule.opens(self._starts + now, last=last) - self._starts
        return now if at - now < _ROUNDING_S else at
