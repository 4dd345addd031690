"""Own heads are at most a point below the better of shared head and training alone, on small fleets of each kind."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.own_heads import GOAL, accuracy, kinds, rows

KINDS = {kind.name: kind for kind in kinds(None)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("digits, no features", (12, 20)),
        ("embeddings, values unchanged", (15, 20)),
        ("sensors", (20, 20)),
        ("series", (20, 20)),
        ("embeddings, alpha 0.5", (15, 20)),
        ("embeddings, 1 apart", (15, 20)),
        ("series, 1 apart", (20, 20)),
    ],
)
def test_own_heads_are_no_worse_than_what_they_are_made_of(name: str, size: tuple[int, int]) -> None:
    for row in rows(KINDS[name], size):
        assert row["to the better"] >= GOAL, row
        assert row["goal"] == "pass"


def test_a_class_counts_by_its_share() -> None:
    said, labels = np.array([0, 1, 1, 0]), np.array([0, 1, 1, 1])  # all of class 0 right, two thirds of class 1
    assert accuracy(said, labels, np.array([0.75, 0.25])) == pytest.approx(0.75 + 0.25 * 2 / 3)
