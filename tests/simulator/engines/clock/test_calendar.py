"""The virtual clock under a task's schedule, second 0 being Monday, 5 January 2026, 00:00."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.scenario import DropOutEntry
from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.config.task import load_task
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.clock.buffered import BufferedClock
from hushfleet.simulator.engines.clock.calendar import Calendar
from hushfleet.simulator.engines.clock.days import DayBook
from hushfleet.simulator.world.outcomes import STARTS
from support.virtual_clock import ARRIVES, BORN, PLAIN, arrivals, clock, run

TASK = Path(__file__).resolve().parents[4] / "tasks" / "digits-chaos.toml"

HOUR, DAY = 3600.0, 86400.0


def calendar(**keys: Any) -> Calendar:
    return Calendar(ScheduleSection(**{"timezone": "Europe/Berlin", **keys}))


def hours(outcomes: list[Any]) -> list[float]:
    return [round(outcome.opened_s / HOUR, 3) for outcome in outcomes]


def test_a_round_a_day_is_at_the_same_time_of_day_until_the_last_day() -> None:
    fleet = clock([PLAIN], rounds=90, calendar=calendar(every="24h", until="2026-04-01"))
    outcomes = run(fleet)
    assert len(outcomes) == 87
    assert round(outcomes[0].opened_s, 3) == BORN
    assert {round(outcome.wall_s, 3) for outcome in outcomes} == {ARRIVES}
    # clocks go forward on 29 March
    assert {round(outcome.opened_s % DAY / HOUR) for outcome in outcomes[:84]} == {0}
    assert {round(outcome.opened_s % DAY / HOUR) for outcome in outcomes[84:]} == {23}


def test_rounds_are_in_the_window() -> None:
    fleet = clock([PLAIN], rounds=4, calendar=calendar(every="1d", between="01:00-05:00", days=("mon", "wed")))
    assert hours(run(fleet)) == [1, 49, 7 * 24 + 1, 9 * 24 + 1]


def test_the_last_moment_of_a_window_is_followed_by_its_end() -> None:
    """Too few devices are there, and the window ends in less than a millisecond."""
    nights = calendar(between="01:00-05:00")
    assert nights.opens(HOUR * 5 - 5e-4) == HOUR * 5 - 5e-4
    again = nights.look_again(HOUR * 5 - 5e-4, RoundSection())
    assert again is not None
    assert nights.opens(again) == 25 * HOUR


def test_who_is_off_at_night_is_waited_for_only_for_a_while() -> None:
    nights = {"rounds": 2, "calendar": calendar(every="24h", between="01:00-05:00")}
    outcomes = run(
        clock(
            [PLAIN, PLAIN],
            scenario={"drop_out": (DropOutEntry(devices=("b",), at_s=20 * HOUR, for_s=14 * HOUR),)},
            deadline_s=2 * HOUR,
            **nights,
        )
    )
    assert hours(outcomes) == [1, 26], "the second night waits for b, for a quarter of the window"
    assert [len(outcome.arrivals) for outcome in outcomes] == [2, 1]


def test_a_round_rests_between_two_windows() -> None:
    nights = {"min_updates": 2, "deadline_s": DAY, "calendar": calendar(between="01:00-03:00")}
    late = replace(PLAIN, step_s=0.9 * HOUR)  # its last batch has begun when the window ends
    (outcome,) = run(clock([PLAIN, late], **nights))
    assert [arrival.at_s // HOUR for arrival in outcome.arrivals] == [1, 3]
    assert round(outcome.closed_s / HOUR, 3) == 25


def test_who_never_has_time_enough_in_a_window_spends_nothing() -> None:
    slow = replace(PLAIN, step_s=1.5 * HOUR)
    fleet = clock([PLAIN, slow], min_updates=2, deadline_s=DAY, calendar=calendar(between="01:00-03:00"))
    with pytest.raises(HushfleetError, match="round 1 never closes"):
        run(fleet)
    assert fleet.fleet[1].spent.charged.total() == 0
    assert fleet.fleet[1].spent.compute_s > 80 * 1.9 * HOUR, "it tried each night"


def test_who_has_declined_is_asked_again_in_the_next_window() -> None:
    """As in the field: `RoundCycle` gives a round up in its second window at the earliest."""
    nights = {"between": "01:00-05:00"}
    small = replace(PLAIN, enough_memory=False)
    fleet = clock([PLAIN, small], min_updates=2, deadline_s=DAY, calendar=calendar(**nights), logging=True)
    (outcome,) = run(fleet)
    declined = [event.at_s // HOUR for event in outcome.events if event.event == "decline"]
    assert (declined, round(outcome.closed_s / HOUR), outcome.used) == ([1, 25], 29, False)
    # 3.5 hours: b has declined at the first deadlines, and in the second window it has all of it
    slow, silent = replace(PLAIN, step_s=HOUR * 7 / 6), replace(PLAIN, step_s=10 * HOUR)
    (outcome,) = run(clock([PLAIN, slow, silent], min_updates=2, deadline_s=HOUR, calendar=calendar(**nights)))
    assert {name: at // HOUR for name, at in arrivals(outcome).items()} == {"a": 1, "b": 28}


BUFFERED = {"mode": "buffered", "max_staleness": 5, "deadline_s": DAY, "kind": BufferedClock}


def test_a_version_rests_between_two_windows_and_nobody_begins() -> None:
    """The buffer has one of its two updates when the window ends; the slow device begins again in the next one."""
    slow = replace(PLAIN, step_s=0.9 * HOUR)
    fleet = clock([PLAIN, slow], rounds=1, buffer_size=2, calendar=calendar(between="01:00-02:30"), **BUFFERED)
    with pytest.raises(HushfleetError, match=r"1 updates have come, and round\.buffer_size = 2"):
        run(fleet)
    spent = fleet.fleet[1].spent
    assert spent.charged.total() == 0
    assert spent.given_up > 80, "it tried each night"
    late = replace(PLAIN, step_s=0.9 * HOUR)
    off = {"drop_out": ({"devices": ("b",), "at_s": 10.0, "for_s": HOUR * 26},)}
    (outcome,) = run(
        clock(
            [PLAIN, late], rounds=1, buffer_size=2, calendar=calendar(between="01:00-05:00"), scenario=off, **BUFFERED
        )
    )  # fmt: skip
    assert [arrival.at_s // HOUR for arrival in outcome.arrivals] == [1, 28]


def test_between_two_windows_nobody_goes_on_with_an_older_version() -> None:
    """The slow device is at work when the first version closes, and has no time in the rest of any window."""
    slow = replace(PLAIN, step_s=0.9 * HOUR)
    nights = calendar(every="24h", between="01:00-02:30")
    fleet = clock([PLAIN, slow], rounds=4, buffer_size=1, calendar=nights, **BUFFERED)
    outcomes = run(fleet)
    assert hours(outcomes) == [1, 25, 49, 73]
    assert {arrival.device for outcome in outcomes for arrival in outcome.arrivals} == {"a"}
    spent = fleet.fleet[1].spent
    assert (spent.charged.total(), spent.given_up, spent.chosen) == (0, 4, 4)


ENDS: list[tuple[dict[str, Any], float, int]] = [
    (BUFFERED | {"buffer_size": 2}, 20 * HOUR, 1),
    ({"min_updates": 2, "deadline_s": HOUR}, 25 * HOUR + 1, 1),
    ({"min_updates": 2, "deadline_s": HOUR}, 20 * HOUR, 0),  # the second round never opens
]


@pytest.mark.parametrize(("rules", "off_s", "wasted"), ENDS)
def test_a_round_that_the_last_window_leaves_without_a_model_ends_the_rounds(
    rules: dict[str, Any], off_s: float, wasted: int
) -> None:
    off = {"drop_out": ({"devices": ("b",), "at_s": off_s, "for_s": 9 * DAY},)}
    nights = calendar(every="24h", between="01:00-05:00", until="2026-01-07")
    fleet = clock([PLAIN, PLAIN], rounds=9, calendar=nights, scenario=off, **rules)
    book = DayBook(3, starts=STARTS, budget=None, task=load_task(TASK))
    assert hours(list(book.noted(fleet.rounds(), fleet.fleet))) == [1]
    assert {name: len(charged) for name, charged in book._charged.items()} == {"a": 1 + wasted, "b": 1}
    spent = [device.spent for device in fleet.fleet]
    assert [each.charged.total() for each in spent] == [1 + wasted, 1]
    assert [each.unused.total() for each in spent] == [wasted, 0]
    assert all(each.chosen == each.used + each.late + each.given_up + each.declined + each.lost for each in spent)


def test_an_update_between_two_windows_counts_in_the_next_version() -> None:
    slow = replace(PLAIN, step_s=0.2 * HOUR)
    fleet = clock(
        [PLAIN, slow], rounds=2, buffer_size=1, calendar=calendar(every="24h", between="01:00-05:00"), **BUFFERED
    )
    first, second = run(fleet)
    assert [(each.device, each.round) for each in (*first.arrivals, *second.arrivals)] == [("a", 1), ("b", 1)]
    assert round(second.opened_s / HOUR) == 25
