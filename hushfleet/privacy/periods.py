"""Aligned periods of time: each moment lies in exactly one period of a given length."""

from __future__ import annotations

from typing import NamedTuple


class Period(NamedTuple):
    """The moments from `start` up to, but not including, `stop`, in whole unix seconds."""

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
