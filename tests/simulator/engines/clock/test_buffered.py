"""Buffered rounds on the virtual clock: who begins when, what comes late, and what sleep costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.simulator.engines.clock.buffered import BufferedClock
from hushfleet.simulator.world.outcomes import ClockRound
from support.virtual_clock import ARRIVES, BORN, PLAIN, clock, run

QUICK, SLOW = PLAIN, replace(PLAIN, step_s=20.0)


def buffered(times: Any, **rules: Any) -> BufferedClock:
    settings: dict[str, Any] = {"mode": "buffered", "buffer_size": 2, "max_staleness": 5, "rounds": 3}
    return clock(times, kind=BufferedClock, **(settings | rules))


def who(outcome: ClockRound) -> list[tuple[str, int]]:
    return [(arrival.device, arrival.round) for arrival in outcome.arrivals]


def test_nobody_waits_for_a_slow_device() -> None:
    outcomes = run(buffered([QUICK, QUICK, SLOW], rounds=12, max_staleness=10))
    assert [sorted(who(outcome)) for outcome in outcomes[:3]] == [[("a", n), ("b", n)] for n in (1, 2, 3)]
    assert abs(outcomes[0].closed_s - BORN - ARRIVES) < 0.2
    assert ("c", 1) in [each for outcome in outcomes for each in who(outcome)], "its update is stale and counts"


def test_an_update_that_is_too_stale_is_lost() -> None:
    fleet = buffered([QUICK, QUICK, SLOW], rounds=8, max_staleness=1)
    outcomes = run(fleet)
    assert all(device != "c" for outcome in outcomes for device, _ in who(outcome))
    assert fleet.fleet[2].spent.given_up > 0


def test_a_device_that_sleeps_hands_in_what_it_had_committed() -> None:
    """It is switched off after its commit and before its update has come, and misses a version."""
    off = {"drop_out": ({"devices": ("a",), "at_s": BORN + ARRIVES - 0.05, "for_s": 15.0},)}
    outcomes = run(buffered([QUICK, QUICK, QUICK], rounds=3, scenario=off))
    assert ("a", 1) in who(outcomes[1]) + who(outcomes[2])


@settings(max_examples=40, deadline=None)
@given(
    slow=st.lists(st.floats(0.5, 40.0), min_size=2, max_size=6),
    size=st.integers(1, 2),
    most=st.integers(1, 4),
    share=st.floats(0.5, 0.9),
    period=st.floats(200.0, 600.0),
    cut=st.lists(st.tuples(st.floats(0.0, 200.0), st.floats(1.0, 60.0)), max_size=3),
    crash=st.lists(st.tuples(st.floats(0.0, 200.0), st.floats(1.0, 30.0)), max_size=1),
)
def test_whatever_happens_the_books_are_right(
    slow: list[float], size: int, most: int, share: float, period: float, cut: list[Any], crash: list[Any]
) -> None:
    scenario = {
        "day": ({"devices": "all", "share": share, "period_s": period},),
        "outage": tuple({"devices": 1, "at_s": at_s, "for_s": for_s} for at_s, for_s in cut),
        "crash": tuple({"process": "aggregator", "at_s": at_s, "for_s": for_s} for at_s, for_s in crash),
    }
    fleet = buffered(
        [replace(PLAIN, step_s=step_s / 3) for step_s in slow], buffer_size=size, max_staleness=most, rounds=8,
        scenario=scenario, deadline_s=1000,
    )  # fmt: skip
    outcomes = run(fleet)
    arrived = [(arrival, outcome) for outcome in outcomes for arrival in outcome.arrivals]
    stale = [each for outcome in outcomes for each in outcome.stale]
    assert [len(outcome.arrivals) for outcome in outcomes] == [size] * 8
    assert all(0 <= outcome.round - arrival.round <= most for arrival, outcome in arrived)
    made = Counter([(arrival.device, arrival.round) for arrival, _ in arrived] + stale)
    assert set(made.values()) == {1}, "one update a device and version, in one buffer"
    for device in fleet.fleet:
        rounds = [arrival.round for arrival, _ in arrived if arrival.device == device.name]
        assert rounds == sorted(rounds)
        spent = device.spent
        assert spent.charged.total() == spent.used + spent.late == sum(name == device.name for name, _ in made)
        assert spent.chosen == spent.used + spent.late + spent.given_up + spent.declined + spent.lost
