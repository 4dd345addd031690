"""Shows the progress of long work: one redrawn line on a terminal; in a file or a pipe, a line every ten seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Event, Thread

from rich.console import ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.notebook import NotebookConsole
from hushfleet.progress import Work, under_way

EVERY_S = 10.0


@contextmanager
def moving(console: Console, what: RenderableType, line: Callable[[], str], *, stays: bool = False) -> Iterator[Event]:
    """Redraws `what` on a terminal and in a notebook. Elsewhere prints `line()` whenever nothing was printed for ten
    seconds, if it is not empty; who prints something sets the event.

    :param stays: its last state stays on the screen.
    """
    printed, ended = Event(), False
    if isinstance(console, NotebookConsole):
        with console.moving(what, stays=stays):
            yield printed
        return
    if console.is_terminal:
        with Live(what, console=console, transient=not stays, refresh_per_second=8):
            yield printed
        return

    def watch() -> None:
        while not ended:
            if printed.wait(EVERY_S):
                printed.clear()
            elif text := line():
                console.print(text, highlight=False, markup=False, soft_wrap=True)

    thread = Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield printed
    finally:
        ended = True
        printed.set()
        thread.join()


def show_progress(console: Console) -> AbstractContextManager[Event]:
    """Shows the work that `hushfleet.progress` lists as running."""
    return moving(console, _Line(), describe)


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
