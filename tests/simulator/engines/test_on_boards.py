"""A simulation in a world ends in the fast engine's model, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.engines.on_boards import run_in_world
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.times import Costs

COSTS = Costs(batch_s=0.05, sample_s=0.0, release_s=0.01, start_s=0.1, load_s=0.01, accept_s=0.001, close_s=0.002)
MIX = FleetMix.in_turn(["jetson-orin-nano", "raspberry-pi-zero-2-w"], 4)


def made(short_task: Callable[..., Task], folder: Path, scenario: dict[str, Any] | None = None) -> Simulation:
    plain = short_task(data={"devices": 4, "limit": 320}, round={"rounds": 2, "min_updates": 4}).to_plain()
    return begin(parse_task(plain | {"scenario": scenario or {}}), folder / "run", data_dir=None, mix=MIX)


def models(simulation: Simulation) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in simulation.folder.aggregator.glob("*.safetensors")}


def test_a_run_in_rough_weather_ends_in_the_fast_engines_model(short_task: Callable[..., Task], tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "world").mkdir()
    fast = made(short_task, tmp_path / "fast")
    scenario = {
        "crash": [{"process": "aggregator", "at_round": 1, "for_s": 1.0}],
        "drop_out": [{"devices": 1, "at_round": 2, "for_s": 2.0}],
    }
    rough = made(short_task, tmp_path / "world", scenario)
    with Workers(1) as workers:
        with EventLog(fast.folder.events) as events:
            run_rounds(fast, workers, events)
        run_in_world(rough, workers, mix=MIX, costs=COSTS)
    assert models(rough) == models(fast)
    for device in rough.fleet.devices:
        with DeviceStore(rough.folder.device(device.name).store, device=device.name, inspect=True) as store:
            assert [entry.round for entry in store.ledger.entries()] == [1, 2]
