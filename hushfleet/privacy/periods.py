"""Aligned periods of time: each moment lies in exactly one period of a given length."""

from __future__ import annotations

from typing import NamedTuple


class Period(NamedTuple):
    """The moments from `start` up to, and without, `stop`; whole seconds, as unix time counts them."""

    start: int
    stop: int

    @classmethod
    def of(cls, at: float, length_s: float) -> Period:
        """Returns the period of this length that holds `at`. Periods begin at multiples of the length."""
        length = int(length_s)
        start = int(at) // length * length
        return cls(start, start + length)

    def holds(self, at: float) -> bool:
        """Whether this moment lies in it."""
        return self.start <= at < self.stop

    def meets(self, other: Period) -> bool:
        """Whether some moment lies in both."""
        return self.start < other.stop and other.start < self.stop
