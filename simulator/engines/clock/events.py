"""The agenda of a virtual clock, its events for a log, and the outcome of a round."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from hushfleet.aggregator.rounds.policy import ClosingRule


class LogEvent(NamedTuple):
    """An event as the coordinator writes it; of `update` and `run`, what only a trained run knows is missing.

    `scenario` is what the schedule did, as the live engine writes it: `action` and `target`.
    """

    at_s: float
    event: str
    fields: dict[str, Any]


class EventQueue:
    """Calls handlers in the order of their time; what falls on one moment, in the order in which it was entered.

    `now` is in virtual seconds since the run's start, and never goes back.

    :param logging: whether events for a log are kept; a forecast has no use for them.
    """

    def __init__(self, *, logging: bool = False) -> None:
        self.now = 0.0
        self._logging = logging
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._log: list[tuple[float, int, LogEvent]] = []
        self._order = count()

    @property
    def next_s(self) -> float:
        """The moment of the next event; infinite without one."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, moment: float, handler: Callable[..., None], *arguments: Any) -> None:
        """Calls the handler then, or next where that is past."""
        heapq.heappush(self._heap, (moment, next(self._order), handler, arguments))

    def advance(self) -> None:
        """Lets the next thing happen."""
        moment, _, handler, arguments = heapq.heappop(self._heap)
        self.now = max(self.now, moment)
        handler(*arguments)

    def log(self, event: str, *, at: float | None = None, **fields: Any) -> None:
        """Notes an event of now, or of another moment."""
        if self._logging:
            moment = self.now if at is None else at
            heapq.heappush(self._log, (moment, next(self._order), LogEvent(moment, event, fields)))

    def logged(self) -> Iterator[LogEvent]:
        """Takes the events of all that has happened by now, in order of time."""
        while self._log and self._log[0][0] <= self.now:
            yield heapq.heappop(self._log)[2]


class Arrival(NamedTuple):
    """An update that was accepted.

    :param at_s: when.
    :param update_bytes: its predicted size.
    :param round: that it was trained for, which may be an earlier one in buffered rounds.
    """

    device: str
    at_s: float
    update_bytes: int
    round: int


@dataclass(frozen=True)
class ClockRound:
    """The outcome of a round; times in virtual seconds since the run's start.

    Every member of the cohort is in one of `arrivals` (accepted in time, in this order), `late` (committed and
    charged, but not accepted), `given_up` (ended by the close before anything was spent), `declined`, or `lost`
    (absent, or gone before it had committed).

    :param used: whether there were enough updates for a new global model.
    :param events: up to the close, in order of time; empty where nobody asked for them.
    :param stale: of buffered rounds, where the cohort is everybody: devices and rounds of the updates that were
        committed, and are too late for any buffer.
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
    """A round that is going on.

    :param arrivals: by device; of a buffered round by device and round, since a device may be there twice.
    :param declined: names, in the order in which they did.
    :param closing: it has been decided that it is over; what comes now is late.
    :param rests: it waits for its next window.
    """

    number: int
    opened_s: float
    cohort: list[str]
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    declined: dict[str, None] = field(default_factory=dict)
    closing: bool = False
    rests: bool = False

    @property
    def size(self) -> int:
        return len(self.cohort)


def stuck(current: OpenRound | None, number: int, present: int, least: int, rule: ClosingRule) -> str:
    """Says why a round never opens, or the open one never closes.

    :param number: of the next round, which `least` devices must be present for.
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
