"""The coordinator against scripted devices (`support.field`): the protocol, presence, losses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.rounds.coordinator import MAX_UNKNOWN_BURST
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.errors import StoreFull
from hushfleet.simulator.world.hub import Chaos
from hushfleet.wire.format.chunks import Assembler
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Ack,
    Ask,
    Decline,
    Known,
    Missing,
    Refused,
    ServerState,
    TaskNotice,
    Want,
)
from support.field import CHUNK_BYTES, Field

MakeField = Callable[..., Field]
MakeFleet = Callable[..., Any]


def test_a_run_from_enrolment_to_the_end(make_field: MakeField, make_fleet: MakeFleet) -> None:
    field = make_field()
    field.join_all()
    while field.plan.phase == "open":
        before = field.plan.round
        for name in field.fleet.names:
            update = field.fleet.update(name)
            assert field.deliver(name, update.data) == Ack("tiny-0001", before, hashlib.sha256(update.data).digest())
    assert field.plan.phase == "finished"
    assert field.plan.global_digest == field.fleet.engine.global_digest
    calm = make_fleet(wire={"chunk_bytes": CHUNK_BYTES, "codec": "float32"})
    while not calm.engine.finished:
        calm.run_round()
    assert field.fleet.engine.global_digest == calm.engine.global_digest
    kinds = field.kinds()
    assert kinds[0] == "run"
    assert kinds[-1] == "finished"
    told = ("round_open", "offer", "update", "round_close", "presence")
    assert [kinds.count(k) for k in told] == [3, 9, 9, 3, 3]


def test_what_is_retained_for_a_device_that_comes_later(make_field: MakeField) -> None:
    field = make_field()
    field.join("dev-0")
    identity = field.identity
    server = field.decoded(field.hub.retained[field.topics.server])
    assert server == ServerState(1, "ready", identity.public_key)
    notice = field.decoded(field.hub.retained[field.topics.task], identity.public_key)
    ref = field.fleet.prepared.spec_ref
    assert notice == TaskNotice("tiny-0001", ref.digest, ref.size, 1)
    assert (field.plan.phase, field.plan.round) == ("closed", 0)
    field.coordinator.close()
    assert field.decoded(field.hub.retained[field.topics.server]) == ServerState(1, "lost", identity.public_key)


def test_every_blob_of_a_round_can_be_fetched(make_field: MakeField) -> None:
    field = make_field(wire={"chunk_bytes": CHUNK_BYTES})
    field.join_all()
    for name in field.fleet.names:
        field.deliver(name, field.fleet.update(name).data)
    (difference,) = field.plan.differences
    field.crash()
    field.join_all()
    wanted = [*field.fleet.prepared.blobs, difference.digest, field.plan.global_digest]
    for digest in wanted:
        size = len(field.fleet.engine.find_blob(digest))
        assembler = Assembler(digest, size)
        field.links["dev-0"].subscribe(field.topics.blob(digest))
        field.send("dev-0", Want(digest, size, ()))
        field.run(0.3)
        for delivery in field.inbox["dev-0"]:
            if delivery.topic == field.topics.blob(digest):
                assembler.add(delivery.payload)
        assert hashlib.sha256(assembler.blob()).digest() == digest
    assert np.frombuffer(assembler.blob(), "<f4").tolist() == field.fleet.engine.global_params.tolist()


def test_missing_chunks_are_named_after_a_pause(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    offer = field.offer("dev-0", data)
    field.push("dev-0", data, [0])
    field.run(0.5)
    assert field.answers("dev-0") == []
    field.run(1.0)
    assert field.answers("dev-0") == [Missing("tiny-0001", 1, offer.digest, ((1, 2),))]
    field.push("dev-0", data, [1])
    assert field.answers("dev-0") == [Ack("tiny-0001", 1, offer.digest)]


def test_an_offer_alone_is_answered_by_what_is_missing_or_by_what_was_decided(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    offer = field.offer("dev-0", data)
    field.run(1.3)
    assert field.answers("dev-0") == [Missing("tiny-0001", 1, offer.digest, ())]
    field.push("dev-0", data)
    assert field.answers("dev-0") == [Ack("tiny-0001", 1, offer.digest)]
    field.offer("dev-0", data)
    assert field.answers("dev-0") == [Ack("tiny-0001", 1, offer.digest)]
    assert field.fleet.engine.accepted == 1


def test_the_aggregator_may_be_killed_while_chunks_come_in(make_field: MakeField, make_fleet: MakeFleet) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0").data
    field.offer("dev-0", update)
    field.push("dev-0", update, [0])
    field.run()
    plan = field.plan
    field.crash()
    assert field.plan == replace(plan, epoch=2)
    assert field.decoded(field.hub.retained[field.topics.server]).epoch == 2
    field.deliver("dev-0", update)
    field.crash()
    field.offer("dev-0", update)
    assert [type(answer) for answer in field.answers("dev-0")] == [Ack]
    for name in ("dev-1", "dev-2"):
        field.deliver(name, field.fleet.update(name).data)
    calm = make_fleet(wire={"chunk_bytes": CHUNK_BYTES, "codec": "float32"})
    calm.run_round()
    assert field.fleet.engine.global_digest == calm.engine.global_digest
    assert field.plan.round == 2


def test_a_lossy_broker_delays_and_changes_nothing(make_field: MakeField, make_fleet: MakeFleet) -> None:
    field = make_field(chaos=Chaos(seed=11, drop=0.25, duplicate=0.2, reorder=0.2))
    field.join_all()
    updates = {name: field.fleet.update(name).data for name in field.fleet.names}
    for attempt in range(60):
        if field.plan.round > 1:
            break
        for name, data in updates.items():
            if not field.fleet.engine.responses.expects(name):
                continue
            missing = [a.missing for a in field.answers(name) if isinstance(a, Missing)]
            field.offer(name, data)
            if attempt == 0:
                field.push(name, data)
            for ranges in missing:
                field.push(name, data, [i for a, b in ranges or ((0, 2),) for i in range(a, b)])
        field.run(1.2)
    assert field.plan.round == 2
    calm = make_fleet(wire={"chunk_bytes": CHUNK_BYTES, "codec": "float32"})
    calm.run_round()
    assert field.fleet.engine.global_digest == calm.engine.global_digest


def test_presence_follows_births_deaths_and_sessions(make_field: MakeField) -> None:
    field = make_field(min_devices=9, devices=3)
    field.join("dev-0", session=5)
    assert field.coordinator.present == {"dev-0": "ready"}
    field.send("dev-0", field.birth("dev-0", state="lost", session=4), "state")
    field.run()
    assert field.coordinator.present == {"dev-0": "ready"}, "the will of an older start"
    field.send("dev-0", field.birth("dev-0", state="lost", session=5), "state")
    field.run()
    assert field.coordinator.present == {}
    field.join("dev-0", session=6)
    field.crash()
    assert field.coordinator.present == {"dev-0": "ready"}, "births are retained"


def test_every_change_of_a_devices_state_is_an_event_and_a_repeated_one_is_none(make_field: MakeField) -> None:
    field = make_field(min_devices=9, devices=3)
    field.join("dev-0")
    for state in ("ready", "training", "training", "ready", "sleeping", "lost", "lost", "ready"):
        field.send("dev-0", field.birth("dev-0", state=state), "state")
        field.run()
    field.join("dev-1", state="sleeping")
    told = [(e["device"], e["state"]) for e in iterate_events(field.events.path) if e["event"] == "presence"]
    states = ("ready", "training", "ready", "sleeping", "lost", "ready")
    assert told == [*(("dev-0", state) for state in states), ("dev-1", "sleeping")]


def test_an_offer_is_logged_once_a_round_and_only_of_the_open_one(make_field: MakeField) -> None:
    field = make_field(devices=3, min_devices=2)
    field.join("dev-0")
    field.join("dev-1")
    field.join("dev-2")
    for name in ("dev-0", "dev-0", "dev-2"):  # dev-2 is not in the cohort
        field.offer(name, b"x" * 100)
        field.run()
    field.offer("dev-1", b"x" * 100, round=2)
    field.run()
    told = [(e["device"], e["round"], e["bytes"]) for e in iterate_events(field.events.path) if e["event"] == "offer"]
    assert told == [("dev-0", 1, 100)]


def test_the_devices_of_a_run_are_its_tasks_and_not_those_that_a_round_needs(make_field: MakeField) -> None:
    field = make_field(devices=3, min_devices=2)
    field.join("dev-0")
    assert [e["devices"] for e in iterate_events(field.events.path) if e["event"] == "run"] == [3]


def test_a_broker_that_goes_and_comes_back_is_logged_once_each(make_field: MakeField) -> None:
    field = make_field(min_devices=9, devices=3)
    field.join("dev-0")
    assert "link" not in field.kinds(), "the first connection is no news"
    field.hub.cut("aggregator")
    field.run()
    field.coordinator.link.open()
    field.run()
    assert [e["state"] for e in iterate_events(field.events.path) if e["event"] == "link"] == ["down", "up"]


def test_a_lost_link_loses_nothing(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    field.offer("dev-0", data)
    field.push("dev-0", data)
    for _ in range(8):
        field.coordinator.step(0.0)
    field.hub.cut("aggregator")
    field.run()
    assert field.decoded(field.hub.retained[field.topics.server]).state == "lost"
    field.hub.restore("aggregator")
    field.run()
    assert field.decoded(field.hub.retained[field.topics.server]).state == "ready"
    assert isinstance(field.deliver("dev-0", data), Ack)


def test_an_unknown_public_state_is_asked_for_and_taken(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    for name in field.fleet.names:
        field.deliver(name, field.fleet.update(name).data)
    field.fleet.update("dev-0", seed=77)  # committed by the device, and never sent
    field.deliver("dev-1", field.fleet.update("dev-1").data)
    field.deliver("dev-2", field.fleet.update("dev-2").data)
    field.send("dev-0", Decline("tiny-0001", 2, "error", ""))
    field.run()
    assert field.plan.round == 3
    state = field.fleet.devices.states["dev-0"].public
    assert field.plan.cohort["dev-0"] != state.digest()
    update = field.fleet.update("dev-0")
    answer = field.deliver("dev-0", update.data)
    assert (type(answer), answer.code) == (Refused, "state-unknown")
    whole = field.fleet.devices.sign("dev-0", update.header, update.values, update.counts, public=state.to_bytes())
    assert isinstance(field.deliver("dev-0", whole.data), Ack)


def test_a_new_card_asks_at_once_and_is_not_taken_for_a_copy(make_field: MakeField) -> None:
    """Its birth waits for others to be committed with; what is known of the id is the former card's."""
    field = make_field(min_updates=1)
    field.join_all()
    name = field.fleet.names[0]
    for each in field.fleet.names:
        assert isinstance(field.deliver(each, field.fleet.update(each).data), Ack)
    assert field.fleet.engine.closed_rounds == 1
    card = Identity.from_bytes(b"\x77" * 32)
    field.register.forget(name)
    field.register.add([Board(name, public_key=card.public_key)])
    with DeviceRegister(field.fleet.folder, durable=False) as command:  # another process, whose change is seen
        command.block("nobody", "")
    field.run(2.0)
    field.inbox[name].clear()
    field.send(name, field.birth(name, identity=card), "state", card)
    field.send(name, Ask(1, bytes(16)), "msg", card)
    field.run(0.5)
    (known,) = [answer for answer in field.answers(name) if isinstance(answer, Known)]
    assert (known.yours, known.last_round) == (True, 0)


def test_what_was_offered_is_told_whatever_becomes_of_other_devices(make_field: MakeField) -> None:
    """Else a store that is put back meanwhile would noise the open round a second time."""
    field = make_field()
    field.join_all()
    offer = field.offer("dev-0", field.fleet.update("dev-0").data)
    with DeviceRegister(field.fleet.folder, durable=False) as command:
        command.block("dev-2", "stolen")
        command.add([Board("dev-9", public_key=bytes(32))])
    field.run(2.0)
    field.answers("dev-0")
    field.send("dev-0", Ask(1, bytes(16)))
    (known,) = [answer for answer in field.answers("dev-0") if isinstance(answer, Known)]
    assert (known.last_round, known.last_digest) == (1, offer.digest)


def test_a_birth_that_found_the_disk_full_is_heard_when_there_is_room(
    make_field: MakeField, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device need not connect again: it cannot know."""
    field = make_field()
    field.join("dev-0")
    with monkeypatch.context() as patch:
        patch.setattr(field.fleet.store, "add_devices", Mock(side_effect=StoreFull("no space")))
        field.join("dev-1")
        field.run(3.0)
        assert set(field.coordinator.present) == {"dev-0"}
        attempts = field.fleet.store.add_devices.call_count
    assert attempts < 6, "about once a second"
    field.run(2.0)
    assert set(field.coordinator.present) == {"dev-0", "dev-1"}


def told_of(field: Field, name: str) -> list[type]:
    return [type(answer) for answer in field.answers(name)]


def connect(field: Field, name: str) -> None:
    """Its birth never comes, as with a broker that keeps nothing for wildcards (measured with RabbitMQ)."""
    link = field.links[name] = field.hub.link(name)
    field.inbox[name] = []
    link.subscribe(field.topics.down(name))
    link.open()


def test_a_known_device_that_asks_without_being_present_is_called(make_field: MakeField) -> None:
    field = make_field()
    connect(field, "dev-0")
    field.send("dev-0", Ask(1, bytes(16)))
    known, call = field.answers("dev-0")
    assert isinstance(known, Known)
    assert call == ServerState(1, "ready", field.identity.public_key)
    field.join("dev-0", state="lost")
    field.send("dev-0", Ask(1, bytes(16)))
    assert told_of(field, "dev-0") == [Known, ServerState]
    field.join("dev-0")
    field.send("dev-0", Ask(1, bytes(16)))
    assert told_of(field, "dev-0") == [Known]


def test_a_device_whose_birth_waits_to_be_committed_is_not_called(make_field: MakeField) -> None:
    field = make_field()
    connect(field, "dev-0")
    field.send("dev-0", field.birth("dev-0", session=2), "state")
    field.send("dev-0", Ask(2, bytes(16)))
    assert told_of(field, "dev-0") == [Known]


@pytest.mark.parametrize("closed", [True, False])
def test_a_device_without_a_key_that_asks_is_called_and_not_refused(make_field: MakeField, closed: bool) -> None:
    """It then announces itself, or is told why it may not take part. Calls are bounded: anyone may ask."""
    field = make_field(closed=closed)
    connect(field, "new")
    stranger = Identity.generate()
    for message in (Ask(1, bytes(16)), Want(bytes(32), 1, ())):
        field.send("new", message, identity=stranger)
        assert told_of(field, "new") == [ServerState]
    assert field.refusals() == {}
    for _ in range(MAX_UNKNOWN_BURST + 50):
        field.send("new", Ask(1, bytes(16)), identity=stranger)
    field.run(steps=400)
    assert MAX_UNKNOWN_BURST <= len(field.answers("new")) < MAX_UNKNOWN_BURST + 50
    assert field.refusals()["unknown"]["unknown-device"] > 0


def test_a_device_that_the_operator_accepts_is_called(make_field: MakeField) -> None:
    field = make_field()
    connect(field, "new")
    with DeviceRegister(field.fleet.folder, durable=False) as command:
        command.add([Board("new", standing="pinned")])
    field.run(2.0)
    assert told_of(field, "new") == [ServerState]


def test_chunks_may_overtake_their_offer(make_field: MakeField) -> None:
    """A broker keeps the order within a topic only (measured with NATS): an honest board is not refused for it."""
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    field.push("dev-0", data)
    field.run()
    offer = field.offer("dev-0", data)
    assert field.answers("dev-0") == [Ack("tiny-0001", 1, offer.digest)]
    assert field.refusals() == {}


def test_chunks_of_a_device_that_is_not_accepted_are_not_held(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    connect(field, "new")
    data = field.fleet.update("dev-0").data
    field.push("new", data)
    assert set(field.refusals()["unknown"]) == {"unknown-device"}
    assert field.coordinator._uploads._transfers._early._held == {}
