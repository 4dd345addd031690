"""The figure of a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pandas as pd

from hushfleet.simulator.studies.reproduce.draw import with_own_runs


def block(group: str, **runs: list[str]) -> Any:
    """Rows and the digests of their runs, all of one accuracy, as where nothing is learnt; none of an empty list."""
    lines = [(row, 10.0 if digests else None, digests) for row, digests in runs.items()]
    places = pd.DataFrame(lines, columns=["row", "ours", "runs"])
    return SimpleNamespace(group=SimpleNamespace(id=group), places=places)


def test_a_reading_with_nothing_but_the_runs_of_another_is_not_drawn_again() -> None:
    whole = block("own", base=["a0", "a1"], ours=["b0"])
    shares = block("own", base=["a0", "a1"], ours=[])
    adds = block("own", base=["a0", "a1"], ours=["c0"])
    other = block("common", base=["a0", "a1"])
    empty = block("own", base=[])
    assert with_own_runs(cast(Any, [whole, shares, adds, other, empty])) == [whole, adds, other]
