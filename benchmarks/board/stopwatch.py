"""Where a round's time goes: calls of the product's own functions, each charged with what it does itself."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

OTHER = "the rest"
SECTIONS = ("gradients", "batches", "optimizer", "method", "noise", "codec", "signature", "store", "ledger", OTHER)


class Stopwatch:
    """Seconds by section, on the wall and of this thread's CPU; a call inside another is taken from the outer one's."""

    def __init__(self) -> None:
        self.wall_s: Counter[str] = Counter()
        self.cpu_s: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = (0.0, 0.0)

    def clear(self) -> None:
        self.wall_s.clear()
        self.cpu_s.clear()

    def watch(self, section: str, owner: Any, *names: str) -> None:
        """Replaces `owner`'s functions by timed ones."""
        for name in names:
            setattr(owner, name, self.timed(section, getattr(owner, name)))

    def timed(self, section: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._charge()
            self._open.append(section)
            try:
                return function(*args, **kwargs)
            finally:
                self._charge()
                self._open.pop()

        return call

    def _charge(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        if self._open:
            self.wall_s[self._open[-1]] += wall_s - self._since[0]
            self.cpu_s[self._open[-1]] += cpu_s - self._since[1]
        self._since = wall_s, cpu_s
