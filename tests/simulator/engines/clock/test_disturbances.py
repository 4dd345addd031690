"""Power, networks and the aggregator come and go under the virtual clock: timelines by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.simulator.engines.clock.calendar import Calendar
from hushfleet.simulator.engines.clock.sums import Drawn, SummedClock
from hushfleet.simulator.world.run import LinkOptions
from hushfleet.wire.format.messages import Ask, Birth
from support.virtual_clock import (
    ARRIVES,
    BORN,
    KILLED,
    PLAIN,
    SIZES,
    WIRE,
    arrivals,
    clock,
    run,
)

PROMPT = replace(KILLED, first_backoff_s=1e-4, longest_backoff_s=1e-4)
"""Whose link is tried again at once, so that moments can be told."""


def test_a_power_cut_before_the_commit_spends_nothing_and_the_device_begins_again() -> None:
    # killed 5 s into round 1, in the second batch; back after 2 s and heard of 0.7 s later; it holds the model
    scenario = {"drop_out": [{"devices": ["b"], "at_round": 1, "for_s": 2.0}]}
    fleet = clock([PLAIN, replace(PLAIN, start_s=1.0)], scenario=scenario, deadline_s=100)
    (only,) = run(fleet)
    opened = 1.7
    assert round(only.opened_s, 6) == opened
    # it is cut off as the round opens, so it never had the model: from its link (7 latencies less one) on
    back = opened + 2 + 1.0 + 0.6
    assert arrivals(only)["b"] == round(back + 0.1 + 0.05 + 0.1 + 1 + 6.5 + 0.1, 6)
    assert fleet.fleet[1].spent.charged == {2: 1}


def test_a_power_cut_while_training_loses_the_work_and_after_the_commit_loses_nothing() -> None:
    during = {"drop_out": [{"devices": ["a"], "at_s": BORN + 3.35, "for_s": 2.0}]}
    fleet = clock([PLAIN], scenario=during)
    (only,) = run(fleet)
    linked = BORN + 3.35 + 2 + 0.6
    assert arrivals(only) == {"a": round(linked + 6.5 + 0.1, 6)}, "the model is in its store"
    assert round(fleet.fleet[0].spent.compute_s, 6) == 2 + 6.5
    sending = replace(PLAIN, up_s_per_byte=4.0 / WIRE)  # sends from 7.85 to 11.85
    after = {"drop_out": [{"devices": ["a"], "at_s": BORN + 9.85, "for_s": 2.0}]}
    fleet = clock([sending], scenario=after)
    (only,) = run(fleet)
    linked = BORN + 9.85 + 2 + 0.6
    assert arrivals(only) == {"a": round(linked + 4 + 0.1, 6)}, "the same bytes again, from the first on"
    spent = fleet.fleet[0].spent
    assert (round(spent.compute_s, 6), spent.charged) == (6.5, {1: 1})
    assert spent.up_bytes > 1.5 * WIRE


def test_a_cut_network_stops_what_travels_and_not_the_work() -> None:
    sending = replace(PLAIN, up_s_per_byte=4.0 / WIRE)  # commits 7.85 after the opening, and sends until 11.85
    quiet = clock([sending])
    calm = run(quiet)[0].arrivals[0].at_s

    def delayed(begins: float, ends: float) -> tuple[float, float]:
        """By how many seconds, and how many bytes, for a network that is away from then to then."""
        cut = {"outage": [{"devices": "all", "at_s": BORN + begins, "for_s": ends - begins}]}
        fleet = clock([sending], scenario=cut, deadline_s=400, options=PROMPT)
        bytes_more = fleet.fleet[0].spent
        later = run(fleet)[0].arrivals[0].at_s - calm
        again = SIZES.packet[Birth] + SIZES.packet[Ask]  # what each new link begins with
        return round(later, 2), round(bytes_more.up_bytes - quiet.fleet[0].spent.up_bytes - again, 2)

    # a link that is up again since `ends` takes three round trips: 0.6 s
    assert delayed(2.0, 4.0) == (0, 0), "it trains through it"
    assert delayed(2.0, 9.0) == (pytest.approx(9.6 - 7.85), 0), "what is ready waits for the link"
    # half of the update had gone; it offers it again, is told what is missing, and sends on: 0.2 s
    assert delayed(9.85, 13.0) == (pytest.approx(13.6 + 0.2 - 9.85), 0)
    # of the model, which comes from 0.35 to 1.35, half had come; it asks for the rest: 0.25 s
    assert delayed(0.85, 3.0) == (pytest.approx(3.6 + 0.25 - 0.85), 0)
    # before the broadcast: all is asked for
    assert delayed(0.15, 3.0) == (pytest.approx(3.6 + 0.25 - 0.35), 0)


def test_waits_for_a_new_link_grow_up_to_a_longest() -> None:
    cut = {"outage": [{"devices": "all", "at_s": 2.0, "for_s": 3000.0}]}
    options = LinkOptions(lost_noticed_s=0.0, first_backoff_s=1.0, longest_backoff_s=120.0)
    fleet = clock([PLAIN] * 20, scenario=cut, options=options, deadline_s=10_000, min_updates=20, logging=True)
    (only,) = run(fleet)
    back = [event.at_s - 3002 for event in only.events if event.event == "presence" and event.at_s > 3000]
    assert len([each for each in back if each > 20]) > 10
    assert max(back) <= 120.8


def test_a_device_without_a_network_goes_on_until_its_own_deadline() -> None:
    slow = replace(PLAIN, step_s=9.0)  # third batch from 19.35
    cut = {"outage": [{"devices": ["b"], "at_s": BORN + 3, "for_s": 1000.0}]}
    for deadline_s, batches, fate in ((30, 3, "late"), (15, 2, "given_up")):
        fleet = clock([PLAIN, slow], scenario=cut, deadline_s=deadline_s, min_updates=1)
        (only,) = run(fleet)
        assert getattr(only, fate) == ("b",)
        # lost for good a quarter of the deadline after it was cut off, or when the other one has sent, if that is later
        assert round(only.closed_s - BORN, 4) == round(max(3 + deadline_s / 4, ARRIVES), 4)
        assert round(fleet.fleet[1].spent.compute_s, 6) == 9 * batches + (0.5 if fate == "late" else 0)


def test_a_dead_aggregator_takes_nothing_and_a_dead_broker_cuts_everybody() -> None:
    down = {"crash": [{"process": "aggregator", "at_s": BORN + 7.0, "for_s": 2.0}]}
    fleet = clock([PLAIN], scenario=down, logging=True)
    (only,) = run(fleet)
    # back at 9 + 3 to start: the device offers, is told that all is missing, and sends: 0.3 s
    assert arrivals(only) == {"a": round(BORN + 12 + 0.3, 6)}
    assert [event.event for event in only.events].count("run") == 1
    cut = {"crash": [{"process": "broker", "at_s": BORN + 7.0, "for_s": 2.0}]}
    fleet = clock([PLAIN], scenario=cut, logging=True)
    (only,) = run(fleet)
    links = [(event.fields["state"], event.at_s) for event in only.events if event.event == "link"]
    assert [state for state, _ in links] == ["down", "up"]
    assert links[0][1] == pytest.approx(BORN + 7)
    assert BORN + 9 <= links[1][1] <= BORN + 9 + 8
    assert arrivals(only)["a"] >= links[1][1]
    assert fleet.fleet[0].spent.charged == {1: 1}


def test_an_aggregator_that_starts_again_waits_anew_for_who_is_away() -> None:
    """The second round waits for b for a deadline: since the first one has closed, or since the new start."""
    gone = {"drop_out": [{"devices": ["b"], "at_s": BORN + ARRIVES - 0.01, "for_s": 5000.0}]}
    rules: dict[str, Any] = {"rounds": 2, "quorum": 0.5, "deadline_s": 100}
    fleet = [PLAIN, replace(PLAIN, step_s=2.1)]
    first, second = run(clock(fleet, scenario=gone, **rules))
    assert second.opened_s - first.closed_s == pytest.approx(100, abs=0.01)
    crash = {"crash": [{"process": "aggregator", "at_s": BORN + ARRIVES + 50.0, "for_s": 2.0}]}
    first, second = run(clock(fleet, scenario=gone | crash, **rules))
    assert second.opened_s - first.closed_s == pytest.approx(50 + 5 + 100, abs=0.01)


def test_days_and_nights_are_followed_and_energy_is_counted_by_day_only() -> None:
    night = {"day": [{"devices": "all", "period_s": 100.0, "share": 0.5}]}
    fleet = clock([PLAIN], scenario=night, rounds=12, deadline_s=400, logging=True)
    outcomes = run(fleet)
    states = {event.fields["state"] for each in outcomes for event in each.events if event.event == "presence"}
    assert states == {"ready", "training", "sleeping"}
    spent, end = fleet.fleet[0].spent, outcomes[-1].closed_s
    assert len(outcomes) == 12
    assert end > 2 * 12 * 7.95 - 100, "half of the time it sleeps"
    assert 0.4 < spent.on_s / end < 0.8
    assert spent.charged == {1: 12}


def test_who_has_begun_anew_after_a_deadline_goes_on_after_a_cut() -> None:
    slow = replace(PLAIN, model_s=10.0, step_s=5.0)  # gives up at 20.35, and has the model
    cut = {"outage": [{"devices": ["a"], "at_s": BORN + 25, "for_s": 2.0}]}
    (only,) = run(clock([slow], scenario=cut, deadline_s=20, options=PROMPT))
    assert (arrivals(only), only.extensions) == ({"a": round(BORN + 20.35 + 15.5 + 0.1, 6)}, 1)


def summed(fleet: int, *, members: list[str], scenario: dict[str, Any], **rules: Any) -> SummedClock:
    """Devices of PLAIN with secure sums, which two of the members open."""

    class Draws:
        rate = 1.0

        def of(self, round: int) -> Drawn:
            return Drawn(["a", "b", "c", "d"][:fleet], members, 2, 100)

    kind: Any = partial(SummedClock, draws=Draws())
    made: SummedClock = clock([PLAIN] * fleet, kind=kind, scenario=scenario, logging=True, **rules)
    return made


def test_who_comes_back_while_a_committee_answers_does_not_train() -> None:
    away = {"drop_out": [{"devices": ["c"], "at_s": 3.0, "for_s": 80.0}]}
    (only,) = run(summed(3, members=["b", "c"], scenario=away, min_updates=2))
    kinds = [event.event for event in only.events if event.event in ("unmask", "answer")]
    assert (kinds, only.lost, only.used) == (["unmask", "answer", "answer"], ("c",), True)
    trainings = [event.at_s for event in only.events if event.fields.get("state") == "training"]
    assert max(trainings) < 3


def test_a_sum_waits_for_a_lost_member_as_in_the_field() -> None:
    """c is lost before it answers, and back after two more deadlines; only after the third is the round given up."""
    for away_s, used in ((230.0, True), (500.0, False)):
        away = {"drop_out": [{"devices": ["c"], "at_s": BORN + ARRIVES + 0.05, "for_s": away_s}]}
        (only,) = run(summed(3, members=["b", "c"], scenario=away, min_devices=2, min_updates=3, deadline_s=100))
        answers = [event.fields["device"] for event in only.events if event.event == "answer"]
        assert (only.used, answers) == (used, ["b", "c"] if used else ["b"])
        if not used:
            assert round(only.closed_s - BORN - ARRIVES) == 400


def test_a_committee_has_its_time_after_the_window() -> None:
    """The window ends while nobody can answer; its end extends no deadline, and answers may come by day."""
    nights = Calendar(ScheduleSection(timezone="UTC", between="00:00-01:00"))
    away = {"drop_out": [{"devices": ["b", "c"], "at_s": BORN + ARRIVES + 0.05, "for_s": 4000.0}]}
    fleet = summed(3, members=["b", "c"], scenario=away, calendar=nights, min_updates=3, deadline_s=2000)
    (only,) = run(fleet)
    assert (only.used, only.extensions) == (True, 2)
    assert 4000 < only.closed_s < 4100
