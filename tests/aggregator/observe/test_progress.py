"""What is under way, in words, and that it is said."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from hushfleet.aggregator.observe import progress
from hushfleet.progress import Work, counted, doing, under_way


@pytest.mark.parametrize(
    ("work", "gone_s", "words"),
    [
        (Work("reading digits"), 12, "reading digits: 12 s"),
        (Work("rounds", total=20), 5, "rounds: 0 of 20, 5 s"),
        (Work("rounds", total=20, done=5), 30, "rounds: 5 of 20, 30 s, about 90 s left"),
        (Work("rounds", total=100, done=1), 300, "rounds: 1 of 100, 5 min, about 8.2 h left"),
        (Work("cells", about_s=600), 60, "cells: 60 s, about 9 min left"),
        (Work("cells", about_s=30), 60, "cells: 60 s"),
    ],
)
def test_in_words(work: Work, gone_s: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: work.began + gone_s)
    monkeypatch.setattr(progress, "under_way", [work])
    assert progress.in_words() == words


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
    with progress.shown(Console(file=out, force_terminal=terminal, width=100)), doing("exporting", total=4) as work:
        work.done = 1
        while "exporting: 1 of 4" not in out.getvalue():  # pytest's own time limit ends a silent one
            time.sleep(0.01)
