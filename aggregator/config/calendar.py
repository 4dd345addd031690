"""Computes from a schedule when the next round may open, and when its window ends. It reads no clock.

A window begins when local time first shows its first minute or a later one, and ends in the same way. Therefore a
window within the missing hour is empty on the day when clocks go forward, and is open once on the day when they go
back.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from hushfleet.aggregator.config.schedule import ScheduleSection

_DAY = timedelta(days=1)
_LONGEST_GAP = 15  # days from one window to the next, if a weekly one is in a missing hour
_NAMES = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


class OpenWindow(NamedTuple):
    """A time in which rounds are open: from `begins` to before `ends`."""

    begins: datetime
    ends: datetime


class Schedule:
    """A section `[schedule]` in its time zone. Moments are unix seconds."""

    def __init__(self, section: ScheduleSection) -> None:
        self.zone = section.timezone or local_zone()
        self._zone, self._section = ZoneInfo(self.zone), section
        first, _, last = (section.between or "00:00-00:00").partition("-")
        self._first, self._last = time.fromisoformat(first), time.fromisoformat(last)
        midnight = date.min
        length = datetime.combine(midnight, self._last) - datetime.combine(midnight, self._first)
        self._length = length if length > timedelta() else length + _DAY
        self._days = {_NAMES.index(day) for day in section.days} or set(range(7))
        self._always = section.between is None and not section.days

    def opens(self, now: float, *, last: float | None) -> float:
        """Returns when the next round may open: `now` or later, and infinity if none opens any more.

        :param last: when the last one opened; None before the first.
        """
        moment = max(_utc(now), self._due(last))
        if not self._always:
            windows = (each for each in self._windows(self._day(moment) - _DAY) if each.ends > moment)
            moment = max(moment, next(windows).begins)
        until = self._section.until
        if until is not None and self._day(moment) > until:
            return math.inf
        return now if moment <= _utc(now) else moment.timestamp()  # a datetime is rounded to microseconds

    def ends(self, now: float) -> float:
        """Returns when the window that is open now ends: `now` if none is, infinity if there are no windows."""
        if self._always:
            return math.inf
        end = moment = _utc(now)
        for window in self._windows(self._day(moment) - _DAY):
            if window.begins > end:
                break
            end = max(end, window.ends)  # a window that follows directly extends it
        return now if end == moment else end.timestamp()

    def _due(self, last: float | None) -> datetime:
        """Returns the moment at which the next round becomes due, whether or not a window is open then."""
        period = self._section.period
        if last is None:
            return datetime.min.replace(tzinfo=UTC)
        opened = _utc(last)
        if not period or period % _DAY:
            return opened + period
        shown = opened.astimezone(self._zone).replace(tzinfo=None)
        if self._always:
            return self._first_at(shown + period)
        day = self._day(opened)
        past = [each for each in self._windows(day - _LONGEST_GAP * _DAY, day) if each.begins <= opened]
        if past:
            day = self._day(past[-1].begins)
        # a changed clock may have moved the opening to a time before its window
        earliest = self._first_at(shown + period - self._length)
        return max(earliest, self._first_at(datetime.combine(day + period, self._first)))

    def _windows(self, first: date, last: date | None = None) -> Iterator[OpenWindow]:
        """Yields the windows that begin on these days; without a last day, for a month."""
        number = (last - first).days if last is not None else 2 * _LONGEST_GAP
        for day in (first + n * _DAY for n in range(number + 1)):
            if day.weekday() in self._days:
                end = day if self._last > self._first else day + _DAY
                moments = (datetime.combine(day, self._first), datetime.combine(end, self._last))
                window = OpenWindow(*map(self._first_at, moments))
                if window.ends > window.begins:
                    yield window

    def _first_at(self, shown: datetime) -> datetime:
        """Returns the first moment at which local time is this time or a later one."""
        moment = shown.replace(tzinfo=self._zone).astimezone(UTC)
        if self._shown(moment) == shown:
            return moment
        early = shown.replace(tzinfo=self._zone, fold=1).astimezone(UTC)  # clocks go forward between the two
        minutes = range(int((moment - early) / timedelta(minutes=1)) + 1)
        found = bisect_left(minutes, True, key=lambda n: self._shown(early + timedelta(minutes=n)) >= shown)
        return (early + timedelta(minutes=found)).replace(second=0, microsecond=0)

    def _shown(self, moment: datetime) -> datetime:
        return moment.astimezone(self._zone).replace(tzinfo=None, fold=0)

    def _day(self, moment: datetime) -> date:
        return moment.astimezone(self._zone).date()


def _utc(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def local_zone() -> str:
    """Returns the name of this machine's time zone."""
    name = os.environ.get("TZ", "").lstrip(":") or os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    try:
        return ZoneInfo(name).key
    except (ValueError, KeyError, OSError):  # empty, unknown, or a folder
        return "UTC"


def moment_text(at: float, *, now: float, zone: str) -> str:
    """Describes a future moment: `tomorrow 01:00 (Europe/Berlin)`."""
    moment, today = (datetime.fromtimestamp(each, ZoneInfo(zone)) for each in (at, now))
    days = (moment.date() - today.date()).days
    day = {0: "today", 1: "tomorrow"}.get(days) or f"{moment:%a} {moment.day} {moment:%b}"
    day += f" {moment.year}" if moment.year != today.year and days > 1 else ""
    return f"{day} {moment:%H:%M} ({zone})"
