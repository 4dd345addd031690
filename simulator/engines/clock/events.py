"""Defines the event queue of a virtual clock, its events for a log, and the outcome of a round."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hushfleet.aggregator.rounds.policy import ClosingRule
from hushfleet.simulator.world.outcomes import Arrival, LogEvent


class EventQueue:
    """Calls handlers in the order of their time; handlers of the same time in the order of their entry.

    `now` is in virtual seconds since the run's start, and never decreases.

    :param logging: whether events for a log are kept; a forecast does not need them.
    """

    def __init__(self, *, logging: bool = False) -> None:
        self.now = 0.0
        self._logging = logging
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._log: list[tuple[float, int, LogEvent]] = []
        self._order = count()

    @property
    def next_s(self) -> float:
        """The time of the next event; infinite without one."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, moment: float, handler: Callable[..., None], *arguments: Any) -> None:
        """Calls the handler at this time, or next if the time is past."""
        heapq.heappush(self._heap, (moment, next(self._order), handler, arguments))

    def advance(self) -> None:
        """Runs the next handler."""
        moment, _, handler, arguments = heapq.heappop(self._heap)
        self.now = max(self.now, moment)
        handler(*arguments)

    def log(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        """Logs an event of now, or of another time."""
        if self._logging:
            moment = self.now if at is None else at
            heapq.heappush(self._log, (moment, next(self._order), LogEvent(moment, event, fields)))

    def logged(self) -> Iterator[LogEvent]:
        """Removes and yields the logged events up to now, in order of time."""
        while self._log and self._log[0][0] <= self.now:
            yield heapq.heappop(self._log)[2]


@dataclass
class OpenRound:
    """A round that is open.

    :param arrivals: by device; in a buffered round by device and round, because a device may be there twice.
    :param declined: names, in the order in which the devices declined, and their codes.
    :param closing: the close has been decided; an update that arrives now is late.
    :param rests: the round waits for its next window.
    """

    number: int
    opened_s: float
    cohort: list[str]
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    declined: dict[str, str] = field(default_factory=dict)
    closing: bool = False
    rests: bool = False

    @property
    def size(self) -> int:
        return len(self.cohort)


def stuck(current: OpenRound | None, number: int, present: int, least: int, rule: ClosingRule) -> str:
    """Returns an error text: why a round never opens, or why the open one never closes.

    :param number: number of the next round, for which `least` devices must be present.
    """
    if current is None:
        return (
            f"round {number} never opens: {present} devices are present, and {least} are needed; set round.min_devices "
            "to what can be there at once, or look at [schedule]"
        )
    if rule.rules.buffered:
        return (
            f"round {current.number} never closes: {rule.accepted} updates have come, and round.buffer_size = "
            f"{rule.rules.buffer_size}"
        )
    return (
        f"round {current.number} never closes: after {rule.extensions + 1} deadlines {rule.accepted} updates of "
        f"{current.size} devices have come, and round.min_updates = {rule.rules.min_updates}"
    )
