"""`benchmarks/device.py`: a tiny real run of the client beside PyTorch, and what must not go unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import device

pytestmark = pytest.mark.slow


def test_the_client_trains_rounds_beside_pytorch(figures_of: Callable[..., Any]) -> None:
    words = (
        "--quick --models digits-cnn --methods dp-fedavg --features filters-8 --runtimes torch --samples 16 --batch 4"
    )
    shown = figures_of(device.main, f"{words} --samples 16 --batch 4")
    (model,) = shown["models"]
    case = model["methods"]["dp-fedavg"]
    assert set(case["step"]) == {"ours", "ours on torch", "plain PyTorch"}
    assert all(side["cpu_ms"] > 0 for side in case["step"].values())
    assert case["round"]["update_bytes"] > 1000
    both = case["processes"]
    assert 0 < both["idle_mib"] <= both["guardian_mib"] < both["first_mib"] <= both["worker_mib"]
    assert both["start_ms"] > 0
    # A process's peak only grows, and PyTorch's imports alone are above all of ours.
    assert 20 < case["start"]["mib"] <= case["trained_peak_mib"] <= case["round_peak_mib"]
    assert case["round_peak_mib"] < model["plain PyTorch"]["import_mib"]
