"""Short-cuts change no result; a network that is scaled down takes the time and the bytes of the whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.world.fleet import WorldFleet
from hushfleet.simulator.world.outcomes import fleet_devices
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs

COSTS = Costs(batch_s=0.003, sample_s=0.0002, release_s=0.005, start_s=1.0, load_s=0.1, accept_s=0.002, close_s=0.01)


def test_a_tenth_of_a_network_takes_the_time_and_the_bytes_of_the_whole_one(short_task: Callable[..., Task]) -> None:
    task = short_task(
        method={"gamma": 0.0}, data={"devices": 4}, round={"rounds": 5, "deadline_s": 60, "min_updates": 4}
    )
    prepared, names = prepare(task, run_id="seed7"), device_names(4)
    sizes, mix = sizes_of(prepared, name_bytes=len(names[0])), FleetMix.in_turn(["raspberry-pi-zero-2-w"], 4)
    schedule = schedule_of(replace(task, data=replace(task.data, devices=4)), names)
    found = []
    for most_parameters in (489, 10_000):
        fleet = fleet_devices(prepared, mix, names=names, samples=[160], costs=COSTS, sizes=sizes, schedule=schedule)
        world = WorldFleet(
            prepared,
            task.round,
            fleet,
            costs=COSTS,
            schedule=schedule,
            seed=7,
            short=True,
            most_parameters=most_parameters,
        )
        ends = [outcome.closed_s for outcome in world.rounds()]
        found.append((ends, sum(each.spent.up_bytes for each in fleet), sum(each.spent.down_bytes for each in fleet)))
    (small_ends, small_up, small_down), (ends, up, down) = found
    assert small_ends == pytest.approx(ends, rel=0.02)
    assert small_up == pytest.approx(up, rel=0.1)
    assert small_down == pytest.approx(down, rel=0.1)
