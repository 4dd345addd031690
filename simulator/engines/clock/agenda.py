"""What happens when on a virtual clock: a heap of moments, and the log of what has happened."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from hushfleet.simulator.engines.clock.outcome import Note


class Agenda:
    """:param noting: whether notes are kept; a forecast has no use for them.

    `now` is in virtual seconds since the run's start, and never goes back. What falls on one moment happens in the
    order in which it was entered.
    """

    def __init__(self, *, noting: bool = False) -> None:
        self.now = 0.0
        self._noting = noting
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._notes: list[tuple[float, int, Note]] = []
        self._order = count()

    @property
    def next_s(self) -> float:
        """When something happens next; infinite if nothing does."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, moment: float, handler: Callable[..., None], *arguments: Any) -> None:
        """Calls the handler then, or next where that is past."""
        heapq.heappush(self._heap, (moment, next(self._order), handler, arguments))

    def advance(self) -> None:
        """Lets the next thing happen."""
        moment, _, handler, arguments = heapq.heappop(self._heap)
        self.now = max(self.now, moment)
        handler(*arguments)

    def note(self, moment: float, event: str, **fields: Any) -> None:
        if self._noting:
            heapq.heappush(self._notes, (moment, next(self._order), Note(moment, event, fields)))

    def notes_until(self, moment: float) -> Iterator[Note]:
        """Takes the notes of all that had happened by then, in order of time."""
        while self._notes and self._notes[0][0] <= moment:
            yield heapq.heappop(self._notes)[2]
