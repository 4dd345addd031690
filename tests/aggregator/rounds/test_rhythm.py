"""Rounds that follow a schedule: over nights, restarts, pauses and clocks that jump (`support.field`)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.config.schedule import ScheduleSection
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.wire.format.messages import Ack, Ask, Decline, RoundPlan
from support.field import Field
from support.secure import SecureFleet

MakeField = Callable[..., Field]
HOUR = 3600.0
NIGHTLY = {"every": "24h", "between": "01:00-05:00", "timezone": "Europe/Berlin"}
DAILY = {"every": "24h", "timezone": "Europe/Berlin"}


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()


def field_at(make_field: MakeField, text: str, **options: Any) -> Field:
    """A field whose clock on the wall shows this time; all devices are there."""
    field = make_field(**options)
    field.fleet.wall_from = at(text) - field.fleet.now
    field.crash()
    field.join_all()
    return field


def send(field: Field, *names: str) -> None:
    for name in names:
        field.deliver(name, field.fleet.update(name).data)


def test_once_a_day_is_kept_over_restarts(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-26T09:00", schedule=DAILY)
    assert field.plan.phase == "open"
    send(field, *field.fleet.names)
    for _ in range(3):
        assert (field.plan.phase, field.plan.round) == ("closed", 1)
        field.crash()
        field.join_all()
        field.skip(7.9 * HOUR)
    assert field.plan.phase == "closed"
    field.skip(0.4 * HOUR)
    assert (field.plan.phase, field.plan.round) == ("open", 2)
    (told,) = {(event["round"], event["opens"], event["timezone"]) for event in field.events_of("next_round")}
    assert told[0] == 2
    assert told[1] == pytest.approx(at("2026-11-27T09:00"), abs=60)
    assert told[2] == "Europe/Berlin"


@pytest.mark.parametrize("jump_s", [-365 * 86400.0, -3 * HOUR, 3 * HOUR, 365 * 86400.0])
def test_a_clock_that_is_set_while_the_aggregator_runs_changes_no_rhythm(make_field: MakeField, jump_s: float) -> None:
    field = field_at(make_field, "2026-11-26T09:00", schedule=DAILY)
    send(field, *field.fleet.names)
    field.skip(12 * HOUR)
    field.fleet.wall_from += jump_s
    field.skip(HOUR)
    field.crash()  # the store knows, too
    field.join_all()
    field.skip(10.5 * HOUR)
    assert field.plan.phase == "closed"
    field.skip(0.6 * HOUR)
    assert (field.plan.phase, field.plan.round) == ("open", 2)


def test_a_clock_that_was_set_back_while_nothing_ran_delays_the_next_round_by_one_period(make_field: MakeField) -> None:
    field = field_at(make_field, "2027-11-26T09:00", schedule=DAILY)
    send(field, *field.fleet.names)
    field.fleet.wall_from -= 365 * 86400
    for _ in range(3):  # restarts do not delay it further
        field.crash()
        field.join_all()
        field.skip(7.9 * HOUR)
    assert field.plan.phase == "closed"
    field.skip(0.4 * HOUR)
    assert (field.plan.phase, field.plan.round) == ("open", 2)


@pytest.mark.parametrize("back_s", [3.0, 3 * HOUR, -16 * HOUR])
def test_a_clock_that_is_set_within_a_window_brings_no_second_round(make_field: MakeField, back_s: float) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY)
    send(field, *field.fleet.names)
    assert field.fleet.engine.closed_rounds == 1
    field.fleet.wall_from -= back_s
    for _ in range(10):
        field.skip(2 * HOUR - 60)
    assert len(field.events_of("round_open")) == 1
    for _ in range(14):
        field.skip(2 * HOUR)
    assert len(field.events_of("round_open")) == 2


def test_rounds_are_open_in_the_window_alone_and_deadlines_follow_it(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-26T18:00", schedule=NIGHTLY, deadline_s=3 * HOUR)
    assert field.plan.phase == "closed"
    field.skip(6.9 * HOUR)
    assert field.plan.phase == "closed"
    field.skip(2.5 * HOUR)  # 03:24: the window ends before the deadline
    assert field.plan.phase == "open"
    assert field.plan.deadline_s == pytest.approx(at("2026-11-27T05:00") - field.fleet.wall(), abs=1)
    send(field, "dev-0")
    field.skip(1.7 * HOUR)
    assert (field.plan.phase, field.fleet.engine.closed_rounds) == ("closed", 1)


def test_a_board_that_is_off_at_night_comes_in_the_next_window(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY, deadline_s=HOUR, min_updates=3)
    send(field, "dev-0", "dev-1")
    field.send("dev-2", field.birth("dev-2", state="lost"), "state")
    field.skip(4.1 * HOUR)
    assert field.plan.phase == "closed", "nobody trains by day"
    assert field.fleet.engine.accepted == 2
    field.crash()
    field.join_all()  # all are there by day
    assert (field.plan.phase, field.fleet.engine.closed_rounds) == ("closed", 0)
    field.skip(20 * HOUR)
    assert (field.plan.phase, field.plan.round) == ("open", 1)
    send(field, "dev-2")
    assert field.fleet.engine.closed_rounds == 1
    assert len(field.fleet.store.updates(1)) == 3


@pytest.mark.parametrize("restarts", [False, True])
def test_boards_that_were_too_slow_for_one_window_are_waited_for_in_the_next(
    make_field: MakeField, restarts: bool
) -> None:
    """Who still trains when the window ends says that it is `busy`. What was accepted must not be lost for it."""
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY, deadline_s=10 * HOUR, min_updates=3)
    send(field, "dev-0")
    field.skip(4.1 * HOUR)
    for name in ("dev-1", "dev-2"):
        field.send(name, Decline("tiny-0001", 1, "busy", "the deadline passed before training had ended"))
    field.run()
    if restarts:
        field.crash()
        field.join_all()
    field.skip(20 * HOUR)
    assert (field.plan.phase, field.plan.round, field.fleet.engine.accepted) == ("open", 1, 1)
    send(field, "dev-1", "dev-2")
    assert field.fleet.engine.closed_rounds == 1
    assert len(field.fleet.store.updates(1)) == 3


def test_a_board_that_was_locked_out_meanwhile_is_not_waited_for_again(make_field: MakeField) -> None:
    field = make_field(min_updates=2)
    field.join_all()
    field.send("dev-2", Decline("tiny-0001", 1, "budget", "spent"))
    field.pause.touch()
    field.run(0.5)
    field.coordinator.enrolment.block("dev-2", "stolen")
    field.fleet.now += 2.0
    field.run(0.5)
    field.pause.unlink()
    field.run(0.5)
    assert field.plan.phase == "open"
    send(field, "dev-0", "dev-1")
    assert field.fleet.engine.closed_rounds == 1


def test_a_fleet_that_is_not_complete_opens_within_its_window(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY, deadline_s=10 * HOUR)
    send(field, *field.fleet.names)
    field.send("dev-2", field.birth("dev-2", state="lost"), "state")
    field.skip(23.9 * HOUR)
    field.skip(0.2 * HOUR)
    assert field.plan.phase == "closed", "it is waited for"
    field.skip(HOUR)
    assert (field.plan.round, sorted(field.plan.cohort)) == (2, ["dev-0", "dev-1"])


def test_training_that_is_paused_goes_on_where_it_was(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    field.pause.touch()
    field.run(0.5)
    assert field.plan.phase == "closed", "who trains gives up, and has spent nothing"
    field.crash()
    field.join_all()
    field.skip(100 * HOUR)
    assert (field.plan.phase, field.fleet.engine.accepted) == ("closed", 0)
    field.pause.unlink()
    field.run(0.5)
    assert (field.plan.phase, field.plan.round) == ("open", 1)
    field.deliver("dev-0", data)
    send(field, "dev-1", "dev-2")
    assert len(field.fleet.store.updates(1)) == 3
    assert [event["state"] for event in field.events_of("pause")] == ["on", "on", "off"]


def heard(field: Field, name: str) -> list[RoundPlan]:
    """The plans that have come to the device since the last call."""
    payloads = [each.payload for each in field.inbox[name] if each.topic == field.topics.round]
    field.inbox[name].clear()
    plans = [field.decoded(payload, field.identity.public_key) for payload in payloads]
    return [plan for plan in plans if isinstance(plan, RoundPlan)]


@pytest.mark.parametrize("buffered", [False, True])
def test_an_aggregator_that_starts_again_in_a_pause_lets_nobody_train(make_field: MakeField, buffered: bool) -> None:
    field = make_field(**(BUFFERED if buffered else {}))
    field.join_all()
    field.pause.touch()
    field.run(0.5)
    assert heard(field, "dev-0")[-1].phase == "closed"
    field.crash()
    assert {(plan.phase, plan.max_staleness) for plan in heard(field, "dev-0")} == {("closed", 0)}


def test_an_aggregator_that_starts_again_by_day_lets_nobody_train(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY, deadline_s=HOUR, min_updates=3)
    send(field, "dev-0")
    field.skip(4.1 * HOUR)
    assert heard(field, "dev-0")[-1].phase == "closed"
    field.crash()
    assert {plan.phase for plan in heard(field, "dev-0")} == {"closed"}


def test_a_board_that_was_away_in_a_pause_hears_that_its_round_has_more_time(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    before = field.plan
    field.pause.touch()
    field.run(0.5)
    field.skip(100 * HOUR)
    field.pause.unlink()
    field.run(0.5)
    assert (field.plan.phase, field.plan.round) == ("open", before.round)
    assert field.plan.deadline_s > before.deadline_s


def test_training_that_is_resumed_by_day_tells_when_its_round_goes_on(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY)
    field.pause.touch()
    field.run(0.5)
    field.skip(8 * HOUR)
    assert field.events_of("next_round") == []
    field.pause.unlink()
    field.run(0.5)
    assert [(event["round"], event["opens"]) for event in field.events_of("next_round")] == [
        (1, at("2026-11-28T01:00"))
    ]
    assert field.events_of("round_extended") == []
    field.skip(16 * HOUR)
    assert field.plan.phase == "open"
    assert len(field.events_of("round_extended")) == 1


def test_a_round_that_goes_on_after_a_pause_has_missed_no_deadline(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    field.pause.touch()
    field.run(0.5)
    field.pause.unlink()
    field.run(0.5)
    assert field.plan.phase == "open"
    assert field.events_of("round_extended") == []


def test_no_round_opens_while_training_is_paused(make_field: MakeField) -> None:
    field = make_field()
    field.pause.touch()
    field.join_all()
    assert field.plan.phase == "closed"
    field.pause.unlink()
    field.run(0.5)
    assert field.plan.phase == "open"


def test_a_task_ends_after_its_last_day(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-26T09:00", schedule={**DAILY, "until": "2026-11-26"})
    send(field, *field.fleet.names)
    assert field.plan.phase == "finished"
    assert field.events_of("finished")[0]["reason"] == "no round opens after 2026-11-26 (schedule.until)"


def test_a_secure_fleet_obeys_window_and_pause(tmp_path: Path) -> None:
    fleet = SecureFleet(tmp_path / "run", schedule=NIGHTLY)
    fleet.wall_from = at("2026-11-27T00:30") - fleet.now
    field = Field(fleet, tmp_path)
    field.join_all()
    assert field.plan.phase == "closed"
    field.skip(0.6 * HOUR)
    assert field.plan.phase == "open"
    field.pause.touch()
    field.run(0.5)
    assert (field.plan.phase, fleet.engine.collects_updates) == ("closed", True)
    field.pause.unlink()
    field.run(0.5)
    assert field.plan.phase == "open"
    for name in fleet.names:
        field.deliver(name, fleet.update(name))
    assert field.plan.phase == "unmask"
    field.pause.touch()
    field.run(0.5)
    assert field.plan.phase == "unmask", "a committee's answers are no training"
    fleet.store.close()


BUFFERED = {
    "mode": "buffered", "buffer_size": 2, "max_staleness": 2, "rounds": 4, "method": "dp-fedavg",
    "accounting": "strict",
}  # fmt: skip


def test_a_buffered_round_rests_while_training_is_paused(make_field: MakeField) -> None:
    field = make_field(**BUFFERED)
    field.join_all()
    late = field.fleet.update("dev-0").data
    send(field, "dev-1", "dev-2")
    send(field, "dev-1")
    assert (field.plan.round, field.fleet.engine.accepted) == (2, 1)
    field.pause.touch()
    field.run(0.5)
    assert (field.plan.phase, field.plan.max_staleness) == ("closed", 0), "nobody goes on with an older model"
    field.crash()
    field.join_all()
    assert (field.plan.phase, field.plan.max_staleness) == ("closed", 0)
    field.pause.unlink()
    field.run(0.5)
    assert (field.plan.phase, field.plan.round, field.plan.max_staleness) == ("open", 2, 2)
    assert isinstance(field.deliver("dev-0", late, round=1), Ack)
    assert field.fleet.engine.closed_rounds == 2


def test_a_board_that_came_while_a_round_rested_is_noted_when_another_process_goes_on(make_field: MakeField) -> None:
    """That process says that the round is open before it has heard who is there."""
    field = make_field(charges=True, **BUFFERED)
    field.join("dev-0")
    field.pause.touch()
    field.run(0.5)
    field.join("dev-2")
    field.send("dev-2", Ask(1, bytes(16)))
    field.run()
    assert field.register.charges("dev-2") == [], "it may not train"
    field.pause.unlink()
    field.crash()
    field.run(0.5)
    assert field.plan.phase == "open"
    assert [number for _, number, _ in field.register.charges("dev-2")] == [1]


def test_a_round_that_was_declined_twice_is_charged_only_until_the_boards_next_update(make_field: MakeField) -> None:
    """Asked again after a pause it may have trained after all, until it says how many rounds it has charged."""
    field = make_field(charges=True, min_updates=2)

    def noted() -> list[int]:
        return [number for _, number, _ in field.register.charges("dev-0")]

    def decline() -> None:
        field.send("dev-0", Decline("tiny-0001", field.plan.round, "busy", "another job"))
        field.run()

    field.join_all()
    decline()
    assert noted() == []
    field.pause.touch()
    field.run(0.5)
    field.pause.unlink()
    field.run(0.5)
    decline()
    assert noted() == [1], "nobody knows which of the two plans it has declined"
    send(field, "dev-1", "dev-2")
    assert field.plan.round == 2
    send(field, "dev-0", "dev-1", "dev-2")
    assert field.plan.round == 3
    assert noted() == [2, 3], "as in its own ledger, and the open round"


def test_an_update_that_comes_between_two_windows_is_for_the_next_version(make_field: MakeField) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule=NIGHTLY, **BUFFERED)
    late = field.fleet.update("dev-0").data
    send(field, "dev-1", "dev-2")
    assert (field.plan.phase, field.plan.round, field.plan.max_staleness) == ("closed", 1, 2), "training goes on"
    assert field.deliver("dev-0", late, round=1) is None, "it is not refused, and comes again"
    field.skip(4.1 * HOUR)
    assert (field.plan.phase, field.plan.max_staleness) == ("closed", 0), "nobody trains by day"
    assert field.deliver("dev-0", late, round=1) is None
    field.skip(20 * HOUR)
    assert (field.plan.phase, field.plan.round) == ("open", 2)
    assert isinstance(field.deliver("dev-0", late, round=1), Ack)
    field.skip(4 * HOUR)
    assert (field.plan.phase, field.fleet.engine.accepted) == ("closed", 1), "the version rests by day"


@pytest.mark.parametrize("rules", [BUFFERED, {"min_updates": 2, "deadline_s": HOUR}])
def test_a_round_that_its_last_window_leaves_open_ends_the_task(make_field: MakeField, rules: dict[str, Any]) -> None:
    field = field_at(make_field, "2026-11-27T01:00", schedule={**NIGHTLY, "until": "2026-11-28"}, **rules)
    send(field, *field.fleet.names[: field.fleet.prepared.task.round.buffer_size])
    assert field.fleet.engine.closed_rounds == 1
    field.skip(25 * HOUR)
    send(field, "dev-0")
    assert (field.plan.phase, field.fleet.engine.accepted) == ("open", 1)
    field.skip(3.1 * HOUR)
    for _ in range(2):
        assert (field.plan.phase, field.fleet.engine.finished) == ("finished", True)
        field.crash()
        field.run(0.5)
    assert {event["reason"] for event in field.events_of("finished")} == {
        "no round opens after 2026-11-28 (schedule.until)"
    }


class Run:
    """A store, and the rhythm of each process on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.wall_from = folder, 0.0, at("2026-03-20T09:00")
        self.opened: list[float] = []
        self.begin()

    def begin(self) -> None:
        section = ScheduleSection(**DAILY)
        self.store = AggregatorStore(self.folder, durable=False)
        self.rhythm = Rhythm(section, self.store, wall=self.wall, elapsed=lambda: self.now)

    def wall(self) -> float:
        return self.wall_from + self.now

    def look(self) -> None:
        """Opens a round if one is due."""
        if self.rhythm.is_due():
            self.opened.append(self.now)
            self.store.open_round(len(self.opened), cohort={}, global_digest=b"", at=self.wall())
            self.rhythm.opened()


def test_a_clock_that_is_set_while_a_round_opens_spoils_no_note_of_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.look()
    run.now += 25 * HOUR
    assert run.rhythm.is_due()
    run.store.open_round(2, cohort={}, global_digest=b"", at=run.wall())
    run.wall_from += 30 * HOUR
    run.rhythm.opened()
    run.store.close()
    run.begin()
    assert not run.rhythm.is_due()
    assert run.rhythm.opens() == pytest.approx(run.wall() + 24 * HOUR, abs=2 * HOUR)
    run.store.close()


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("pass"), st.floats(0.1, 9.0)),
            st.tuples(st.just("jump"), st.floats(-3000, 3000)),
            st.tuples(st.just("restart"), st.just(0.0)),
        ),
        max_size=30,
    )
)
def test_no_jump_brings_a_round_sooner_or_holds_one_up(
    steps: list[tuple[str, float]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """:param steps: hours, of real time or of the clock on the wall."""
    run = Run(tmp_path_factory.mktemp("run"))
    for kind, hours in [*steps, ("pass", 26.0), ("pass", 0.0)]:
        if kind == "pass":
            run.now += hours * HOUR
        elif kind == "jump":
            run.wall_from += hours * HOUR
        else:
            run.store.close()
            run.begin()
        run.look()
    run.store.close()
    between = [later - before for before, later in zip(run.opened, run.opened[1:], strict=False)]
    assert all(each >= 22.9 * HOUR for each in between)  # a day has 23 hours, 24 or 25
    assert run.now == run.opened[-1]
