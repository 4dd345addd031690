"""What arrives together is stored together, and nobody can tell: the answers, the store and the rounds are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.rounds import coordinator
from hushfleet.wire.format.messages import Ack, Ask, Decline
from support.field import Field

MakeField = Callable[..., Field]
ACTIONS = ("update", "offer", "chunks", "other", "loud", "forged", "decline", "ask", "training", "ready")
NAMES = [f"dev-{index}" for index in range(4)]


def act(field: Field, name: str, action: str) -> None:
    made = field.fleet.devices.update(name, field.plan, seed=7 if action == "other" else None, advance=False)
    if action == "loud":
        made = field.fleet.devices.sign(name, made.header, made.values * 1000, made.counts)
    data = made.data[:-1] + bytes([made.data[-1] ^ 1]) if action == "forged" else made.data
    if action == "decline":
        field.send(name, Decline("tiny-0001", 1, "busy", "it is warm"))
    elif action == "ask":
        field.send(name, Ask(1, bytes(16)))
    elif action in ("training", "ready"):
        field.send(name, field.birth(name, state=action), "state")
    else:
        if action != "chunks":
            field.offer(name, data)
        if action != "offer":
            field.push(name, data)


def outcome(field: Field, before: int) -> list[Any]:
    store = field.fleet.store
    told = {name: [(type(each).__name__, each) for each in field.answers(name)] for name in NAMES}
    events = [
        (event["event"], event.get("device"), event.get("code"), event.get("state"))
        for event in list(iterate_events(field.events.path))[before:]
    ]
    tables = [store.charges(), store.updates(1), store.declines(), store.devices(), store.faults()]
    return [told, sorted(map(str, events)), tables, field.coordinator._uploads._latest, field.coordinator.present]


@example([("dev-0", "update"), ("dev-0", "update"), ("dev-0", "ask")])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ACTIONS)), max_size=14))
def test_a_burst_is_like_one_message_after_the_other(
    make_field: MakeField, monkeypatch: pytest.MonkeyPatch, script: list[tuple[str, str]]
) -> None:
    found = []
    for most in (1, coordinator.EVENTS_A_STEP):
        monkeypatch.setattr(coordinator, "EVENTS_A_STEP", most)
        field = make_field(devices=5, wire={"codec": "float32"})  # the last one is silent, so the round stays open
        field.join_all()
        before = sum(1 for _ in iterate_events(field.events.path))
        for each in script:
            act(field, *each)
        field.run(0.1)
        found.append(outcome(field, before))
    assert found[0] == found[1]


def test_a_burst_is_one_transaction(make_field: MakeField, monkeypatch: pytest.MonkeyPatch) -> None:
    field = make_field(devices=6)
    field.join_all()
    for name in field.fleet.names[:5]:
        field.offer(name, data := field.fleet.update(name).data)
        field.push(name, data)
    begun, transaction = [], field.fleet.store.transaction
    monkeypatch.setattr(field.fleet.store, "transaction", lambda: (begun.append(1), transaction())[1])
    field.coordinator.step(0.0)
    assert (field.fleet.engine.accepted, len(begun)) == (5, 1)
    assert all([type(each) for each in field.answers(name)] == [Ack] for name in field.fleet.names[:5])


def test_a_buffer_takes_no_more_than_its_size(make_field: MakeField) -> None:
    rules = {"mode": "buffered", "method": "dp-fedavg", "accounting": "strict", "wire": {"downlink": "full"}}
    field = make_field(devices=5, buffer_size=2, max_staleness=2, rounds=9, **rules)
    field.join_all()
    for name in field.fleet.names:
        field.offer(name, data := field.fleet.update(name).data)
        field.push(name, data)
    field.run()
    summed = [row.metrics["participants"] for row in field.fleet.store.rounds() if row.metrics]
    assert (summed, field.fleet.engine.accepted) == ([2, 2], 1)


def test_an_update_that_has_arrived_is_stored_though_the_link_is_lost(make_field: MakeField) -> None:
    field = make_field(devices=3)
    field.join_all()
    field.offer("dev-0", data := field.fleet.update("dev-0").data)
    field.push("dev-0", data)
    field.hub.cut("aggregator")
    field.run()
    assert field.fleet.engine.accepted == 1
    field.hub.restore("aggregator")
    field.run()
    field.offer("dev-0", data)
    assert [type(each) for each in field.answers("dev-0")][-1] is Ack
