"""The smaller benchmarks, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import audit_methods


@pytest.mark.slow
def test_the_audit_has_a_claim_and_a_bound_for_each_game(figures_of: Callable[..., Any]) -> None:
    found = figures_of(audit_methods.main, "--methods dp-fedavg --trials 100 --canaries 200")["methods"]["dp-fedavg"]
    assert set(found) >= set(audit_methods.COLUMNS)
    for finding in found.values():
        assert finding["verdict"] != "VIOLATED"
    assert found["device, strict"]["claimed_round"] == pytest.approx(1.91, abs=0.01)
    assert found["record, strict"]["claimed_round"] == pytest.approx(2.57, abs=0.01)
