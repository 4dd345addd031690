"""The figure of a table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pandas as pd

from hushfleet.simulator.studies.reproduce.draw import _drawn


def block(group: str, **ours: list[float]) -> Any:
    """Rows and their accuracies by seed; none of an empty list."""
    lines = [(row, sum(values) / len(values) if values else None, values) for row, values in ours.items()]
    places = pd.DataFrame(lines, columns=["row", "ours", "values"])
    return SimpleNamespace(group=SimpleNamespace(id=group), places=places)


def test_a_reading_with_nothing_but_the_runs_of_another_is_not_drawn_again() -> None:
    whole = block("own", base=[50.0, 52.0], ours=[60.0])
    shares = block("own", base=[50.0, 52.0], ours=[])
    adds = block("own", base=[50.0, 52.0], ours=[61.0])
    other = block("common", base=[50.0, 52.0])
    empty = block("own", base=[])
    assert _drawn(cast(Any, [whole, shares, adds, other, empty])) == [whole, adds, other]
