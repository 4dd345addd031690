"""A forecast in a world beside the one of `engines/clock`: both tell the same, as long as there are both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.publish.prepare import PreparedTask, prepare
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock import forecast as clock_forecast
from hushfleet.simulator.engines.clock.forecast import Forecast, forecast
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.world.fleet import WorldFleet
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs

COSTS = Costs(batch_s=0.003, sample_s=0.0002, release_s=0.005, start_s=1.0, load_s=0.0, accept_s=0.002, close_s=0.01)
MIX = FleetMix.in_turn(["raspberry-pi-zero-2-w", "raspberry-pi-4-4gb", "jetson-orin-nano"], 6)


@pytest.fixture(scope="module")
def prepared(short_task: Callable[..., Task]) -> PreparedTask:
    task = short_task(method={"gamma": 0.0}, data={"devices": 6}, round={"rounds": 8, "deadline_s": 60})
    return prepare(task, run_id="seed7")


def both(
    prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch, *, most_parameters: int = 10_000, **rules: Any
) -> tuple[Forecast, Forecast]:
    sizes = sizes_of(prepared, name_bytes=len(device_names(6)[0]))
    options = {"policy": "this", "samples": [160], "costs": COSTS, "sizes": sizes}
    changed = replace(prepared.task.round, **rules)
    clock = forecast(prepared, MIX, changed, **options)

    def in_world(prepared: Any, rules: Any, fleet: Any, *, sizes: Any, **others: Any) -> Any:
        return WorldFleet(prepared, rules, fleet, short=True, most_parameters=most_parameters, **others)

    monkeypatch.setattr(clock_forecast, "clock_of", in_world)
    return clock, forecast(prepared, MIX, changed, **options)


def test_time_bytes_energy_and_epsilon_of_whole_cohorts_are_the_same(
    prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, world = both(prepared, monkeypatch)
    for name in ("total_s", "round_median_s", "up_bytes", "down_bytes", "energy_wh"):
        assert getattr(world, name) == pytest.approx(getattr(clock, name), rel=0.02), name
    for name in ("rounds", "updates_per_round", "rounds_without", "epsilon", "epsilon_unused", "boards"):
        assert getattr(world, name) == getattr(clock, name), name


def test_stragglers_of_a_quorum_are_the_same(prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, world = both(prepared, monkeypatch, quorum=0.6)
    assert world.round_median_s == pytest.approx(clock.round_median_s, rel=0.03)
    assert world.stragglers == pytest.approx(clock.stragglers)
    assert world.updates_per_round == clock.updates_per_round


def test_a_network_that_is_scaled_down_takes_the_time_and_the_bytes_of_the_whole_one(
    prepared: PreparedTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of its 4,890 parameters, whose code tables take their share."""
    clock, world = both(prepared, monkeypatch, most_parameters=489)
    for name in ("total_s", "round_median_s", "energy_wh"):
        assert getattr(world, name) == pytest.approx(getattr(clock, name), rel=0.02), name
    for name in ("up_bytes", "down_bytes"):
        assert getattr(world, name) == pytest.approx(getattr(clock, name), rel=0.1), name
    assert world.epsilon == clock.epsilon
