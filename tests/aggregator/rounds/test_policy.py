"""When rounds open and close, without a round engine: what a virtual clock asks must be what the field does."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.rounds.next_round import NextRound
from hushfleet.aggregator.rounds.policy import ClosingRule, least_devices, may_open
from hushfleet.aggregator.rounds.thresholds import Thresholds


def rule(cohort: int = 4, *, least_ready: int = 1, **rules: Any) -> ClosingRule:
    closing = ClosingRule(RoundSection(**{"deadline_s": 100, **rules}), least_ready=least_ready)
    closing.begin([f"d{index}" for index in range(cohort)], now=10.0)
    return closing


def test_the_quorum_closes_at_once() -> None:
    closing = rule(quorum=0.6)  # 2.4 of 4: three
    for accepted, decision in ((1, "wait"), (2, "wait"), (3, "close")):
        closing.accept(f"d{accepted}")
        assert (closing.accepted, closing.decide(11.0, ready=0)) == (accepted, decision)
    closing = rule(5, quorum=0.2, min_updates=3)
    closing.accept("d0")
    assert closing.decide(11.0, ready=0) == "wait", "min_updates is more than the quorum"


def test_the_deadline_closes_with_enough_and_is_put_off_with_fewer() -> None:
    closing = rule(min_updates=2)
    closing.accept("d0")
    assert closing.decide(109.9, ready=9) == "wait"
    assert (closing.decide(110.0, ready=9), closing.deadline, closing.announced_deadline_s) == ("extend", 210.0, 200.0)
    closing.accept("d1")
    assert closing.decide(209.9, ready=9) == "wait"
    assert closing.decide(210.0, ready=9) == "close"


def test_who_is_lost_is_waited_for_a_quarter_of_the_deadline() -> None:
    closing = rule(2)
    closing.accept("d0")
    closing.lost("d1", now=20.0)
    assert [closing.decide(at, ready=1) for at in (44.9, 45.0)] == ["wait", "close"]
    closing = rule(2)
    closing.accept("d0")
    closing.lost("d1", now=20.0)
    closing.back("d1")
    assert closing.decide(60.0, ready=1) == "wait"
    assert rule(deadline_s=1000).grace_s == 60


def test_a_hopeless_round_is_given_up_at_its_second_deadline_if_others_are_ready() -> None:
    for ready, decision in ((2, "extend"), (3, "close")):
        closing = rule(2, least_ready=3)
        closing.lost("d0", now=11.0)
        closing.lost("d1", now=11.0)
        assert closing.decide(110.0, ready=9) == "extend"
        assert closing.decide(210.0, ready=ready) == decision


def test_answers_end_the_waiting() -> None:
    closing = rule(2)
    closing.answer("d0", "d1")
    assert not closing.expects("d0")
    assert closing.decide(11.0, ready=9) == "close", "nobody can make a model any more"
    closing = rule(2)
    closing.decline("d0", "busy")
    closing.decline("d1", "budget")
    assert closing.decide(11.0, ready=9) == "wait", "the slow one is asked again with a longer deadline"
    assert closing.decide(110.0, ready=0) == "close", "nobody is left to wait for"


ACTS = {"accept": "accept", "budget": "decline", "busy": "decline", "refuse": "answer", "lose": "lost"}


def after(past: Sequence[tuple[str, str]], cohort: int, min_updates: int) -> ClosingRule:
    closing = rule(cohort, min_updates=min_updates)
    for name, act in past:
        arguments = {"decline": {"code": act}, "lost": {"now": 11.0}}.get(ACTS[act], {})
        getattr(closing, ACTS[act])(name, **arguments)
    return closing


@settings(max_examples=300)
@given(data=st.data(), cohort=st.integers(1, 4), min_updates=st.integers(1, 4))
def test_a_round_is_given_up_exactly_when_no_continuation_makes_a_model(
    data: st.DataObject, cohort: int, min_updates: int
) -> None:
    """The slow way tries every continuation: each device without a last word sends an update, or does not."""
    names = [f"d{index}" for index in range(cohort)]
    acted = data.draw(st.lists(st.sampled_from(names), unique=True))
    past = [(name, data.draw(st.sampled_from(sorted(ACTS)))) for name in acted]
    acts = dict(past)
    last_words = {"accept", "budget", "refuse"}
    open_names = [name for name in names if acts.get(name) not in last_words]
    sent = sum(act == "accept" for act in acts.values())
    can_succeed = any(sent + sum(choice) >= min_updates for choice in itertools.product((0, 1), repeat=len(open_names)))
    closing = after(past, cohort, min_updates)
    assert closing.is_hopeless != can_succeed
    if not can_succeed:
        assert closing.decide(11.0, ready=0) == "close"
    elif sent < min_updates:
        assert closing.decide(11.0, ready=99) == "wait", "an update that is paid for may still come"
        for name in open_names:
            closing.accept(name)
        assert closing.decide(11.0, ready=0) == "close"
        assert closing.accepted >= min_updates


def test_who_declines_for_good_counts_again_with_a_new_card() -> None:
    closing = rule(2, min_updates=2)
    closing.accept("d0")
    closing.decline("d1", "budget")
    assert closing.is_hopeless
    closing.keys_changed("d1")
    assert not closing.is_hopeless


def test_without_a_cohort_a_round_waits_for_updates_and_for_nobody() -> None:
    closing = rule(3, mode="buffered", buffer_size=2)
    for act in (closing.accept, lambda name: closing.decline(name, "budget")):
        act("d0")
        assert closing.decide(1e6, ready=0) == "wait"
    closing.lost("d1", now=11.0)
    assert (closing.decide(1e6, ready=0), closing.wait_longer(1e6)) == ("wait", False)
    assert closing.announced_deadline_s == 100, "no device's time to train grows with each night that the round rests"
    closing.accept("d2")
    assert closing.decide(12.0, ready=0) == "close"


def test_a_committees_answers_are_not_given_up_early() -> None:
    closing = rule(3, min_updates=2)
    closing.begin_answers(["d0", "d1", "d2"], least=3, now=10.0)
    closing.answer("d0")
    assert not closing.is_hopeless, "updates are paid for, and a lost member may come back"


def test_fewer_updates_hold_at_once_and_more_from_the_next_round_on() -> None:
    closing = rule(4, min_updates=3)
    closing.accept("d0")
    closing.accept("d1")
    closing.require(4)
    assert closing.min_updates == 3
    closing.require(2)
    assert (closing.min_updates, closing.decide(110.0, ready=0)) == (2, "close")
    closing.require(4)
    closing.begin(["d0", "d1", "d2", "d3"], now=200.0)
    assert closing.min_updates == 4


@given(
    present=st.integers(0, 12),
    min_devices=st.none() | st.integers(1, 12),
    cohort_size=st.integers(0, 12),
    min_updates=st.integers(1, 12),
    closed=st.integers(0, 2),
    waited_s=st.floats(0, 20),
)
def test_rounds_open_as_the_aggregator_opens_them(
    present: int, min_devices: int | None, cohort_size: int, min_updates: int, closed: int, waited_s: float
) -> None:
    rules = RoundSection(
        min_devices=min_devices, cohort_size=cohort_size, min_updates=min_updates, deadline_s=10, rounds=5
    )
    least = least_devices(rules, devices=8)
    engine = SimpleNamespace(
        prepared=SimpleNamespace(task=SimpleNamespace(round=rules)),
        closed_rounds=closed,
        drawn_at=None,
    )
    needed = Thresholds(least, min_updates, is_fixed=min_devices is not None)
    next_round: Any = SimpleNamespace(_engine=engine)
    expected = NextRound._enough(next_round, needed, present, waited_s=waited_s)
    assert may_open(rules, present, least=least, closed_rounds=closed, waited_s=waited_s) == expected


@pytest.mark.parametrize(
    ("rules", "least"), [({}, 8), ({"cohort_size": 3}, 3), ({"cohort_size": 3, "min_devices": 5}, 5)]
)
def test_how_many_a_round_needs(rules: dict[str, int], least: int) -> None:
    assert least_devices(RoundSection(**rules), devices=8) == least


def test_a_resumed_round_takes_a_higher_number_only_where_it_can_be_reached() -> None:
    """An earlier version may have opened it with fewer; what boards have paid must not be thrown away by an update."""
    for wanted, holds in ((3, 3), (4, 1)):
        closing = rule(4, min_updates=1)
        closing.accept("d0")
        closing.decline("d1", "budget")
        closing.require(wanted, at_once=True)
        assert (closing.min_updates, closing.is_hopeless) == (holds, False)
