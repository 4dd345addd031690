"""What holds of any fleet in a world, whatever happens to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.simulator.world.hub import STEADY, Roughness
from hushfleet.simulator.world.times import DeviceTimes
from support.world import BOARD, played, world

device = st.builds(
    replace,
    st.just(BOARD),
    latency_s=st.integers(1, 8).map(lambda each: each / 16),
    steps=st.integers(1, 4),
    step_s=st.integers(1, 40).map(lambda each: each / 8),
    release_s=st.integers(0, 40).map(lambda each: each / 8),
    up_s_per_byte=st.integers(0, 8).map(lambda each: each / 4000),
    rough=st.sampled_from([STEADY, Roughness(jitter_s=0.5, stall_every_s=2.0, stall_s=3.0)]),
)
fleets = st.lists(device, min_size=1, max_size=4)
moments = st.integers(0, 320).map(lambda each: each / 8 + 0.03)


@settings(max_examples=12, deadline=None)
@given(
    times=fleets,
    quorum=st.sampled_from([0.5, 1.0]),
    drops=st.lists(st.tuples(moments, st.floats(0.5, 20)), max_size=3),
    cuts=st.lists(st.tuples(moments, st.floats(0.5, 20)), max_size=3),
    crashes=st.lists(st.tuples(st.sampled_from(["aggregator", "broker"]), moments), max_size=2),
)
def test_whatever_happens_the_books_are_balanced(
    times: list[DeviceTimes], quorum: float, drops: Any, cuts: Any, crashes: Any
) -> None:
    scenario = {
        "drop_out": [{"devices": 1, "at_s": at, "for_s": length} for at, length in drops],
        "outage": [{"devices": 1, "at_s": at, "for_s": length} for at, length in cuts],
        "crash": [{"process": process, "at_s": at, "for_s": 2.0} for process, at in crashes],
    }
    fleet = world(times, scenario=scenario, rounds=3, deadline_s=60.0, quorum=quorum)
    outcomes = played(fleet)
    assert [outcome.round for outcome in outcomes] == [1, 2, 3]
    for outcome in outcomes:
        parts = [[each.device for each in outcome.arrivals], outcome.late, outcome.given_up, outcome.declined]
        assert sorted(name for part in (*parts, outcome.lost) for name in part) == list(outcome.cohort)
        assert outcome.opened_s < outcome.closed_s
    for each in fleet.fleet:
        spent = each.spent
        assert spent.chosen == spent.used + spent.late + spent.given_up + spent.declined + spent.lost
        assert spent.charged.total() == spent.used + spent.late
        assert min(spent.up_bytes, spent.down_bytes, spent.compute_s) >= 0
        assert 0 < spent.on_s <= outcomes[-1].closed_s + 1e-3
    assert played(world(times, scenario=scenario, rounds=3, deadline_s=60.0, quorum=quorum)) == outcomes
