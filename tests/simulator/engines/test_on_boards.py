"""A simulation in a world ends in the fast engine's model, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.engines.on_boards import run_on_boards
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.simulator.world.times import Costs

COSTS = Costs(batch_s=0.05, sample_s=0.0, release_s=0.01, start_s=0.1, load_s=0.01, accept_s=0.001, close_s=0.002)
MIX = FleetMix.in_turn(["jetson-orin-nano", "raspberry-pi-zero-2-w"], 4)


def made(short_task: Callable[..., Task], folder: Path, scenario: dict[str, Any] | None = None) -> Simulation:
    plain = short_task(data={"devices": 4, "limit": 320}, round={"rounds": 2, "min_updates": 4}).to_plain()
    simulation = begin(parse_task(plain | {"scenario": scenario or {}}), folder / "run", data_dir=None, mix=MIX)
    simulation.folder.clock.write_text(json.dumps(vars(COSTS)))
    return simulation


def models(simulation: Simulation) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in simulation.folder.aggregator.glob("*.safetensors")}


SCENARIO = {
    "crash": [{"process": "aggregator", "at_round": 1, "for_s": 1.0}],
    "drop_out": [{"devices": 1, "at_round": 2, "for_s": 2.0}],
}


class Interrupted(BaseException):
    """As Ctrl-C is."""


class Breaking:
    """Workers that break after some jobs."""

    count = 1

    def __init__(self, jobs: int) -> None:
        self._left = jobs

    def map(self, function: Callable[[Any], Any], items: Any) -> Iterator[Any]:
        self._left -= 1
        if self._left < 0:
            raise Interrupted
        return map(function, items)


@pytest.fixture(scope="module")
def expected(short_task: Callable[..., Task], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The fast engine's models."""
    fast = made(short_task, tmp_path_factory.mktemp("fast"))
    with Workers(1) as workers, EventLog(fast.folder.events) as events:
        run_rounds(fast, workers, events)
    return models(fast)


def test_a_run_in_rough_weather_ends_in_the_fast_engines_model(
    short_task: Callable[..., Task], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    rough = made(short_task, tmp_path, SCENARIO)
    with Workers(1) as workers:
        seconds = run_on_boards(rough, workers, mix=MIX)
    assert models(rough) == expected
    assert charged(rough) == [[1, 2]] * 4
    played = [(event["action"], event["target"]) for event in iterate_events(rough.folder.scenario)]
    assert [action for action, _ in played] == ["kill", "start", "kill", "start"]
    closed = [event["at"] for event in iterate_events(rough.folder.events) if event["event"] == "round_close"]
    assert closed[-1] <= seconds < closed[-1] + 1


def test_an_interrupted_run_goes_on_to_the_same_model(
    short_task: Callable[..., Task], tmp_path: Path, expected: dict[str, bytes]
) -> None:
    run = made(short_task, tmp_path, SCENARIO)
    for jobs in (2, 4):  # in the first round, and in the second
        with pytest.raises(Interrupted):
            run_on_boards(run, Breaking(jobs), mix=MIX)  # type: ignore[arg-type]
    with Workers(1) as workers:
        run_on_boards(run, workers, mix=MIX)
    assert models(run) == expected
    assert charged(run) == [[1, 2]] * 4
    times = [event["at"] for event in iterate_events(run.folder.events)]
    assert times == sorted(times)


def charged(simulation: Simulation) -> list[list[int]]:
    """The rounds in the ledger of each device."""
    found = []
    for device in simulation.fleet.devices:
        with DeviceStore(simulation.folder.device(device.name).store, device=device.name, inspect=True) as store:
            found.append([entry.round for entry in store.ledger.entries()])
    return found
