"""The smaller benchmarks, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import audit_methods, clock_against_live


@pytest.mark.slow
def test_the_audit_has_a_claim_and_a_bound_for_each_game(figures_of: Callable[..., Any]) -> None:
    found = figures_of(audit_methods.main, "--methods dp-fedavg --trials 100 --canaries 200")["methods"]["dp-fedavg"]
    assert set(found) >= set(audit_methods.COLUMNS)
    for finding in found.values():
        assert finding["verdict"] != "VIOLATED"
    assert found["device, strict"]["claimed_round"] == pytest.approx(1.91, abs=0.01)
    assert found["record, strict"]["claimed_round"] == pytest.approx(2.57, abs=0.01)


@pytest.mark.slow
def test_the_clock_and_a_live_fleet_have_the_same_rounds(figures_of: Callable[..., Any]) -> None:
    shown = figures_of(clock_against_live.main, "--rounds 2 --epochs 1")
    assert [each["updates"] for each in shown["predicted"]] == [each["updates"] for each in shown["measured"]] == [6, 6]
    assert shown["ratio"] > 0
