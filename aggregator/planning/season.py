"""Computes when the seasons of a task begin and how many a lifetime limit pays for; says until when it learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from hushfleet.privacy.charge import Charge
from hushfleet.privacy.spending import rounds_left

MOST_SEASONS = 10_000
_DAY = timedelta(days=1)


@dataclass(frozen=True)
class SeasonCalendar:
    """The beginnings of the seasons of a task. Moments are unix seconds, and seasons are numbered from 1.

    :param first: when the first season began.
    :param period: length of a season. Whole days are calendar days: each season begins at the same time of day.
    :param zone: the name of a time zone.
    """

    first: float
    period: timedelta
    zone: str

    def begins(self, number: int) -> float:
        """Returns when a season begins, which is when the one before ends; infinity after the year 9998."""
        try:
            if self.period % _DAY:
                return self.first + (number - 1) * self.period.total_seconds()
            zone = ZoneInfo(self.zone)
            shown = datetime.fromtimestamp(self.first, zone).replace(tzinfo=None, fold=0)
            later = shown + (number - 1) * self.period
            return self.first if number == 1 else later.replace(tzinfo=zone).timestamp()
        except (OverflowError, ValueError):
            return math.inf

    def number(self, now: float) -> int:
        """Returns the number of the season at `now`; 1 also before the first."""
        number = max(
            1, int((now - self.first) / self.period.total_seconds())
        )  # never too large, because seasons count from 1
        while self.begins(number + 1) <= now:
            number += 1
        return number


def seasons_paid(spent: Sequence[Charge], season: Charge, *, delta: float, lifetime: float) -> int | None:
    """Returns how many more seasons stay within a lifetime limit; None: no limit, or more than `MOST_SEASONS`.

    :param spent: charges of the seasons before.
    :param season: charge of all rounds of a season.
    """
    if math.isinf(lifetime):
        return None
    paid = rounds_left(spent, season, delta=delta, limit=lifetime, at_most=MOST_SEASONS + 1)
    return paid if paid <= MOST_SEASONS else None


def learns_until(at: float | None, *, now: float, zone: str) -> str:
    """Says until when a fleet learns: `learns until 14 August 2028; then each board goes on alone`.

    :param at: when the last season ends that the lifetime limit pays for, unix seconds; None: none is the last.
    """
    if at is None or math.isinf(at):
        return "learns season after season: no limit over everything ends it"
    day = day_text(at, zone)
    if at <= now:
        return f"has learned until {day}; each board goes on alone"
    return f"learns until {day}; then each board goes on alone"


def day_text(at: float, zone: str) -> str:
    """Returns the day of a moment: `14 August 2028`."""
    moment = datetime.fromtimestamp(at, ZoneInfo(zone))
    return f"{moment.day} {moment:%B %Y}"
