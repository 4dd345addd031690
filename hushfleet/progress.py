"""What is under way in this process, for whoever shows it (`hushfleet.aggregator.observe.progress`).

Whatever may take longer than a few seconds says so. Nothing is shown, and next to nothing done, where nobody looks.
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
    :param about_s: seconds that it usually takes, where there are no parts to count.
    :param done: parts that are finished.
    """

    what: str
    total: int | None = None
    about_s: float | None = None
    done: int = 0
    began: float = field(default_factory=time.monotonic)

    def count(self, parts: int = 1) -> None:
        """So many more parts are finished."""
        self.done += parts
        for listener in listeners:
            listener()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float | None:
        """Seconds that are left; None where nothing can be said."""
        if self.total is not None and self.done:
            return self.elapsed_s * (self.total - self.done) / self.done
        return None if self.about_s is None else max(0.0, self.about_s - self.elapsed_s)


under_way: list[Work] = []
"""The work of this process, what is part of something else after it."""


listeners: list[Callable[[], None]] = []
"""Called after each part, by whoever does it: for a supervisor that must hear that this process lives."""


@contextmanager
def doing(what: str, *, total: int | None = None, about_s: float | None = None) -> Iterator[Work]:
    """The work is under way inside of this context; count its parts by `work.count()`."""
    work = Work(what, total, about_s)
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
