"""When rounds open, go on and close, seen by devices on a broker in memory (`support.field`)."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

from hushfleet.aggregator.results.events import iterate_events
from hushfleet.errors import StoreError
from hushfleet.wire.format.messages import (
    Decline,
    Want,
)
from support.field import Field

MakeField = Callable[..., Field]


def test_a_round_waits_for_enough_devices(make_field: MakeField) -> None:
    field = make_field(min_devices=2)
    field.join("dev-0")
    assert field.plan.phase == "closed"
    field.join("dev-1", state="sleeping")
    assert field.plan.phase == "closed"
    field.join("dev-1", state="training")
    assert (field.plan.phase, sorted(field.plan.cohort)) == ("open", ["dev-0", "dev-1"])


def test_a_round_whose_opening_was_killed_before_it_was_logged_is_logged_later(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    lines = field.events.path.read_text().splitlines(keepends=True)
    field.events.path.write_text("".join(line for line in lines if '"round_open"' not in line))
    field.crash()
    opened = [event for event in iterate_events(field.events.path) if event["event"] == "round_open"]
    assert [(event["round"], event["cohort"]) for event in opened] == [(1, field.fleet.names)]
    field.crash()
    assert field.kinds().count("round_open") == 1


def test_a_lost_device_is_not_waited_for(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    for name in ("dev-0", "dev-1"):
        field.deliver(name, field.fleet.update(name).data)
    assert field.plan.round == 1
    field.send("dev-2", field.birth("dev-2", state="lost"), "state")
    field.run(50)
    assert field.fleet.engine.closed_rounds == 0
    field.run(15)
    assert field.fleet.engine.closed_rounds == 1


def test_a_device_that_reboots_is_waited_for(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    for name in ("dev-0", "dev-1"):
        field.deliver(name, field.fleet.update(name).data)
    field.send("dev-2", field.birth("dev-2", state="lost"), "state")
    field.run(50)
    field.join("dev-2", session=2)
    field.run(50)
    field.deliver("dev-2", field.fleet.update("dev-2").data)
    assert len(field.fleet.store.updates(1)) == 3


def test_a_round_whose_close_was_killed_before_it_was_logged_is_logged_later(make_field: MakeField) -> None:
    field = make_field(rounds=2)
    field.join_all()
    for name in field.fleet.names:
        field.deliver(name, field.fleet.update(name).data)
    lines = field.events.path.read_text().splitlines(keepends=True)
    (closing,) = [line for line in lines if '"round_close"' in line]
    field.events.path.write_text("".join(line for line in lines if line != closing))
    field.crash()
    logged = [event for event in iterate_events(field.events.path) if event["event"] == "round_close"]
    assert [event["round"] for event in logged] == [1]
    field.crash()
    assert field.kinds().count("round_close") == 1


def test_a_decline_counts_as_an_answer(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    for name in ("dev-0", "dev-1"):
        field.deliver(name, field.fleet.update(name).data)
    field.send("dev-2", Decline("tiny-0001", 1, "budget", "it would spend 9 of 8"))
    field.run()
    assert field.fleet.engine.closed_rounds == 1
    (event,) = [e for e in iterate_events(field.events.path) if e["event"] == "decline"]
    assert (event["device"], event["code"], event["reason"]) == ("dev-2", "budget", "it would spend 9 of 8")


def test_the_deadline_extends_a_round_with_too_few_and_says_so(make_field: MakeField) -> None:
    field = make_field(deadline_s=5, min_updates=2)
    field.join_all()
    field.deliver("dev-0", field.fleet.update("dev-0").data)
    field.run(6)
    assert field.plan.deadline_s == 10
    assert field.kinds().count("round_extended") == 1
    field.deliver("dev-1", field.fleet.update("dev-1").data)
    field.run(5)
    assert field.fleet.engine.closed_rounds == 1


def test_a_fleet_that_has_shrunk_goes_on_after_a_deadlines_wait(make_field: MakeField) -> None:
    field = make_field(deadline_s=5)
    field.join_all()
    for name in ("dev-0", "dev-1"):
        field.deliver(name, field.fleet.update(name).data)
    field.send("dev-2", field.birth("dev-2", state="lost"), "state")
    field.run(4)
    assert field.plan.phase == "closed"
    field.run(3)
    assert (field.plan.phase, sorted(field.plan.cohort)) == ("open", ["dev-0", "dev-1"])


def test_no_round_opens_that_could_not_close_with_a_model(make_field: MakeField) -> None:
    """Without the device that is blocked the others would train, and be charged, for rounds that change nothing."""
    field = make_field(min_updates=3, deadline_s=5)
    for name in ("dev-0", "dev-1"):
        field.join(name)
    field.coordinator.enrolment.block("dev-2", "stolen")
    field.run(20)
    assert field.plan.phase == "closed"


def test_the_end_is_announced_even_if_the_link_was_down_when_it_came(make_field: MakeField) -> None:
    field = make_field(rounds=1, deadline_s=5)
    field.join_all()
    field.deliver("dev-0", field.fleet.update("dev-0").data)
    field.hub.cut("aggregator")
    field.run(6)
    assert field.fleet.engine.finished
    assert field.plan.phase == "open"
    assert field.coordinator.rounds.finished_at is None, "it has not been said yet, so the loop goes on"
    field.hub.restore("aggregator")
    field.run()
    assert field.plan.phase == "finished"
    assert field.coordinator.rounds.finished_at == field.fleet.now
    assert field.kinds().count("finished") == 1


def test_who_still_fetches_the_final_model_is_waited_for_a_minute_at_most(make_field: MakeField) -> None:
    field = make_field(rounds=1)
    field.join_all()
    for name in field.fleet.names:
        field.deliver(name, field.fleet.update(name).data)
    assert field.plan.phase == "finished"
    began, final = field.fleet.now, field.plan

    def waits() -> bool:
        return not field.coordinator._served_all(2.0)

    while field.fleet.now < began + 58:
        field.fleet.now += 1.9
        field.send("dev-0", Want(final.global_digest, final.global_bytes, ()))
        field.run()
        assert waits()
    field.fleet.now += 2.1
    assert not waits()
    field.send("dev-0", Want(final.global_digest, final.global_bytes, ()))
    field.run()
    assert not waits()


def test_a_round_that_could_not_be_announced_is_announced_soon(make_field: MakeField) -> None:
    """The register, in which is noted what devices may spend, was locked for a moment."""
    field = make_field()
    field.coordinator.rounds.charges = charges = Mock(budgets=None)
    charges.expect.side_effect = StoreError("in use")
    field.join_all()
    assert field.fleet.engine.plan is not None
    assert field.plan.phase == "closed"
    field.run(6)
    assert charges.expect.call_count == 2
    charges.expect.side_effect = None
    field.run(6)
    assert field.plan.phase == "open"
    assert charges.expect.call_count == 3
