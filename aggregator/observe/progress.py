"""Shows the progress of long work: one redrawn line on a terminal; in a file or a pipe, a line every ten seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from hushfleet.aggregator.observe.console import Console
from hushfleet.aggregator.observe.notebook import NotebookConsole
from hushfleet.progress import Work, under_way

EVERY_S = 10.0


@contextmanager
def show_progress(console: Console) -> Iterator[None]:
    """Shows the work that `hushfleet.progress` lists as running."""
    if isinstance(console, NotebookConsole):
        with console.moving(_Line(), stays=False):
            yield
    elif console.is_terminal:
        with Live(_Line(), console=console, transient=True, refresh_per_second=8):
            yield
    else:
        with Heartbeat(console, describe):
            yield


class Heartbeat:
    """A context manager; inside it a line is printed whenever nothing was printed for ten seconds.

    :param line: returns the line; an empty text prints nothing.
    """

    def __init__(self, console: Console, line: Callable[[], str]) -> None:
        self._console, self._line = console, line
        self._printed, self._stop = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def note_output(self) -> None:
        """Notes that something else was printed."""
        self._printed.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._printed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop:
            if self._printed.wait(EVERY_S):
                self._printed.clear()
            elif text := self._line():
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def describe() -> str:
    """Formats the running work and how long it will take: "training alone: 12 of 100, 34 s, about 4 min left"."""
    return "; ".join(map(_described, tuple(under_way)))


def _described(work: Work) -> str:
    left = work.left_s
    parts = [
        *([] if work.total is None else [f"{work.done} of {work.total}"]),
        format_time(work.elapsed_s),
        *([] if not left else [f"about {format_time(left)} left"]),
    ]
    return f"{work.what}: {', '.join(parts)}"


def format_time(seconds: float) -> str:
    """Formats seconds: `34 s`, `12 min`, `2.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class _Line:
    """The line of `describe` for a terminal, with a progress bar if the work has a known number of parts."""

    def __init__(self) -> None:
        self._spinner = Spinner("dots")

    def __rich_console__(self, console: object, options: ConsoleOptions) -> RenderResult:
        if not under_way:
            return
        row = Table.grid(padding=(0, 1))
        work = next((work for work in reversed(tuple(under_way)) if work.total), None)
        bar = [] if work is None else [ProgressBar(work.total or 1, work.done, width=24)]
        row.add_row(self._spinner, describe(), *bar)
        yield row
