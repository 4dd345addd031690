"""Records the progress of long work in this process, for displays (`hushfleet.aggregator.report.progress`).

Work that may take longer than a few seconds reports here. Without a display nothing is shown, and the cost is small.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(eq=False)
class Work:
    """A piece of work that takes a while.

    :param what: a description, such as "loading digits".
    :param total: the number of parts; None if it is not known.
    :param done: the number of finished parts, including those that an earlier process finished.
    :param alike: whether all parts take about the same time; if not, no remaining time is shown.
    """

    what: str
    total: int | None = None
    done: int = 0
    alike: bool = True
    began: float = field(default_factory=time.monotonic)
    _warm: tuple[float, int] | None = None

    def count(self, parts: int = 1) -> None:
        """Records that `parts` more parts are finished."""
        self.done += parts
        if self._warm is None:
            self._warm = time.monotonic(), self.done
        for listener in listeners:
            listener()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float | None:
        """Estimated seconds left, from the parts after the first (the warm-up); None until two of them are done."""
        now = time.monotonic()
        if self.total is None or not self.alike or self._warm is None or self.done - self._warm[1] < 2:
            return None
        since, before = self._warm
        return (now - since) * (self.total - self.done) / (self.done - before)


under_way: list[Work] = []
"""The work of this process; work that is part of other work comes after it."""


listeners: list[Callable[[], None]] = []
"""Functions that are called after each part, by the code that does the part: they tell a supervisor that this process
lives."""


@contextmanager
def doing(what: str, *, total: int | None = None, alike: bool = True) -> Iterator[Work]:
    """Marks the work as under way inside this context; count its parts with `work.count()`."""
    work = Work(what, total, alike=alike)
    under_way.append(work)
    try:
        yield work
    finally:
        under_way.remove(work)


def counted(items: Iterable[Item], what: str, *, total: int) -> Iterator[Item]:
    """Yields the items; the time until the next item is requested counts as work on this one."""
    with doing(what, total=total) as work:
        for item in items:
            yield item
            work.count()
