"""What is under way, in words, and that it is said."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from hushfleet.aggregator.report import progress
from hushfleet.progress import Work, counted, doing, under_way


@pytest.mark.parametrize(
    ("total", "began_with", "finished_at", "now_s", "words"),
    [
        (None, 0, [], 12, "reading: 12 s"),
        (20, 0, [], 5, "reading: 0 of 20, 5 s"),
        (20, 0, [10], 30, "reading: 1 of 20, 30 s"),  # of one part that warmed up nothing follows
        (20, 0, [10, 12], 12, "reading: 2 of 20, 12 s"),
        (20, 0, [10, 12, 14], 14, "reading: 3 of 20, 14 s, about 34 s left"),
        (20, 0, [300, 302, 304, 306], 306, "reading: 4 of 20, 5 min, about 32 s left"),
        (20, 15, [10, 12, 14], 14, "reading: 18 of 20, 14 s, about 4 s left"),  # a run that goes on
        (20, 0, list(range(1, 21)), 20, "reading: 20 of 20, 20 s"),
    ],
)
def test_in_words(
    total: int | None,
    began_with: int,
    finished_at: list[float],
    now_s: float,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    work = Work("reading", total, done=began_with, began=0.0)
    for now in finished_at:  # noqa: B007 - the clock reads it
        work.count()
    now = now_s
    monkeypatch.setattr(progress, "under_way", [work])
    assert progress.describe() == words


def test_parts_that_are_not_alike_tell_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work("unpacking", total=20, alike=False, began=0.0)
    for _ in range(9):
        work.count()
    monkeypatch.setattr(time, "monotonic", lambda: 9.0)
    monkeypatch.setattr(progress, "under_way", [work])
    assert progress.describe() == "unpacking: 9 of 20, 9 s"


def test_work_in_work_is_said_from_the_outside_in_and_ends_with_its_context() -> None:
    seen = []

    def run() -> None:
        with doing("a run"):
            for item in counted([1, 0], "points", total=2):
                seen.append([(work.what, work.done) for work in under_way])
                1 / item

    with pytest.raises(ZeroDivisionError):
        run()
    assert seen == [[("a run", 0), ("points", 0)], [("a run", 0), ("points", 1)]]
    assert under_way == []


@pytest.mark.parametrize("terminal", [False, True])
def test_long_work_is_shown_in_a_pipe_and_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    out = io.StringIO()
    with (
        progress.show_progress(Console(file=out, force_terminal=terminal, width=100)),
        doing("exporting", total=4) as work,
    ):
        work.done = 1
        while "exporting: 1 of 4" not in out.getvalue():  # pytest's own time limit ends a silent one
            time.sleep(0.01)
