"""Formats seconds as readable text."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Returns the duration as text, in days, hours, minutes or seconds."""
    for unit, unit_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
