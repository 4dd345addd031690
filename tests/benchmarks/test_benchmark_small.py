"""The smaller benchmarks, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks import audit_methods, clock_against_live, liars


@pytest.mark.slow
def test_the_audit_has_a_claim_and_a_bound_for_each_game(figures_of: Callable[..., Any]) -> None:
    found = figures_of(audit_methods.main, "--methods dp-fedavg --trials 100 --canaries 200")["methods"]["dp-fedavg"]
    assert set(found) >= set(audit_methods.COLUMNS)
    for finding in found.values():
        assert finding["verdict"] != "VIOLATED"
    assert found["device, strict"]["claimed_round"] == pytest.approx(1.91, abs=0.01)
    assert found["record, strict"]["claimed_round"] == pytest.approx(2.57, abs=0.01)


@pytest.mark.slow
def test_the_audit_runs_where_head_and_backbone_train_in_whole_epochs(figures_of: Callable[..., Any]) -> None:
    found = figures_of(audit_methods.main, "--methods fedrep --trials 100 --canaries 200")["methods"]["fedrep"]
    assert found["record, strict"]["claimed_round"] == pytest.approx(3.42, abs=0.01)


@pytest.mark.slow
def test_the_clock_and_a_live_fleet_have_the_same_rounds(figures_of: Callable[..., Any]) -> None:
    shown = figures_of(clock_against_live.main, "--rounds 2 --epochs 1")
    assert [each["updates"] for each in shown["predicted"]] == [each["updates"] for each in shown["measured"]] == [6, 6]
    assert shown["ratio"] > 0


@pytest.mark.slow
def test_liars_are_what_the_norm_test_stops(figures_of: Callable[..., Any]) -> None:
    cells = figures_of(liars.main, "--rounds 1 --devices 10 --cells 3")["cells"]
    assert [(cell["attack"], cell["aggregation"]) for cell in cells] == [("none", name) for name in liars.AGGREGATIONS]
    assert all(cell["refused"] == 0 for cell in cells)
    lab = liars.Lab(rounds=4, devices=10)
    honest, tested, untested = (
        lab.run(liars.LiarRun(False, attack, count, test, "mean"))
        for attack, count, test in (("none", 0, True), ("scaled", 1, True), ("targeted", 1, False))
    )
    assert honest["accuracy"] > 0.3
    assert tested["refused"] == 0, "liars keep to what the test lets through"
    assert untested["accuracy"] < 0.15
    assert untested["fooled"] == 1.0
    direction = np.random.default_rng(1).normal(size=500)
    spread = liars.spread(direction, norm=10.0, most=0.6)
    assert np.linalg.norm(spread) == pytest.approx(10.0)
    assert np.abs(spread).max() <= 0.6
