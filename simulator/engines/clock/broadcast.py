"""When the global model reaches whom: wants are gathered for a moment, then each chunk is broadcast once for all.

What is broadcast while a device waits for the rest of an earlier pass comes to it as well, and costs its link.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from hushfleet.simulator.engines.clock.device_time import WANTS_S


class Broadcasts:
    """The passes over one blob. Aggregator and broker send at once what is due; links are the bottleneck."""

    def __init__(self) -> None:
        self._starts: list[float] = []

    def want(self, at: float) -> float:
        """When the pass starts that answers a want that arrives at `at`; a new one, or one that still gathers."""
        place = bisect_left(self._starts, at)
        if place < len(self._starts) and self._starts[place] - WANTS_S <= at:
            return self._starts[place]
        start = at + WANTS_S
        insort(self._starts, start)
        return start

    def passes(self, after: float, before: float) -> int:
        """How many passes start after one moment and before another."""
        return max(0, bisect_left(self._starts, before) - bisect_right(self._starts, after))
