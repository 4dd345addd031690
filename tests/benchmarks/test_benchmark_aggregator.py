"""`benchmarks/aggregator.py` with tiny cohorts, and the turns that all of its cells take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import aggregator
from benchmarks.bursts import in_turns

MODEL = "digits-cnn"


@pytest.mark.slow
def test_every_row_is_measured(monkeypatch: pytest.MonkeyPatch, figures_of: Callable[..., Any]) -> None:
    real_run = aggregator.run_cell

    def run_here(label: str, model: str, cohort: int, box_s: float, options: argparse.Namespace) -> dict[str, Any]:
        """Every cell is real, only its process is this one for most."""
        work, codec = aggregator.ROWS[label]
        if work in ("flower", "add"):
            return real_run(label, model, cohort, box_s, options)
        return aggregator.measure_cell(work, model, codec, cohort, box_s)

    monkeypatch.setattr(aggregator, "run_cell", run_here)
    shown = figures_of(aggregator.main, f"--model {MODEL} --cohorts 6 --box-s 0.2 --peers-python none-such")
    *cells, decoded, accepted = shown["cells"]
    assert [cell["row"] for cell in cells] == list(aggregator.ROWS)
    for cell in (*cells, decoded, accepted):
        if cell["row"] == aggregator.FLOWER:
            assert cell["missing"] == "FileNotFoundError"
            continue
        assert 0 < cell["updates"] <= cell["cohort"] == 6
        assert cell["updates_per_s"] > 0
        assert cell["float32_gb_s"] == pytest.approx(4e-9 * 4890 * cell["updates_per_s"])
        assert cell["peak_mib"] >= cell["grown_mib"] >= 0
        assert ("of_decoder" in cell) == cell["row"].startswith("decode")


def test_flower_is_not_run_where_it_would_take_too_much_memory() -> None:
    options = argparse.Namespace(most_gib=0.001, peers_python="none", box_s=1.0)
    cell = aggregator.run_cell(aggregator.FLOWER, "fashion-mnist-cnn", 1000, 1.0, options)
    assert cell == {"missing": "would hold 13 GiB"}


def test_bursts_take_all_updates_once_and_stop_when_time_is_up() -> None:
    taken: list[int] = []

    def work(first: int, count: int) -> float:
        taken.extend(range(first, first + count))
        return 0.001 * count

    figures = in_turns(work, lambda: 2.0, updates=500, value_bytes=10**6, box_s=60.0)
    assert taken == list(range(500))
    assert (figures["updates"], figures["copy_gb_s"]) == (500, 2.0)
    assert figures["updates_per_s"] == pytest.approx(1000)
    assert figures["float32_gb_s"] == pytest.approx(1.0)
    assert figures["of_copy"] == pytest.approx(0.5)
    assert in_turns(work, lambda: 2.0, updates=10**9, value_bytes=1, box_s=0.05)["updates"] < 10**9
