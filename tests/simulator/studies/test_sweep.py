"""The same run at other noise."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.result import Result, SweepPoint, WireInfo
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.fast.local_only import Alone
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin, go_on
from hushfleet.simulator.studies.sweep import sweep_noise, sweep_wire, with_wire

pytestmark = pytest.mark.slow

ALONE = [Alone("device-0", 0.25, 0.5), Alone("device-1", 0.35, 0.5)]


@pytest.fixture
def simulation(short_task: Any, tmp_path: Path) -> Simulation:
    task = short_task(
        data={"devices": 2, "limit": 200},
        round={"rounds": 2, "min_updates": 2},
        privacy={"noise_multiplier": None, "epsilon": 50.0, "delta": 0.01, "accounting": "strict"},
    )
    return begin(task, tmp_path / "run", data_dir=None)


def sweep(simulation: Simulation, *multipliers: float) -> list[SweepPoint]:
    with Workers(1) as workers:
        return list(sweep_noise(simulation, workers, multipliers, ALONE))


def test_a_point_for_each_noise_in_rising_order(simulation: Simulation) -> None:
    points = sweep(simulation, 4.0, 0.0, 1.0, 4.0)
    assert [point.noise_multiplier for point in points] == [0.0, 1.0, 4.0]
    assert points[0].epsilon_server == math.inf
    assert math.inf > points[1].epsilon_server > points[2].epsilon_server > 0
    for point in points:
        assert point.gain_over_local_only == pytest.approx(point.accuracy_own_common - 0.3)
        assert point.accuracy_global is not None
    result = Result.load(simulation.folder.path / "sweep" / "noise-4" / "result.json")
    assert result.noise_multiplier == 4.0
    assert len(result.rounds) == 2


def test_an_interrupted_sweep_goes_on(simulation: Simulation, audit: Any) -> None:
    calm = sweep(simulation, 0.5, 2.0)
    folder = simulation.folder.path / "sweep"
    models = audit.models(go_on(folder / "noise-2", data_dir=None))
    # As after a crash: the second point has closed its rounds, but its result was not written.
    (folder / "noise-2" / "result.json").unlink()
    marker = folder / "noise-0.5" / "aggregator"
    shutil.rmtree(marker)  # a point with a result is not run again
    assert sweep(simulation, 0.5, 2.0) == calm
    assert not marker.exists()
    assert audit.models(go_on(folder / "noise-2", data_dir=None)) == models
    shutil.rmtree(folder / "noise-2")
    assert sweep(simulation, 0.5, 2.0) == calm


def test_without_a_baseline_there_is_no_gain(simulation: Simulation) -> None:
    with Workers(1) as workers:
        (point,) = sweep_noise(simulation, workers, [1.0], [], lean=True)
    assert point.gain_over_local_only is None


def test_the_same_run_with_other_codecs(simulation: Simulation) -> None:
    choices = ["float32", "0.5", "2", "one-bit", "2"]
    with Workers(1) as workers:
        points = list(sweep_wire(simulation, workers, choices, ALONE))
        assert list(sweep_wire(simulation, workers, choices, ALONE)) == points, "kept"
    assert [(point.wire.codec, point.wire.step) for point in points] == [
        ("float32", None), ("quantized", 0.5), ("quantized", 2.0), ("one-bit", None),
    ]  # fmt: skip
    sent = [point.uplink_bytes for point in points]
    assert sent == sorted(sent, reverse=True)
    assert 32 < points[0].bits_per_value < 33
    assert points[3].bits_per_value < 2
    folders = [simulation.folder.path / "sweep" / f"wire-{choice}" for choice in choices]
    results = [Result.load(folder / "result.json") for folder in folders]
    for point, result in zip(points, results, strict=False):
        assert point.gain_over_local_only == pytest.approx(point.accuracy_own_common - 0.3)
        assert result.noise_multiplier == results[0].noise_multiplier > 0
        assert [row.epsilon_server for row in result.privacy] == [row.epsilon_server for row in results[0].privacy]
        assert point.bits_per_value == 8 * point.uplink_bytes / sum(result.details.values_sent)
    # before anything is sent, all of them are the same run
    assert len({result.details.accuracy_own_common[0][0] for result in results}) == 1


def test_without_noise_a_step_is_one_of_the_values(short_task: Any) -> None:
    noisy, calm = short_task(), short_task(privacy={"noise_multiplier": 0.0})
    assert with_wire(noisy, "0.125").wire == replace(noisy.wire, codec="quantized", step=0.125)
    assert with_wire(calm, "0.125").wire == replace(calm.wire, codec="quantized", relative_step=0.125)
    assert with_wire(noisy, "float16").wire == replace(noisy.wire, codec="float16")
    for task, choice, told in (
        (noisy, "half", "wire.codec"),
        (noisy, "-1", "wire.step"),
        (calm, "4", "wire.relative_step"),
        (calm, "one-bit", "no noise"),
    ):
        with pytest.raises(BadInput, match=f"'{choice}' is neither.*{told}"):
            with_wire(task, choice)


def test_the_result_says_how_updates_were_coded(short_task: Any, tmp_path: Path) -> None:
    calm = begin(
        short_task(data={"devices": 2, "limit": 200}, round={"rounds": 1, "min_updates": 2},
                   privacy={"noise_multiplier": 0.0}),
        tmp_path / "calm",
        data_dir=None,
    )  # fmt: skip
    with Workers(1) as workers:
        (point,) = sweep_wire(calm, workers, ["0.25"], [])
    assert point.wire == WireInfo(codec="quantized", step=0.25, step_unit="rms")
