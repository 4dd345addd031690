"""The smaller benchmarks, each in its smallest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import audit_methods, buffered


@pytest.mark.slow
def test_the_audit_has_a_claim_and_a_bound_for_each_game(figures_of: Callable[..., Any]) -> None:
    found = figures_of(audit_methods.main, "--methods dp-fedavg --trials 100 --canaries 200")["methods"]["dp-fedavg"]
    assert set(found) >= set(audit_methods.COLUMNS)
    for finding in found.values():
        assert finding["verdict"] != "VIOLATED"
    assert found["device, strict"]["claimed_round"] == pytest.approx(1.91, abs=0.01)
    assert found["record, strict"]["claimed_round"] == pytest.approx(2.57, abs=0.01)


def test_the_hours_to_a_goal_are_those_of_the_first_model_that_reaches_it() -> None:
    def closed(round: int, at: float, accuracy: float) -> list[dict[str, Any]]:
        update = {"event": "update", "at": at - 1, "device": f"b{round % 2}", "code": "accepted"}
        return [update, {"event": "round_close", "at": at, "round": round, "accuracy_global": accuracy}]

    events = [*closed(1, 3600.0, 0.5), *closed(2, 7200.0, 0.9), *closed(3, 9000.0, 0.8)]
    expected = {"hours": 2.0, "best": 0.9, "rounds": 2, "updates": 2, "updates a board": 0.5, "most": 1}
    assert buffered.reached(events, goal=0.8, devices=4) == expected
    assert buffered.reached(events, goal=0.95, devices=4)["hours"] is None
    assert buffered.reached([], goal=0.5, devices=4)["rounds"] == 0
