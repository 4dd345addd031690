"""The virtual clock against a slow simulation that looks at a round from outside, and what holds of any fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.simulator.world.times import DeviceTimes
from hushfleet.wire.format.messages import Birth, Want
from support.virtual_clock import (
    FREE,
    PLAIN,
    SIZES,
    WIRE,
    arrivals,
    clock,
    run,
)

seconds = st.integers(0, 40).map(lambda tenths: tenths / 8)
device = st.builds(
    replace,
    st.just(PLAIN),
    latency_s=st.integers(1, 8).map(lambda each: each / 16),
    model_s=seconds,
    steps=st.integers(1, 4),
    step_s=st.integers(1, 40).map(lambda each: each / 8),
    release_s=seconds,
    up_s_per_byte=st.integers(0, 32).map(lambda each: each / 8 / WIRE),
)
fleets = st.lists(device, min_size=1, max_size=6)


def first_round_by_scanning(times: Sequence[DeviceTimes], rules: RoundSection, accept_s: float) -> tuple[Any, ...]:
    """Round 1 of a calm fleet, looked at from outside: (closed_s, who was used, who was late, who gave up)."""
    names = "abcdefghijklmnopqrstuvwxyz"
    opened = max(7 * each.latency_s for each in times)
    wants = sorted((opened + 2 * each.latency_s, index) for index, each in enumerate(times))
    train_at, pass_at = {}, -1.0
    for want, index in wants:
        if want > pass_at:
            pass_at = want + 0.05
        train_at[index] = pass_at + times[index].latency_s + times[index].model_s
    rows = []
    for index, each in enumerate(times):
        last = train_at[index] + (each.steps - 1) * each.step_s
        commit = last + each.step_s + each.release_s
        rows.append((commit + each.latency_s + WIRE * each.up_s_per_byte, index, last))
    wanted = max(-int(-(rules.quorum * len(times)) // 1), min(rules.min_updates, len(times)))
    free, accepted = 0.0, []
    for arrives, index, _ in sorted(rows):
        free = max(free, arrives) + accept_s
        accepted.append((free, index))
    deadline = opened + rules.deadline_s
    in_time = [each for each in accepted if each[0] < deadline]
    closed = in_time[wanted - 1][0] if len(in_time) >= wanted else deadline
    used = [names[index] for at, index in accepted if at <= closed][:wanted]
    late, given_up = [], []
    for _, index, last in rows:
        if names[index] not in used:
            (late if closed + times[index].latency_s > last else given_up).append(names[index])
    return closed, used, sorted(late), sorted(given_up)


@settings(max_examples=300)
@given(times=fleets, quorum=st.sampled_from([0.2, 0.5, 0.75, 1.0]), deadline_s=st.integers(1, 60), accept=seconds)
def test_a_calm_round_is_what_an_obvious_simulation_finds(
    times: list[DeviceTimes], quorum: float, deadline_s: float, accept: float
) -> None:
    # nothing falls on the deadline, and no two updates arrive at one moment
    deadline_s += 0.0371
    times = [replace(each, release_s=each.release_s + 0.00917 * index) for index, each in enumerate(times)]
    accept_s = accept / 16 + 0.0013
    rules = RoundSection(rounds=1, quorum=quorum, deadline_s=deadline_s)
    closed, used, late, given_up = first_round_by_scanning(times, rules, accept_s)
    if not used:
        return  # it is put off, which the hand-made timelines look at
    costs = replace(FREE, accept_s=accept_s)
    (only,) = run(clock(times, costs=costs, quorum=quorum, deadline_s=deadline_s))
    assert only.closed_s == pytest.approx(closed)
    assert sorted(arrivals(only)) == sorted(used)
    assert (sorted(only.late), sorted(only.given_up)) == (late, given_up)


@settings(max_examples=60)
@given(times=fleets, quorum=st.sampled_from([0.3, 0.7, 1.0]), deadline_s=st.integers(10, 60))
def test_everybody_is_counted_once_and_charged_rightly(
    times: list[DeviceTimes], quorum: float, deadline_s: int
) -> None:
    fleet = clock(times, rounds=3, quorum=quorum, deadline_s=deadline_s)
    outcomes = run(fleet)
    for outcome in outcomes:
        parts = [[each.device for each in outcome.arrivals], outcome.late, outcome.given_up, outcome.declined]
        assert sorted(name for part in (*parts, outcome.lost) for name in part) == list(outcome.cohort)
        assert outcome.opened_s < outcome.closed_s
    for each in fleet.fleet:
        spent = each.spent
        assert spent.used == sum(each.name in arrivals(outcome) for outcome in outcomes)
        assert spent.late == sum(each.name in outcome.late for outcome in outcomes)
        assert spent.chosen == spent.used + spent.late + spent.given_up + spent.declined + spent.lost
        assert spent.charged.total() == spent.used + spent.late
        assert spent.unused.total() == spent.late
        # whole updates left the device, at most a part of one for each late round, and small messages
        whole = sum(SIZES.update(count, with_public=True).wire for count in range(spent.used + spent.late))
        small = 20 * SIZES.packet[Birth] + 6 * SIZES.packet[Want]
        assert spent.used * WIRE <= spent.up_bytes + 1e-6 <= whole + small


@settings(max_examples=60)
@given(times=fleets, shorter=st.integers(10, 40), longer=st.integers(0, 40))
def test_a_longer_deadline_never_gets_fewer_updates(times: list[DeviceTimes], shorter: int, longer: int) -> None:
    (one,) = run(clock(times, deadline_s=shorter))
    (other,) = run(clock(times, deadline_s=shorter + longer))
    if one.extensions == 0:
        assert set(arrivals(one)) <= set(arrivals(other))


@settings(max_examples=60)
@given(times=fleets, faster=st.floats(0.1, 1.0), data=st.data())
def test_a_faster_board_is_never_later(times: list[DeviceTimes], faster: float, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(times) - 1))
    quicker = list(times)
    quicker[index] = replace(times[index], step_s=times[index].step_s * faster, release_s=0.0)
    (one,) = run(clock(times, deadline_s=1000))
    (other,) = run(clock(quicker, deadline_s=1000))
    name = "abcdef"[index]
    assert arrivals(other)[name] <= arrivals(one)[name]
    assert other.closed_s <= one.closed_s + 1e-9


@settings(max_examples=30)
@given(
    times=fleets,
    drops=st.lists(st.tuples(st.floats(0, 40), st.floats(0.5, 20)), max_size=4),
    cuts=st.lists(st.tuples(st.floats(0, 40), st.floats(0.5, 20)), max_size=4),
    crashes=st.lists(st.tuples(st.sampled_from(["aggregator", "broker"]), st.floats(0, 40)), max_size=3),
)
def test_whatever_happens_the_books_are_balanced(times: list[DeviceTimes], drops: Any, cuts: Any, crashes: Any) -> None:
    scenario = {
        "drop_out": [{"devices": 1, "at_s": at, "for_s": length} for at, length in drops],
        "outage": [{"devices": 1, "at_s": at, "for_s": length} for at, length in cuts],
        "crash": [{"process": process, "at_s": at, "for_s": 2.0} for process, at in crashes],
    }
    fleet = clock(times, scenario=scenario, rounds=3, deadline_s=60, logging=True)
    outcomes = run(fleet)
    assert [outcome.round for outcome in outcomes] == [1, 2, 3]
    moments = [event.at_s for outcome in outcomes for event in outcome.events]
    assert moments == sorted(moments)
    for each in fleet.fleet:
        spent = each.spent
        assert spent.chosen == spent.used + spent.late + spent.given_up + spent.declined + spent.lost
        assert spent.charged.total() == spent.used + spent.late
        assert each.participations == spent.charged.total()
        assert min(spent.up_bytes, spent.down_bytes, spent.compute_s) >= 0
        assert 0 < spent.on_s <= outcomes[-1].closed_s + 1e-9
    again = run(clock(times, scenario=scenario, rounds=3, deadline_s=60, logging=True))
    assert again == outcomes
