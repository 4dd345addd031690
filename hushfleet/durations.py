"""Durations as people write them: `90d`, `24h`, `30min`."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_NAMES = {"w": "week", "d": "day", "h": "hour", "min": "minute", "s": "second"}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)")


def duration_s(text: str) -> float:
    """Returns the seconds of a duration. Raises `ValueError` that names the accepted form.

    Example:

        >>> duration_s("90d"), duration_s("30min")
        (7776000.0, 1800.0)
    """
    match = _FORM.fullmatch(text.strip())
    if match is None or not (seconds := float(match[1]) * _SECONDS[match[2]]):
        raise ValueError(f"{text!r}: must be a number above 0 and a unit (s, min, h, d, w), such as 90d or 24h")
    return seconds


def describe_duration(seconds: float) -> str:
    """Returns a duration in words, in the largest unit but weeks of which it has one: `90 days`, `1.5 hours`."""
    unit = next((unit for unit in ("d", "h", "min") if seconds >= _SECONDS[unit]), "s")
    count = f"{seconds / _SECONDS[unit]:.3g}"
    return f"{count} {_NAMES[unit]}{'' if count == '1' else 's'}"
