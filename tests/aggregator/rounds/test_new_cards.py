"""Cards are written anew in an open round: it waits for them, and no longer than somebody can answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Ack, Decline
from support.field import Field

MakeField = Callable[..., Field]


@pytest.fixture
def field(make_field: MakeField) -> Field:
    """A round of three devices is open, and their register notes what they may have spent."""
    field = make_field(method="fedavg", multiplier=0.0, min_updates=2, rounds=5)
    keep_book(field)
    field.join_all()
    assert field.plan.round == 1
    return field


def keep_book(field: Field) -> None:
    field.coordinator.rounds.charges = ChargeBook(field.register, field.fleet.engine)


def replace_cards(field: Field, *names: str) -> None:
    with DeviceRegister(field.fleet.folder) as register:
        for name in names:
            identity = field.fleet.devices.identities[name] = Identity.generate()
            register.forget(name)
            register.add([Board(name, public_key=identity.public_key)])
    field.run(1.2)
    for name in names:
        field.join(name)
    assert set(field.coordinator.present) >= set(names)


def restart(field: Field) -> None:
    field.crash()
    keep_book(field)
    field.run()


def declines(field: Field, *names: str, code: str = "error") -> None:
    for name in names:
        field.send(name, Decline("tiny-0001", field.plan.round, code, "an earlier card may have sent an update"))  # type: ignore[arg-type]
    field.run()


def spent(field: Field, name: str) -> list[int]:
    return [number for _, number, _ in field.register.charges(name)]


def test_a_round_that_nobody_can_answer_any_more_is_closed_at_once(field: Field) -> None:
    before = field.fleet.engine.global_digest
    replace_cards(field, "dev-0", "dev-1", "dev-2")
    declines(field, "dev-0", "dev-1")
    assert field.plan.round == 1, "the third may train"
    # as in secure aggregation, whose membership list names the earlier card
    declines(field, "dev-2", code="no-privacy")
    assert (field.plan.round, field.plan.phase) == (2, "open")
    assert field.fleet.engine.global_digest == before
    for name in field.fleet.names:
        assert spent(field, name) == [1, 2], "what the earlier card may have sent stays charged"
        assert isinstance(field.deliver(name, field.fleet.update(name).data), Ack)
    assert field.plan.round == 3


def test_a_round_of_others_or_with_an_update_is_not_cut_short(field: Field) -> None:
    """Only new cards count: a fleet of which all are busy must not run through its rounds in a second."""
    declines(field, *field.fleet.names, code="busy")
    replace_cards(field, "dev-0", "dev-1")
    declines(field, "dev-0", "dev-1")
    assert field.plan.round == 1
    field.run(field.plan.deadline_s + 1.0)
    assert field.plan.round == 2, "at its deadline it is given up"
    assert isinstance(field.deliver("dev-2", field.fleet.update("dev-2").data), Ack)
    replace_cards(field, "dev-0", "dev-1")
    declines(field, "dev-0", "dev-1")
    assert field.plan.round == 2, "too few for a sum, and nothing of it is thrown away"


def test_a_new_card_that_may_train_is_waited_for(field: Field) -> None:
    """It may have been told of no earlier card; what it then commits is charged, and should count."""
    replace_cards(field, "dev-2")
    for name in ("dev-0", "dev-1"):
        assert isinstance(field.deliver(name, field.fleet.update(name).data), Ack)
    assert field.plan.round == 1
    assert isinstance(field.deliver("dev-2", field.fleet.update("dev-2").data), Ack)
    assert field.plan.round == 2
    assert [row.device for row in field.fleet.store.updates(1)] == field.fleet.names


def test_a_new_card_that_is_blocked_may_come_back(field: Field) -> None:
    replace_cards(field, *field.fleet.names)
    declines(field, "dev-0", "dev-1")
    with DeviceRegister(field.fleet.folder) as register:
        register.block("dev-2", "by mistake")
        field.run(1.2)
        assert field.plan.round == 1
        register.unblock("dev-2")
        field.run(1.2)
    assert isinstance(field.deliver("dev-2", field.fleet.update("dev-2").data), Ack)


def test_it_is_the_same_after_a_restart(field: Field) -> None:
    """Who has come anew, and who of them has said no, is stored: nobody need say it again."""
    replace_cards(field, *field.fleet.names)
    declines(field, "dev-0", "dev-1")
    restart(field)
    assert field.plan.round == 1, "the third may train"
    declines(field, "dev-2", code="no-privacy")
    assert (field.plan.round, field.plan.phase) == (2, "open")
    assert all(spent(field, name) == [1, 2] for name in field.fleet.names)
    assert isinstance(field.deliver("dev-0", field.fleet.update("dev-0").data), Ack)
    declines(field, "dev-1", "dev-2")
    restart(field)
    assert field.plan.round == 2, "new cards of the round before are none of this one"


def test_what_the_earlier_card_declined_is_no_answer_of_the_new_one(field: Field) -> None:
    declines(field, "dev-0", code="busy")
    replace_cards(field, "dev-0")
    restart(field)
    for name in ("dev-1", "dev-2"):
        assert isinstance(field.deliver(name, field.fleet.update(name).data), Ack)
    assert field.plan.round == 1, "it is waited for"
    assert isinstance(field.deliver("dev-0", field.fleet.update("dev-0").data), Ack)
    assert field.plan.round == 2
    assert field.fleet.store.declines(1) == []


def test_cards_that_were_replaced_between_two_rounds_are_not_new_in_the_next_one(make_field: MakeField) -> None:
    field = make_field(method="fedavg", multiplier=0.0, min_updates=2, rounds=5, min_devices=3)
    keep_book(field)
    field.join_all()
    field.join("dev-2", state="sleeping")
    for name in field.fleet.names:
        field.deliver(name, field.fleet.update(name).data)
    assert field.fleet.engine.plan is None
    replace_cards(field, *field.fleet.names)
    assert field.plan.round == 2
    restart(field)
    declines(field, *field.fleet.names, code="busy")
    assert field.plan.round == 2
