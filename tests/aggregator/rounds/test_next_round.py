"""Who can take part in the next round, why too few can, and what an operator changes while the task runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.fleet_state import Shortfall
from hushfleet.aggregator.rounds.budgets import Budgets
from hushfleet.aggregator.rounds.next_round import Declines, participants
from hushfleet.aggregator.rounds.shortfall import shortfall_advice, shortfall_text
from hushfleet.aggregator.rounds.thresholds import Given, Thresholds, of_fleet
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.durations import Period
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.schema import pack
from hushfleet.wire.format.messages import Ack, Decline
from support.field import Field

MakeField = Callable[..., Field]
HOUR = 3600.0


def charge(multiplier: float = 2.0) -> Charge:
    return GaussianMechanism(multiplier, 1).charge()


def cost(rounds: int, *, of: Field) -> float:
    each = of.fleet.engine.next_charge
    return epsilon_server_of([replace(each, steps=each.steps * rounds)], delta=0.01)


def make_f4(make_field: MakeField, **settings: Any) -> Field:
    """25 boards, of which 14 have spent the hour's budget in an earlier task; a model takes 20 updates."""
    probe = make_field(accounting="strict", **settings)
    limits = {"epsilon_server": cost(2, of=probe) + 0.01, "per": "1h", "epsilon_lifetime": math.inf, "delta": 0.01}
    packed = pack(probe.fleet.engine.next_charge)
    field = make_field(
        accounting="strict", devices=25, min_updates=20, rounds=4, charges=True, limits=limits, **settings
    )
    for number in (1, 2):
        field.register.note_charges("earlier", number, dict.fromkeys(field.fleet.names[:14], packed), certain=True)
    return field


def told(field: Field) -> str:
    event = {name: value for name, value in field.events_of("waits")[-1].items() if name not in ("event", "at")}
    return shortfall_text(Shortfall(**event), now=field.fleet.wall())


def send_all(field: Field, names: list[str]) -> None:
    for name in names:
        assert isinstance(field.deliver(name, field.fleet.update(name).data), Ack)


def test_no_round_opens_that_the_boards_cannot_pay_for(make_field: MakeField, caplog: pytest.LogCaptureFixture) -> None:
    field = make_f4(make_field)
    field.join_all()
    field.run(70.0, steps=3)
    assert field.fleet.engine.plan is None
    assert told(field) == (
        "round 1 waits: 11 of 25 needed boards can take part; 14 have spent their period, which ends today 01:00 (UTC)"
    )
    assert caplog.text.count("round 1 waits") == 1
    assert len(field.events_of("waits")) == 1, "once, as nothing changes"
    assert [field.register.charges(name)[-1][0] for name in field.fleet.names if field.register.charges(name)] == (
        ["earlier"] * 14
    ), "nobody pays"
    field.skip(HOUR - field.fleet.wall() - 2)
    assert field.fleet.engine.plan is None
    field.skip(3.0)
    assert (field.plan.round, field.plan.phase) == (1, "open")
    assert len(field.plan.cohort) == 25


def test_a_board_whose_owner_allows_more_than_its_card_can_pay(make_field: MakeField) -> None:
    field = make_f4(make_field, min_devices=20)
    rich = field.fleet.names[:9]
    packed = pack(field.fleet.engine.next_charge)
    field.register.note_charges("earlier", 3, dict.fromkeys(rich, packed), certain=True)
    field.join_all()
    field.run(1.0)
    assert (field.plan.round, len(field.plan.cohort)) == (1, 25), "9 of the 14 have spent more than their cards allow"


def test_a_round_is_over_as_soon_as_it_can_make_no_model_and_the_next_one_waits(make_field: MakeField) -> None:
    """The boards know better than the register: six declare that they have spent their period."""
    field = make_f4(make_field)
    for name in field.fleet.names[:14]:
        field.register.drop_rounds("earlier", [(name, 1), (name, 2)])
    field.join_all()
    names = field.fleet.names
    send_all(field, names[20:22])
    for name in names[:5]:
        field.send(name, Decline("tiny-0001", 1, "budget", "spent"))
    field.run()
    assert field.plan.round == 1, "20 may still answer"
    field.send(names[5], Decline("tiny-0001", 1, "budget", "spent"))
    field.run()
    assert field.fleet.engine.closed_rounds == 1
    assert field.plan.phase == "closed", "the six do not count for the next one"
    (closed,) = field.events_of("round_close")
    assert (closed["lost"]["rounds"], closed["lost"]["boards"]) == (1, 2)
    assert closed["lost"]["epsilon"] == pytest.approx(cost(1, of=field))
    field.run(6.0, steps=3)
    assert told(field).startswith("round 2 waits: 19 of 25 needed boards can take part; 6 have spent their period")
    field.crash()
    field.skip(field.fleet.prepared.task.round.deadline_s)
    field.run(6.0, steps=3)
    assert field.plan.phase == "closed", "a restart forgets no decline"
    field.join(names[0], session=9)  # its owner has raised the limit and started the client
    field.run(1.0)
    assert (field.plan.round, field.plan.phase) == (2, "open")


def test_a_round_that_cannot_open_in_its_next_window_is_told_before(make_field: MakeField) -> None:
    field = make_f4(make_field, schedule={"every": "1h", "between": "00:30-00:59", "timezone": "UTC"})
    field.join_all()
    field.run(61.0, steps=3)
    assert field.plan.phase == "closed"
    assert told(field).startswith("round 1 waits: 11 of 25 needed boards can take part; 14 have spent their period")
    before = field.events_of("waits")
    later = make_f4(make_field, schedule={"every": "1h", "between": "05:00-06:00", "timezone": "UTC"})
    later.join_all()
    later.run(1.0)
    assert later.events_of("waits") == before, "the period ends before"


def test_a_decline_holds_until_the_period_ends(make_field: MakeField) -> None:
    field = make_f4(make_field, min_devices=25)
    for name in field.fleet.names[:14]:
        field.register.drop_rounds("earlier", [(name, 1), (name, 2)])
    field.join_all()
    send_all(field, field.fleet.names[1:])
    field.send("dev-0", Decline("tiny-0001", 1, "budget", "spent"))
    field.run(6.0, steps=3)
    assert field.fleet.engine.closed_rounds == 1
    assert field.plan.phase == "closed"
    field.skip(HOUR - field.fleet.wall() + 1)
    assert (field.plan.round, field.plan.phase) == (2, "open")


def task_of(devices: int, *, secure: bool = False, **rules: Any) -> Task:
    return parse_task(
        {
            "name": "t",
            "model": {"name": "linear", "features": "scattering"},
            "method": {"name": "hush"},
            "privacy": {"accounting": "secure" if secure else "strict", "epsilon": 2.0, "delta": 1e-5},
            "data": {"name": "digits", "devices": devices},
            "round": {"rounds": 3, **rules},
        }
    )


def numbers(found: Thresholds) -> tuple[int, int]:
    return found.devices, found.updates


def test_the_defaults_follow_the_fleet() -> None:
    """W1: with 13 boards of 14 the first round opens."""
    task, nothing = task_of(14), Given("t")
    first = of_fleet(task, nothing, in_task=(), boards=1, blocked=0, begun=False)
    assert numbers(first) == (12, 9), "others may be on their way"
    assert first.devices_by == "80 % of 14 boards"
    for boards, expected in ((14, (12, 9)), (13, (11, 8)), (34, (28, 21)), (1, (1, 1)), (0, (1, 1))):
        assert numbers(of_fleet(task, nothing, in_task=(), boards=boards, blocked=0, begun=True)) == expected
    assert numbers(of_fleet(task, nothing, in_task=(), boards=12, blocked=2, begun=False)) == (10, 8)


def test_what_the_task_and_the_operator_set_holds() -> None:
    task = task_of(14, min_devices=5, min_updates=3)
    both = ("min_devices", "min_updates")
    found = of_fleet(task, Given("t"), in_task=both, boards=30, blocked=0, begun=True)
    assert (numbers(found), found.is_fixed) == ((5, 3), True)
    found = of_fleet(task, Given("t", 12, 10), in_task=both, boards=30, blocked=0, begun=True)
    assert (numbers(found), found.updates_by) == ((12, 10), "fleet set")
    few = of_fleet(task_of(14, min_devices=5), Given("t"), in_task=("min_devices",), boards=30, blocked=0, begun=True)
    assert numbers(few) == (5, 5), "a round that opens with five can close"


def test_the_noise_of_secure_aggregation_limits_what_can_be_set() -> None:
    task = task_of(40, secure=True)
    least = task.round.min_updates
    assert least == 36
    for by_operator in (Given("t"), Given("t", 10, 10)):
        found = of_fleet(task, by_operator, in_task=(), boards=40, blocked=0, begun=True)
        assert (found.updates, found.least, found.needed) == (36, 36, 36)
    assert of_fleet(task, Given("t"), in_task=(), boards=70, blocked=0, begun=True).updates == 42


def test_the_operators_numbers_hold_while_the_task_runs(make_field: MakeField) -> None:
    field = make_field(accounting="strict", devices=5, given=True, rounds=3)
    for name in field.fleet.names[:3]:
        field.join(name)
    field.run(1.0)
    assert field.plan.phase == "closed", "four of five are needed"
    assert field.given is not None
    field.given.write_text('task = "tiny"\nmin_devices = 3\nmin_updates = 3\n')
    field.run(1.0)
    assert (field.plan.phase, len(field.plan.cohort)) == ("open", 3)
    send_all(field, field.fleet.names[:2])
    assert field.plan.round == 1
    field.given.write_text('task = "tiny"\nmin_devices = 3\nmin_updates = 2\n')
    field.run(1.0)
    field.skip(field.plan.deadline_s)
    assert field.fleet.engine.closed_rounds == 1, "fewer hold in the open round, too"
    assert field.fleet.store.rounds()[0].metrics["participants"] == 2
    field.given.write_text("min_devices = [")
    field.run(1.0)
    field.given.write_text('task = "another"\nmin_devices = 1\n')
    field.run(1.0)
    assert field.fleet.engine.responses.min_updates == 2 or field.plan.phase == "open"


def test_a_run_that_is_restarted_in_an_open_round_keeps_its_numbers(make_field: MakeField) -> None:
    field = make_field(accounting="strict", devices=5, given=True, rounds=3, deadline_s=5)
    field.join_all()
    assert field.plan.phase == "open"
    field.crash()
    assert field.fleet.engine.responses.min_updates == 3, "60 % of five, and not the task's 1"


# the slow ways


@given(data=st.data())
def test_every_device_is_sorted_as_one_by_one(data: st.DataObject) -> None:
    names = [f"d{index}" for index in range(6)]
    some = st.sets(st.sampled_from(names))
    accepted, present, listed = data.draw(some), data.draw(some), data.draw(st.none() | some)
    times = st.sampled_from([100.0, math.inf])
    spent = data.draw(st.dictionaries(st.sampled_from(names), times))
    declined = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from([0.0, 200.0])))
    found = participants(accepted, present=present, listed=listed, spent=spent, declined=declined)
    slow: dict[str, set[str]] = {name: set() for name in ("able", "spent", "declined", "unlisted", "absent")}
    for name in accepted:
        if name in spent or declined.get(name):
            slow["spent"].add(name)
            assert found.spent[name] == max(spent.get(name, 0.0), declined.get(name, 0.0))
        elif name in declined:
            slow["declined"].add(name)
        elif listed is not None and name not in listed:
            slow["unlisted"].add(name)
        elif name in present:
            slow["able"].add(name)
        else:
            slow["absent"].add(name)
    assert {name: set(getattr(found, name)) for name in slow} == slow


@given(
    rounds=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9000), st.sampled_from([2.0, 4.0])), max_size=8),
    lifetime=st.sampled_from([1.5, 3.0, math.inf]),
    in_period=st.sampled_from([0.8, 1.5]),
    now=st.integers(0, 9000),
)
def test_who_can_pay_is_what_each_boards_own_sum_says(
    tmp_path_factory: pytest.TempPathFactory,
    rounds: list[tuple[str, int, float]],
    lifetime: float,
    in_period: float,
    now: int,
) -> None:
    budget = Budget(1e-5, lifetime, in_period, HOUR)
    at = 0.0
    with DeviceRegister(tmp_path_factory.mktemp("register"), durable=False, wall=lambda: at) as register:
        budgets = Budgets(register, budget, clock=lambda: now)
        budgets.spent(charge())
        for number, (name, moment, multiplier) in enumerate(rounds):
            at = float(moment)
            register.note_charges("t", number, {name: pack(charge(multiplier))}, certain=True)
        found = budgets.spent(charge())
    start = now // 3600 * 3600
    for name in "abc":
        own = [(moment, charge(multiplier)) for each, moment, multiplier in rounds if each == name]
        expected = None
        for limit, charges, frees in (
            (in_period, [each for moment, each in own if moment >= start], start + HOUR),
            (lifetime, [each for _, each in own], math.inf),
        ):
            before, after = (epsilon_server_of([*charges, *more], delta=1e-5) for more in ([], [charge()]))
            if charges and before <= limit < after:
                expected = frees
        assert found.get(name) == expected


def test_declines_hold_for_their_device_and_their_time() -> None:
    declines, sessions = Declines(600.0), dict.fromkeys("abcde", 1)
    hour, in_fleet = Period(-900, 2700), {"at": 100.0, "of_fleet": True, "session": 1}
    declines.note("a", "budget", period=hour, **in_fleet)
    declines.note("b", "budget", period=None, **in_fleet)
    declines.note("c", "graph", period=hour, **in_fleet)
    declines.note("d", "busy", period=hour, **in_fleet)
    declines.note("e", "budget", period=None, at=100.0, of_fleet=False, session=1)
    assert declines.hold(200.0, sessions.__getitem__) == {"a": 2700.0, "b": 0.0, "c": 0.0, "e": 0.0}
    assert declines.hold(701.0, sessions.__getitem__) == {"a": 2700.0, "b": 0.0}
    assert declines.hold(86_500.0, sessions.__getitem__) == {}
    sessions["a"] = 2
    declines.drop("b")
    assert declines.hold(200.0, sessions.__getitem__) == {"c": 0.0, "e": 0.0}


def test_a_board_whose_clock_is_late_is_out_for_a_day_and_not_for_a_period() -> None:
    """At the beginning of a period the aggregator's clock may be ahead: the board is free a little later."""
    declines, day = Declines(600.0), 86400
    season = Period(0, 90 * day)
    for at, until in ((60.0, day), (day + 60.0, 90 * day)):
        declines.note("a", "budget", at=at, period=season, of_fleet=True, session=1)
        assert "a" in declines.hold(until - 1.0, lambda _: 1)
        assert "a" not in declines.hold(float(until), lambda _: 1)


def test_the_advice_names_key_and_command() -> None:
    waiting = Shortfall(1, able=13, min_devices=14, min_updates=9, absent=1)
    assert shortfall_text(waiting, now=0.0) == "round 1 waits: 13 of 14 needed boards can take part; 1 are not there"
    assert "hushfleet fleet set DIR round.min_devices=13" in shortfall_advice(waiting)
    floor = Shortfall(1, able=13, min_devices=14, min_updates=14, least_updates=14, absent=1)
    assert "fewer than 14 cannot make a model" in shortfall_advice(floor)
    poor = Shortfall(1, able=2, min_devices=4, min_updates=4, spent_for_good=2)
    assert "[device.limits]" in shortfall_advice(poor)
