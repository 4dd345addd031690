"""Defines the virtual clock of a world: a queue of actions, and actors that act when they are woken."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count


class WorldClock:
    """Calls actions in the order of their time; actions of the same time in the order in which they were given.

    A call returns the seconds since the world's start, which never decrease.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def __call__(self) -> float:
        return self.now

    @property
    def next_s(self) -> float:
        """The time of the next action; infinite without one."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Calls the action at this time, or next if the time is past."""
        heapq.heappush(self._heap, (moment, next(self._order), action))

    def advance(self) -> None:
        """Moves to the next action, and calls it."""
        moment, _, action = heapq.heappop(self._heap)
        self.now = max(self.now, moment)
        action()


class Actor:
    """Something with a work loop, which acts when something has come, or when its time is due.

    :param act: does all that is due, and returns when it has to act again; infinite: when something comes.
    """

    def __init__(self, clock: WorldClock, act: Callable[[], float]) -> None:
        self._clock, self._act = clock, act
        self._due_at = math.inf
        self.busy_until = 0.0
        """What comes earlier waits until then."""
        self.is_off = False

    def wake(self, at: float = 0.0) -> None:
        """Lets it act at this time, or now if the time is past; an earlier due time stays."""
        at = max(at, self.busy_until, self._clock.now)
        if at < self._due_at and not self.is_off:
            self._due_at = at
            self._clock.at(at, lambda: self._run(at))

    def _run(self, at: float) -> None:
        if at != self._due_at or self.is_off:
            return  # it has acted since, or acts later
        self._due_at = math.inf
        self.wake(self._act())
