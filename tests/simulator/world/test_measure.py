"""This machine's speed, beside the board whose cores are the profiles' unit."""

from __future__ import annotations

import subprocess

import pytest

from hushfleet.simulator.world import measure
from hushfleet.simulator.world.measure import machine_speed


def test_the_speed_of_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_speed.cache_clear()
    speed = machine_speed()
    assert 0.01 < speed < 20
    monkeypatch.setattr(measure.subprocess, "run", None)
    assert machine_speed() == speed


def test_speed_is_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_speed.cache_clear()
    # 2 * 512^3 operations in 2.796 ms are 96 GFLOP/s; what was disturbed does not count.
    lines = "\n".join(["0.0027962", "0.0027962", "9.0", "0.0027962", "0.001"])
    result = subprocess.CompletedProcess([], 0, stdout=lines, stderr="")
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: result)
    try:
        assert machine_speed() == pytest.approx(1.0, rel=1e-4)
    finally:
        machine_speed.cache_clear()
