"""The figure of a table."""

from __future__ import annotations

import pandas as pd

from hushfleet.simulator.studies.reproduce.draw import with_own_runs

BLOCKS: list[tuple[str, dict[str, list[str]]]] = [
    ("own", {"base": ["a0", "a1"], "ours": ["b0"]}),
    ("own", {"base": ["a0", "a1"]}),
    ("own", {"base": ["a0", "a1"], "ours": ["c0"]}),
    ("common", {"base": ["a0", "a1"]}),
]


def test_a_reading_with_nothing_but_the_runs_of_another_is_not_drawn_again() -> None:
    """Groups and the digests of their runs, by row."""
    lines = [(at, group, *run) for at, (group, runs) in enumerate(BLOCKS) for run in runs.items()]
    drawn = with_own_runs(pd.DataFrame(lines, columns=["block", "group", "row", "runs"]))
    assert [block.block.unique().tolist() for block in drawn] == [[0], [2], [3]]
