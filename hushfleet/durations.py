"""Reads and writes durations in the form of configuration files, such as `90d` and `30min`; aligned periods of time."""

from __future__ import annotations

import re
from typing import NamedTuple

from hushfleet.errors import format_value

_LONGEST_S = 1000 * 365.25 * 86400
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def duration_s(text: str) -> float:
    """Converts a text such as `90d` to seconds. Raises `ValueError` for any other text, zero, and over 1000 years.

    >>> duration_s("1.5h"), duration_s("90d")
    (5400.0, 7776000.0)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h|d|w)", text)
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise ValueError(
            f"{format_value(text)} is no duration: write a number above 0 and one of {', '.join(_SECONDS)}, as in "
            "30min, 24h or 90d, up to 1000 years"
        )
    return seconds


def describe_duration(seconds: float) -> str:
    """Returns a duration in words, in the largest unit (at most days) in which it is at least 1: `1.5 hours`.

    >>> describe_duration(5400), describe_duration(90)
    ('1.5 hours', '1.5 minutes')
    """
    units = {"day": 86400.0, "hour": 3600.0, "minute": 60.0, "second": 1.0}
    unit = next((unit for unit, length in units.items() if seconds >= length), "second")
    number = seconds / units[unit]
    count = f"{number:.3g}" if number < 999.5 else f"{number:.0f}"
    return f"{count} {unit}{'' if count == '1' else 's'}"


class Period(NamedTuple):
    """The moments from `start` up to, but not including, `stop`, in whole unix seconds. Each moment lies in exactly one
    period of a given length."""

    start: int
    stop: int

    @classmethod
    def of(cls, at: float, length_s: float) -> Period:
        """Returns the period of this length that contains `at`. Periods begin at multiples of the length."""
        length = int(length_s)
        start = int(at) // length * length
        return cls(start, start + length)

    def holds(self, at: float) -> bool:
        """Returns whether this moment lies in the period."""
        return self.start <= at < self.stop

    def meets(self, other: Period) -> bool:
        """Returns whether the two periods overlap."""
        return self.start < other.stop and other.start < self.stop
