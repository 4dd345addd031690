"""`[schedule]` of the task file: when rounds open, by calendar and wall clock."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from datetime import date, timedelta
from functools import cache
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, available_timezones

from msgspec import Meta

from hushfleet.aggregator.config import rules
from hushfleet.errors import format_value
from hushfleet.schema import Checked

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_UNITS = {"min": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]"
Every = Annotated[
    str,
    Meta(
        pattern=r"^[1-9][0-9]{0,3}(min|h|d|w)\Z",
        description='a whole number with min, h, d or w, such as "24h" or "7d"',
    ),
]
Between = Annotated[
    str, Meta(pattern=rf"^{_TIME}-{_TIME}\Z", description='two times from 00:00 to 23:59, such as "01:00-05:00"')
]


@dataclass(frozen=True, kw_only=True)
class ScheduleSection(Checked):
    """`[schedule]`: when rounds open. Left out, a round opens as soon as the one before is closed and enough devices
    are present.

    :param every: the time from one opening to the next, such as `"24h"` or `"7d"`. Whole days are calendar days: with
        `between` or `days`, a round opens in the first window this number of days later, no matter how late in its
        window the last round opened; without them, at the same time of day.
    :param between: the window in which rounds are open, such as `"01:00-05:00"`; it may cross midnight. A round that
        has too few updates when its window ends is continued in the next window. Devices do not train between windows.
    :param days: the days on which a window begins, such as `["sat", "sun"]`; without `between` a window is the whole
        day.
    :param until: the last day on which a round opens; then the task ends.
    :param timezone: of these times, such as `"Europe/Berlin"`; left out, the aggregator's.
    :param after_new: a device skips a round while it has fewer new labelled samples than this since its last update, if
        its owner allows it to reveal this (`limits.tell_new` in DEVICE.toml); all others take part in any case, because
        skipping a round would reveal how many they have (docs/privacy.md, "New samples").
    """

    every: Every | None = None
    between: Between | None = None
    days: tuple[Day, ...] = ()
    until: Annotated[date, Meta(description="a date, such as 2027-06-30")] | None = None
    timezone: str | None = None
    after_new: Annotated[int, Meta(ge=0, le=1_000_000)] = 0

    rules = rules.SCHEDULE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timezone is not None:
            check_zone(self.timezone)

    @property
    def period(self) -> timedelta:
        """`every` as a duration; zero without it."""
        return timedelta() if self.every is None else period_of(self.every)

    @property
    def is_set(self) -> bool:
        """Whether rounds wait for a time."""
        return bool(self.every or self.between or self.days or self.until)


def period_of(every: str) -> timedelta:
    """Returns a text such as `24h` as a duration."""
    unit = every.lstrip("0123456789")
    return int(every.removesuffix(unit)) * _UNITS[unit]


@cache
def known_zones() -> frozenset[str]:
    """Returns the names of all time zones, for which the system's folders are read once."""
    return frozenset(available_timezones())


def check_zone(name: str) -> ZoneInfo:
    """Returns the time zone of that name. Raises `ValueError` for a name that is not known."""
    known = known_zones()
    if name in known:
        return ZoneInfo(name)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(close)}?" if close else ', such as "Europe/Berlin" or "UTC"'
    raise ValueError(f"timezone = {format_value(name)}: must be the name of a time zone{hint}")
