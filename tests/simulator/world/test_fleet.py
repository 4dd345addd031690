"""Rounds of real agents and a real coordinator on the virtual clock, with power cuts, cut networks and crashes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hushfleet.simulator.world.hub import Roughness
from support.fleet import prepared_task
from support.world import BOARD, TRAINS_S, played, world

OPENED_S = 0.12
"""When the first round opens: a board of `BOARD` is heard of after seven latencies, and others may come."""


def arrivals(outcome: Any) -> dict[str, float]:
    return {arrival.device: arrival.at_s - outcome.opened_s for arrival in outcome.arrivals}


def test_a_round_takes_the_seconds_of_its_boards() -> None:
    fleet = world([BOARD, replace(BOARD, step_s=1.0)], rounds=2)
    first, second = played(fleet)
    # the plan, a want that others could share, the model, the update: four latencies and 0.05 s
    assert arrivals(second) == pytest.approx({"a": TRAINS_S + 0.09, "b": 3.5 + 0.09}, abs=0.005)
    # the first one also fetches package and graph, each 0.07 s
    assert arrivals(first)["a"] - arrivals(second)["a"] == pytest.approx(0.14, abs=0.02)
    assert (first.cohort, first.used, first.late, first.lost) == (("a", "b"), True, (), ())
    spent = fleet.fleet[0].spent
    assert spent.compute_s == pytest.approx(2 * TRAINS_S)
    assert (spent.chosen, spent.used, dict(spent.charged), dict(spent.unused)) == (2, 2, {2: 2}, {})


def test_boards_that_missed_rounds_are_not_slower() -> None:
    """They fetch the differences of several rounds at once, and none waits for others that could want them."""
    outcomes = played(world([BOARD] * 12, cohort_size=3, rounds=16))
    newest = {name for outcome in outcomes[:4] for name in outcome.cohort}
    later = [outcome for outcome in outcomes[4:] if newest.issuperset(outcome.cohort)]
    assert len(later) > 3
    assert all(outcome.wall_s < TRAINS_S + 0.12 for outcome in later)


def test_a_worker_is_started_anew_where_none_was_kept() -> None:
    """It waits for 30 s (`worker.keep_s`): long enough for a round alone, and not for one with a slower board."""
    loads = replace(BOARD, load_s=3.0)
    _, alone = played(world([loads], rounds=2))
    _, beside = played(world([loads, replace(BOARD, step_s=20.0)], rounds=2))
    assert arrivals(alone)["a"] == pytest.approx(TRAINS_S + 0.09, abs=0.02)
    assert arrivals(beside)["a"] == pytest.approx(TRAINS_S + 3.09, abs=0.02)


def test_a_slow_link_takes_its_time_for_each_byte() -> None:
    slow = replace(BOARD, up_s_per_byte=0.001)
    (only,) = played(world([slow]))
    (quick,) = played(world([BOARD]))
    update_bytes = only.arrivals[0].update_bytes
    assert arrivals(only)["a"] - arrivals(quick)["a"] > update_bytes * 0.001


def test_updates_without_noise_have_their_size_too() -> None:
    """Zeros would be sent as nothing."""
    noised = played(world([BOARD] * 2))
    plain = played(
        world(
            [BOARD] * 2, prepared=prepared_task(method="fedavg", multiplier=0.0, devices=2, rounds=1, deadline_s=100.0)
        )
    )
    sizes = [{arrival.update_bytes for arrival in outcome.arrivals} for (outcome,) in (noised, plain)]
    assert min(sizes[1]) > 0.9 * min(sizes[0])


def test_a_bad_network_makes_rounds_longer_and_two_runs_are_the_same() -> None:
    rough = replace(BOARD, rough=Roughness(jitter_s=0.2, stall_every_s=1.0, stall_s=1.0))
    (calm,), *bad = (played(world([board])) for board in (BOARD, rough, rough))
    assert bad[0] == bad[1]
    assert bad[0][0].wall_s > calm.wall_s + 0.5


def test_two_runs_are_the_same_and_short_cuts_change_nothing() -> None:
    fleets = [world([BOARD] * 3, rounds=3, cohort_size=2, short=short) for short in (False, False, True)]
    outcomes = [played(fleet) for fleet in fleets]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    totals = [[(each.spent.up_bytes, each.spent.down_bytes) for each in fleet.fleet] for fleet in fleets]
    assert totals[0] == totals[1] == totals[2]


def test_a_power_cut_before_the_commit_spends_nothing_and_the_board_begins_again() -> None:
    cut = {"drop_out": [{"devices": ["a"], "at_s": OPENED_S + 3.0, "for_s": 2.0}]}
    fleet = world([BOARD], scenario=cut)
    (only,) = played(fleet)
    assert arrivals(only)["a"] == pytest.approx(5.0 + TRAINS_S, abs=0.2)
    spent = fleet.fleet[0].spent
    assert dict(spent.charged) == {1: 1}
    assert spent.compute_s == pytest.approx(3.0 + TRAINS_S, abs=0.4)


def test_a_power_cut_after_the_commit_sends_the_same_update_again() -> None:
    sending = replace(BOARD, up_s_per_byte=0.004)
    (calm,) = played(world([sending]))
    half_sent_s = calm.arrivals[0].at_s - calm.arrivals[0].update_bytes * 0.004 / 2
    cut = {"drop_out": [{"devices": ["a"], "at_s": half_sent_s, "for_s": 2.0}]}
    fleet = world([sending], scenario=cut, deadline_s=200.0)
    (only,) = played(fleet)
    spent = fleet.fleet[0].spent
    assert (only.used, dict(spent.charged)) == (True, {1: 1})
    assert spent.compute_s == pytest.approx(TRAINS_S)
    assert only.arrivals[0].update_bytes == calm.arrivals[0].update_bytes


def test_a_board_without_a_network_goes_on_and_sends_later() -> None:
    cut = {"outage": [{"devices": ["a"], "at_s": OPENED_S + 2.0, "for_s": 7.0}]}
    (only,) = played(world([BOARD], scenario=cut))
    # offer and chunks go together: the aggregator need not ask for them after a second of silence
    assert arrivals(only)["a"] == pytest.approx(9.0, abs=0.3)


@pytest.mark.parametrize("process", ["aggregator", "broker"])
def test_a_crash_while_boards_train_costs_no_charge(process: str) -> None:
    crash = {"crash": [{"process": process, "at_s": OPENED_S + 3.0, "for_s": 2.0}]}
    fleet = world([BOARD, BOARD], scenario=crash, rounds=2)
    first, second = played(fleet)
    assert (first.used, second.used) == (True, True)
    for device in fleet.fleet:
        assert dict(device.spent.charged) == {2: 2}
        assert device.spent.compute_s == pytest.approx(2 * TRAINS_S), "what it trained was not lost"


def test_who_is_slower_than_the_quorum_gives_up_and_spends_nothing() -> None:
    fleet = world([BOARD, replace(BOARD, step_s=50.0)], quorum=0.5, rounds=2, deadline_s=1000.0)
    outcomes = played(fleet)
    assert [(each.given_up, each.late) for each in outcomes] == [(("b",), ())] * 2
    assert not fleet.fleet[1].spent.charged


def test_who_is_slower_than_three_deadlines_declines_the_task() -> None:
    fleet = world([BOARD, replace(BOARD, step_s=50.0)], deadline_s=20.0, rounds=5)
    outcomes = played(fleet)
    assert outcomes[-1].declined == ("b",)
    assert not fleet.fleet[1].spent.charged


def test_days_and_nights_are_followed() -> None:
    night = {"day": [{"devices": "all", "period_s": 100.0, "share": 0.5}]}
    fleet = world([BOARD], scenario=night, rounds=12, deadline_s=400.0)
    outcomes = played(fleet)
    spent, end = fleet.fleet[0].spent, outcomes[-1].closed_s
    assert len(outcomes) == 12
    assert end > 2 * 12 * TRAINS_S - 100, "half of the time it sleeps"
    assert 0.4 < spent.on_s / end < 0.8
    assert dict(spent.charged) == {1: 12}


def test_a_board_with_too_little_memory_declines() -> None:
    few = {"out_of_memory": [{"devices": ["b"], "memory_mib": 40}]}
    (only,) = played(world([BOARD, BOARD], scenario=few))
    assert (only.declined, [each.device for each in only.arrivals]) == (("b",), ["a"])


def test_a_deadline_is_kept_exactly_although_nobody_polls() -> None:
    fleet = world([BOARD, replace(BOARD, step_s=50.0)], deadline_s=20.3)
    (only,) = played(fleet)
    assert only.closed_s - only.opened_s == pytest.approx(20.3, abs=0.01)


def test_what_a_board_stores_takes_its_time() -> None:
    slow = replace(BOARD, write_s_per_byte=0.001)
    (only,), (quick,) = played(world([slow])), played(world([BOARD]))
    # at least the model of 256 parameters, the update, and the personalized model
    stored_bytes = 2 * 4 * 256 + only.arrivals[0].update_bytes
    assert arrivals(only)["a"] - arrivals(quick)["a"] > stored_bytes * 0.001
