"""What an aggregator remembers of the charges of each device's key (`Known.seen`), over runs, starts and registers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hushfleet.aggregator.rounds.charge_book import charge_of
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import StoreError, StoreFull
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Ack, Ask, Known, Offer, Refused, SeenCharges
from support.field import Field

MakeField = Callable[..., Field]
TASK = "tiny-0001"


def keep_seen(field: Field) -> ChargedKeys:
    seen = field.coordinator._seen = ChargedKeys(field.folder / "aggregator.key", durable=False)
    return seen


@pytest.fixture
def field(make_field: MakeField) -> Field:
    field = make_field(min_updates=1)
    keep_seen(field)
    field.join_all()
    return field


def told(field: Field, name: str) -> SeenCharges | None:
    field.run(1.0)
    field.answers(name)
    field.send(name, Ask(1, bytes(16)))
    (known,) = [answer for answer in field.answers(name) if isinstance(answer, Known)]
    return known.seen


def enrol_anew(field: Field, name: str, card: Identity) -> None:
    """`hushfleet devices forget` and `add`, in another process."""
    field.fleet.devices.identities[name] = card
    with DeviceRegister(field.fleet.folder, durable=False) as command:
        command.forget(name)
        command.add([Board(name, public_key=card.public_key)])
    field.run(2.0)
    field.join(name)


def weight(field: Field) -> float:
    return charge_of(field.fleet.store.charges()[0]).weight


def test_a_device_is_told_its_own_charges_also_after_restart_and_forgetting(field: Field) -> None:
    assert told(field, "dev-0") is None
    assert isinstance(field.deliver("dev-0", field.fleet.update("dev-0").data), Ack)
    expected = SeenCharges(1, weight(field), TASK, 1)
    assert told(field, "dev-0") == expected
    assert told(field, "dev-1") is None
    field.crash()
    keep_seen(field)
    field.join("dev-0")
    assert told(field, "dev-0") == expected
    enrol_anew(field, "dev-0", field.fleet.devices.identities["dev-0"])
    assert told(field, "dev-0") == expected, "as with a new run, whose register is new"


def test_a_new_card_has_a_new_key_and_begins_at_nothing(field: Field) -> None:
    for name in field.fleet.names:
        assert isinstance(field.deliver(name, field.fleet.update(name).data), Ack)
    enrol_anew(field, "dev-0", Identity.generate())
    assert told(field, "dev-0") is None


def test_a_refused_update_is_charged_too_and_what_no_board_can_have_charged_is_not(field: Field) -> None:
    late = field.fleet.update("dev-0", seed=1).data
    for name in ("dev-1", "dev-2"):
        field.deliver(name, field.fleet.update(name).data)
    field.run(field.plan.deadline_s + 1.0)
    assert field.plan.round == 2
    field.offer("dev-0", late, round=1)
    assert [type(each) for each in field.answers("dev-0")] == [Refused]
    assert told(field, "dev-0") == SeenCharges(1, 0.0, TASK, 1), "its charge is not known"
    field.offer("dev-0", late, round=3)
    field.send("dev-0", Offer("another-0001", 1, bytes(32), 99))
    assert told(field, "dev-0") == SeenCharges(1, 0.0, TASK, 1)


def test_the_answer_of_a_committees_member_is_no_charge() -> None:
    spec = SimpleNamespace(task="sum", privacy=SimpleNamespace(secure=object()))
    engine = SimpleNamespace(closed_rounds=0, plan=SimpleNamespace(round=1), spec=spec, collects_updates=False)
    coordinator: Any = SimpleNamespace(engine=engine, _seen=object())
    assert not Coordinator._is_charged(coordinator, Offer("sum", 1, bytes(32), 99))
    engine.collects_updates = True
    assert Coordinator._is_charged(coordinator, Offer("sum", 1, bytes(32), 99))


def test_an_offer_that_cannot_be_noted_is_not_taken_yet(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StoreFull("no space")

    data = field.fleet.update("dev-0").data
    with monkeypatch.context() as patch:
        patch.setattr(ChargedKeys, "note", full)
        field.offer("dev-0", data)
        assert field.answers("dev-0") == []
        assert field.deliver("dev-0", data) is None, "its chunks are not taken either"
    assert isinstance(field.deliver("dev-0", data), Ack)


def test_numbers_and_sums_add_up_over_tasks_and_the_newest_is_the_last_that_came(tmp_path: Path) -> None:
    with ChargedKeys(tmp_path / "key", durable=False) as seen:
        seen.note((bytes(32), *each, 0.0) for each in (("a", 1), ("b", 1), ("a", 1), ("a", 2), ("b", 1)))
        seen.note((bytes(32), *each) for each in (("a", 1, 0.25), ("a", 1, 0.25), ("b", 1, 0.5), ("b", 1, 0.0)))
    with ChargedKeys(tmp_path / "key") as seen:
        assert seen.of(bytes(32)) == SeenCharges(3, 0.75, "a", 2)
        seen.write("PRAGMA user_version = 9")
    with pytest.raises(StoreError, match="schema 9"):
        ChargedKeys(tmp_path / "key")
