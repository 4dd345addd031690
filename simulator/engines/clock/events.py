"""Defines the event queue of a virtual clock, its events for a log, and the outcome of a round."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from hushfleet.aggregator.rounds.policy import ClosingRule


class LogEvent(NamedTuple):
    """An event as the coordinator writes it; `update` and `run` lack the fields that only a trained run knows.

    A `scenario` event is an action of the schedule, as the live engine writes it: `action` and `target`.
    """

    at_s: float
    event: str
    fields: dict[str, Any]


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


class Arrival(NamedTuple):
    """An update that was accepted.

    :param at_s: when it was accepted.
    :param update_bytes: its predicted size.
    :param round: round that it was trained for; in buffered rounds it may be an earlier one.
    """

    device: str
    at_s: float
    update_bytes: int
    round: int


@dataclass(frozen=True)
class ClockRound:
    """The outcome of a round; times in virtual seconds since the run's start.

    Every member of the cohort is in one of `arrivals` (accepted in time, in this order), `late` (committed and
    charged, but not accepted), `given_up` (ended by the close before it was charged), `declined`, or `lost`
    (absent, or gone before it had committed).

    :param used: whether there were enough updates for a new global model.
    :param events: events up to the close, in order of time; empty without logging.
    :param stale: only in buffered rounds, where the cohort is the whole fleet: devices and rounds of the updates that
        were committed, and are too late for any buffer.
    """

    round: int
    opened_s: float
    closed_s: float
    cohort: tuple[str, ...]
    arrivals: tuple[Arrival, ...]
    late: tuple[str, ...]
    given_up: tuple[str, ...]
    declined: tuple[str, ...]
    lost: tuple[str, ...]
    extensions: int
    used: bool
    events: tuple[LogEvent, ...]
    stale: tuple[tuple[str, int], ...] = ()

    @property
    def wall_s(self) -> float:
        return self.closed_s - self.opened_s


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
