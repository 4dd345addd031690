"""Short-cuts change no result; a network or a fleet that is scaled down takes the time and the bytes of the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import pytest

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.schedule import make_schedule, schedule_of
from hushfleet.simulator.world.fleet import WorldFleet
from hushfleet.simulator.world.outcomes import FleetDevice, fleet_devices
from hushfleet.simulator.world.short_cuts import SmallerFleet
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs
from support.world import BOARD, played, world

COSTS = Costs(batch_s=0.003, sample_s=0.0002, release_s=0.005, start_s=1.0, load_s=0.1, accept_s=0.002, close_s=0.01)


def test_some_boards_stand_for_a_large_fleet() -> None:
    """Two kinds in turn, of which every fourth board is simulated."""
    boards = [BOARD, replace(BOARD, step_s=1.0, down_s_per_byte=1e-5)] * 40
    rules = {"cohort_size": 80, "rounds": 3, "accounting": "strict"}
    whole = world(boards, **rules)
    small = world(boards, **rules, short=True, most_boards=20)
    ends, few_ends = ([outcome.closed_s for outcome in played(each)] for each in (whole, small))
    assert (len(small.fleet), small.weight) == (20, 4.0)
    assert few_ends == pytest.approx(ends, rel=0.01)
    assert small.fleet[0].spent.charged == whole.fleet[0].spent.charged == {80: 3}
    for name in ("up_bytes", "down_bytes", "on_s", "compute_s"):
        total, scaled = (sum(getattr(each.spent, name) for each in fleet.fleet) for fleet in (whole, small))
        assert 4 * scaled == pytest.approx(total, rel=0.02), name


def test_unsigned_answers_of_a_committee_are_accepted() -> None:
    secure = {"accounting": "secure", "unit": {"delta": 1e-5}, "rounds": 2, "min_updates": 4, "short": True}
    outcomes = played(world([BOARD] * 4, **secure))
    assert [(len(each.arrivals), each.used, each.extensions) for each in outcomes] == [(4, True, 0)] * 2


def test_a_large_fleet_keeps_its_kinds_its_rules_and_what_happens_to_them() -> None:
    names = device_names(2000)
    fleet = [FleetDevice(name, replace(BOARD, steps=1 + place % 7), kind=place % 2) for place, name in enumerate(names)]
    rules = RoundSection(cohort_size=100, min_devices=200, min_updates=1)
    costs = replace(COSTS, accept_s=1.0)
    small = SmallerFleet(fleet, rules, costs, most=200)
    assert (len(small.boards), small.weight) == (400, 5.0), "a cohort has at least 20"
    assert [sum(each.kind == kind for each in small.boards) for kind in (0, 1)] == [200, 200]
    assert mean(each.times.steps for each in small.boards) == pytest.approx(4.0, rel=0.02)
    assert (small.rules.cohort_size, small.rules.min_devices, small.rules.min_updates) == (20, 40, 1)
    assert (small.costs.accept_s, small.whole(20)) == (5.0, 100)
    entries = {
        "drop_out": [{"devices": 500, "at_s": 1.0, "for_s": 1.0}],
        "crash": [{"process": "broker", "at_s": 1.0, "for_s": 1.0}],
    }
    happens = small.of(make_schedule(ScenarioSection(**entries), names, seed=1))
    assert 70 < len(happens.windows) < 130, "the broker, and a fourth of them"


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
