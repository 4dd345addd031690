"""A stranger announces ever new devices, to keep the aggregator busy and to fill its memory and its disk.

Each birth cost a search through all keys, a signature and a synced write: 17 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hushfleet.aggregator.storage import enrolment as enrolment_module
from hushfleet.aggregator.storage.enrolment import MAX_REFUSED_BIRTHS, MAX_UNKNOWN_BURST, UNKNOWN_A_SECOND, TokenBucket
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import Birth, decode_message, encode_message
from support.field import Field

MakeField = Callable[..., Field]
FLOOD = 5000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The births whose signature was checked."""
    births: list[bytes] = []

    def noted(payload: bytes, **options: Any) -> Any:
        births.append(payload)
        return decode_message(payload, **options)

    monkeypatch.setattr(enrolment_module, "decode_message", noted)
    return births


def flood(field: Field, count: int = FLOOD) -> None:
    """Each of another id; every tenth is sound in itself."""
    link = field.links["flood"] = field.hub.link("flood")
    field.inbox["flood"] = []
    link.open()
    identity = Identity.generate()
    for index in range(count):
        name = f"stranger-{index}"
        payload = b"no birth"
        if index % 10 == 0:
            birth = Birth(name, 1, "ready", "", "0.1", identity.public_key, 1)
            payload = encode_message(birth, identity, federation="default")
        link.publish(field.topics.state(name), payload, retain=True)


def test_most_births_of_strangers_are_dropped_unread(make_field: MakeField, read: list[bytes]) -> None:
    field = make_field()
    flood(field)
    field.run(steps=FLOOD + 100)
    assert len(read) <= MAX_UNKNOWN_BURST
    before = len(read)
    flood(field)
    field.run(2.0, steps=FLOOD // 10)
    assert len(read) - before <= 2.1 * UNKNOWN_A_SECOND
    assert sum(field.refusals()["unknown"].values()) == 2 * FLOOD, "each of them was counted"


def test_memory_and_disk_do_not_grow_with_strangers(make_field: MakeField, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment_module, "MAX_UNKNOWN_BURST", FLOOD)
    field = make_field()
    writes: list[str] = []
    field.register._db.set_trace_callback(writes.append)
    flood(field)
    field.run(steps=FLOOD + 100)
    field.run(6.0)
    enrolment = field.coordinator.enrolment
    assert len(enrolment._refused) == MAX_REFUSED_BIRTHS
    assert len(enrolment._known) == len(enrolment._sessions) == 3
    assert len(field.register.refused_births()) == MAX_REFUSED_BIRTHS
    assert sum(statement.startswith("COMMIT") for statement in writes) <= 2
    assert len(field.fleet.store.devices()) == 3


def test_known_devices_come_through_a_flood(make_field: MakeField) -> None:
    field = make_field()
    flood(field, FLOOD // 2)
    for name in field.fleet.names:
        link = field.links[name] = field.hub.link(name)
        field.inbox[name] = []
        link.open()
        field.send(name, field.birth(name), "state")
    flood(field, FLOOD // 2)
    field.run(steps=FLOOD + 100)
    assert set(field.plan.cohort) == set(field.fleet.names)


def test_many_births_of_known_devices_are_one_transaction(make_field: MakeField) -> None:
    field = make_field(devices=40, min_devices=40)
    statements: list[str] = []
    field.fleet.store._db.set_trace_callback(statements.append)
    for name in field.fleet.names:
        link = field.links[name] = field.hub.link(name)
        field.inbox[name] = []
        link.open()
        field.send(name, field.birth(name), "state")
    field.coordinator.step(0.0)
    assert "COMMIT" not in statements
    assert field.coordinator.present == {}, "nobody counts before it is committed"
    field.coordinator.step(0.0)
    births = statements[: next(i for i, sql in enumerate(statements) if sql.startswith("INSERT INTO rounds"))]
    assert births.count("COMMIT") == 1
    assert len(field.coordinator.present) == 40


def test_tokens_come_back_with_time() -> None:
    bucket = TokenBucket(2.0, 3, now=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(10.4), bucket.take(10.5), bucket.take(10.5)] == [False, True, False]
    assert [bucket.take(1000.0) for _ in range(4)] == [True, True, True, False]
