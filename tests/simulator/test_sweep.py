"""The same run at other noise."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.result import Result, SweepPoint
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.fast.engine import run_logged
from hushfleet.simulator.engines.fast.local_only import DeviceLocalOnly
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin, go_on
from hushfleet.simulator.sweep import sweep_noise
from hushfleet.simulator.world.on_boards import run_on_boards

pytestmark = pytest.mark.slow

ALONE = [DeviceLocalOnly("device-0", 0.25, 0.5), DeviceLocalOnly("device-1", 0.35, 0.5)]


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
        return list(sweep_noise(simulation, workers, multipliers, ALONE, rounds=partial(run_logged, workers=workers)))


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
        (point,) = sweep_noise(simulation, workers, [1.0], [], rounds=partial(run_logged, workers=workers))
    assert point.gain_over_local_only is None


def test_under_the_virtual_clock_a_sweep_keeps_the_time_of_its_boards(short_task: Any, tmp_path: Path) -> None:
    """One of two boards is too slow for the round's quorum: at no noise is its update in the model."""
    task = short_task(
        data={"devices": 2, "limit": 200},
        round={"rounds": 1, "min_updates": 1, "quorum": 0.5},
        privacy={"accounting": "strict", "noise_multiplier": 1.0},
    )
    mix = FleetMix.in_turn(("raspberry-pi-zero-2-w", "generic-x86"), 2)
    begun = begin(task, tmp_path / "run", data_dir=None, mix=mix)
    with Workers(1) as workers:
        run_on_boards(begun, workers, mix=mix)
        (_,) = sweep_noise(begun, workers, [0.5], [], rounds=partial(run_on_boards, workers=workers, mix=mix))
    point = go_on(begun.folder.path / "sweep" / "noise-0.5", data_dir=None)
    assert point.folder.clock.read_bytes() == begun.folder.clock.read_bytes()
    result = Result.load(point.folder.result)
    assert (result.rounds[0].participants, result.details.rounds_accepted) == (1, [0, 1])
