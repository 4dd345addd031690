"""Progress of long work in this process, for displays (`hushfleet.aggregator.observe.progress`).

Work that may take longer than a few seconds reports here. Without a display nothing is shown and little is done.
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
    """Something that takes a while.

    :param what: in words, as in "loading digits".
    :param total: how many parts it has; None where that is not known.
    :param done: parts that are finished, also by an earlier process.
    :param alike: whether each part takes about as long; if not, no time is said.
    """

    what: str
    total: int | None = None
    done: int = 0
    alike: bool = True
    began: float = field(default_factory=time.monotonic)
    _warm: tuple[float, int] | None = None

    def count(self, parts: int = 1) -> None:
        """So many more parts are finished."""
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
        """Seconds that are left, by the parts after the first, which warms up; None until there are two of them."""
        now = time.monotonic()
        if self.total is None or not self.alike or self._warm is None or self.done - self._warm[1] < 2:
            return None
        since, before = self._warm
        return (now - since) * (self.total - self.done) / (self.done - before)


under_way: list[Work] = []
"""The work of this process, what is part of something else after it."""


listeners: list[Callable[[], None]] = []
"""Called after each part, by whoever does it: for a supervisor that must hear that this process lives."""


@contextmanager
def doing(what: str, *, total: int | None = None, alike: bool = True) -> Iterator[Work]:
    """The work is under way inside of this context; count its parts by `work.count()`."""
    work = Work(what, total, alike=alike)
    under_way.append(work)
    try:
        yield work
    finally:
        under_way.remove(work)


def counted(items: Iterable[Item], what: str, *, total: int) -> Iterator[Item]:
    """The items; the time until the next one is asked for is work on this one."""
    with doing(what, total=total) as work:
        for item in items:
            yield item
            work.count()
