"""The coordinator against scripted devices on a broker in memory: the protocol, losses, and hostile senders.

Everything runs in one thread on one clock that the test moves, so nothing here depends on timing.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.devices.enrolment import Enrolment
from hushfleet.aggregator.devices.register import DeviceRegister, KnownDevice
from hushfleet.aggregator.ingest.decoding import Refusal, decode
from hushfleet.aggregator.observe.events import EventLog, read_events
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.wire.format.chunks import Assembler, split
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Ack,
    Ask,
    Birth,
    Decline,
    Known,
    Message,
    Missing,
    Offer,
    Refused,
    RoundPlan,
    ServerState,
    TaskNotice,
    Want,
    decode_message,
    encode_message,
)
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.format.update import UpdateHeader, encode_update
from hushfleet.wire.link.interface import Delivery
from support.local_link import Chaos, LocalHub

MakeFleet = Callable[..., Any]
CHUNK_BYTES = 1024


class Field:
    """A hub, a coordinator on it, a clock, and the devices' links."""

    def __init__(self, fleet: Any, folder: Path, *, chaos: Chaos | None = None, closed: bool = True) -> None:
        self.fleet, self.folder = fleet, folder
        self.hub = LocalHub(chaos=chaos)
        self.topics = Topics("default")
        self.links: dict[str, Any] = {}
        self.inbox: dict[str, list[Delivery]] = {}
        self.events = EventLog(folder / "events.jsonl")
        self.sessions: dict[str, int] = {}
        self.identity = Identity.generate()
        self.epoch = 0
        self.closed = closed
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.register = DeviceRegister(self.fleet.folder, durable=False)
        self.coordinator = Coordinator(
            self.fleet.engine,
            lambda will: self.hub.link("aggregator", will),
            identity=self.identity,
            epoch=self.epoch,
            enrolment=Enrolment(
                self.fleet.store,
                self.register,
                closed=self.closed,
                clock=lambda: self.fleet.now,
                wall=lambda: self.fleet.now,
            ),
            events=self.events,
            clock=lambda: self.fleet.now,
        )
        self.coordinator.start()
        self.run()

    def crash(self) -> None:
        """kill -9 of the aggregator: no goodbye, and a new process on the same store."""
        self.hub.cut("aggregator")
        self.coordinator.link.close()
        self.fleet.restart()
        self.start()

    def run(self, seconds: float = 0.0, *, steps: int = 40) -> None:
        """Lets everything happen that `seconds` bring."""
        for _ in range(max(1, round(seconds / 0.1))):
            for _ in range(steps):
                self.coordinator.step(0.0)
            for name, link in self.links.items():
                while (event := link.receive(0.0)) is not None:
                    if isinstance(event, Delivery):
                        self.inbox[name].append(event)
            self.fleet.now += 0.1 if seconds else 0.0

    def join(self, name: str, *, state: str = "ready", session: int = 1, identity: Identity | None = None) -> None:
        if name not in self.links:
            link = self.links[name] = self.hub.link(name)
            self.inbox[name] = []
            for topic in (self.topics.server, self.topics.task, self.topics.round, self.topics.down(name)):
                link.subscribe(topic)
            link.open()
        self.send(name, self.birth(name, state=state, session=session, identity=identity), "state", identity)
        self.run()

    def birth(self, name: str, *, state: str = "ready", session: int = 1, identity: Identity | None = None) -> Birth:
        key = (identity or self.fleet.devices.identities[name]).public_key
        return Birth(name, session, state, "test-board", "0.1", key, 512)  # type: ignore[arg-type]

    def join_all(self) -> None:
        for name in self.fleet.names:
            self.join(name)

    def send(self, name: str, message: Message, kind: str = "msg", identity: Identity | None = None) -> None:
        topic = getattr(self.topics, kind)(name)
        key = identity or self.fleet.devices.identities[name]
        payload = encode_message(message, key, federation=self.topics.federation)
        self.links[name].publish(topic, payload, retain=kind == "state")

    def offer(self, name: str, data: bytes, *, round: int | None = None, size: int | None = None) -> Offer:
        offer = Offer(
            self.fleet.prepared.spec.task,
            self.plan.round if round is None else round,
            hashlib.sha256(data).digest(),
            len(data) if size is None else size,
        )
        self.send(name, offer)
        return offer

    def push(self, name: str, data: bytes, indices: Any = None) -> None:
        for frame in split(data, CHUNK_BYTES, indices):
            self.links[name].publish(self.topics.chunk(name), frame)

    def deliver(self, name: str, data: bytes) -> Message | None:
        """Offer and chunks, and the aggregator's last answer."""
        self.answers(name)
        self.offer(name, data)
        self.push(name, data)
        self.run()
        return (self.answers(name) or [None])[-1]

    def answers(self, name: str) -> list[Message]:
        """What came on the device's own topic since the last call."""
        self.run()
        topic, key = self.topics.down(name), self.coordinator.identity.public_key
        payloads = [d.payload for d in self.inbox[name] if d.topic == topic]
        found = [self.decoded(payload, key) for payload in payloads]
        self.inbox[name] = [d for d in self.inbox[name] if d.topic != topic]
        return found

    def decoded(self, payload: bytes, public_key: bytes | None = None) -> Message:
        return decode_message(payload, federation=self.topics.federation, public_key=public_key)

    @property
    def plan(self) -> RoundPlan:
        data = self.hub.retained[self.topics.round]
        plan = self.decoded(data, self.identity.public_key)
        if not isinstance(plan, RoundPlan):
            pytest.fail(f"no plan: {plan}")
        return plan

    def kinds(self) -> list[str]:
        return [event["event"] for event in read_events(self.events.path)[0]]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.events.path)[0] if event["event"] == kind]

    def refusals(self) -> dict[str, dict[str, int]]:
        self.fleet.now += 1.1
        self.run()
        return self.fleet.store.refusals()

    def state(self) -> list[Any]:
        """Everything that must not change by what a stranger sends."""
        store = self.fleet.store
        return [
            self.fleet.engine.plan,
            self.fleet.engine.accepted,
            self.fleet.engine.global_digest,
            store.devices(),
            store.rounds(),
            store.charges(),
            store.updates(1),
            dict(self.coordinator.present),
        ]


@pytest.fixture
def make_field(make_fleet: MakeFleet, tmp_path: Path) -> Callable[..., Field]:
    def make(*, chaos: Chaos | None = None, closed: bool = True, **settings: Any) -> Field:
        settings.setdefault("wire", {"chunk_bytes": CHUNK_BYTES, "codec": "float32"})
        return Field(make_fleet(**settings), tmp_path, chaos=chaos, closed=closed)

    return make


MakeField = Callable[..., Field]


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
    identity = field.coordinator.identity
    server = field.decoded(field.hub.retained[field.topics.server])
    assert server == ServerState(1, "ready", identity.public_key)
    notice = field.decoded(field.hub.retained[field.topics.task], identity.public_key)
    ref = field.fleet.prepared.spec_ref
    assert notice == TaskNotice("tiny-0001", ref.digest, ref.size, 1)
    assert (field.plan.phase, field.plan.round) == ("closed", 0)
    field.coordinator.close()
    assert field.decoded(field.hub.retained[field.topics.server]) == ServerState(1, "lost", identity.public_key)


def test_a_round_waits_for_enough_devices(make_field: MakeField) -> None:
    field = make_field(min_devices=2)
    field.join("dev-0")
    assert field.plan.phase == "closed"
    field.join("dev-1", state="sleeping")
    assert field.plan.phase == "closed"
    field.join("dev-1", state="training")
    assert (field.plan.phase, sorted(field.plan.cohort)) == ("open", ["dev-0", "dev-1"])


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
        size = len(field.coordinator._find_blob(digest))
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
    told = [(e["device"], e["state"]) for e in read_events(field.events.path)[0] if e["event"] == "presence"]
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
    told = [(e["device"], e["round"], e["bytes"]) for e in read_events(field.events.path)[0] if e["event"] == "offer"]
    assert told == [("dev-0", 1, 100)]


def test_a_broker_that_goes_and_comes_back_is_logged_once_each(make_field: MakeField) -> None:
    field = make_field(min_devices=9, devices=3)
    field.join("dev-0")
    assert "link" not in field.kinds(), "the first connection is no news"
    field.hub.cut("aggregator")
    field.run()
    field.coordinator.link.open()
    field.run()
    assert [e["state"] for e in read_events(field.events.path)[0] if e["event"] == "link"] == ["down", "up"]


def test_a_round_whose_opening_was_killed_before_it_was_logged_is_logged_later(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    lines = field.events.path.read_text().splitlines(keepends=True)
    field.events.path.write_text("".join(line for line in lines if '"round_open"' not in line))
    field.crash()
    opened = [event for event in read_events(field.events.path)[0] if event["event"] == "round_open"]
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
    logged = [event for event in read_events(field.events.path)[0] if event["event"] == "round_close"]
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
    (event,) = [e for e in read_events(field.events.path)[0] if e["event"] == "decline"]
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


def test_the_end_is_announced_even_if_the_link_was_down_when_it_came(make_field: MakeField) -> None:
    field = make_field(rounds=1, deadline_s=5)
    field.join_all()
    field.deliver("dev-0", field.fleet.update("dev-0").data)
    field.hub.cut("aggregator")
    field.run(6)
    assert field.fleet.engine.finished
    assert field.plan.phase == "open"
    assert field.coordinator._finished_at is None, "it has not been said yet, so the loop goes on"
    field.hub.restore("aggregator")
    field.run()
    assert field.plan.phase == "finished"
    assert field.coordinator._finished_at == field.fleet.now
    assert field.kinds().count("finished") == 1


def test_who_still_fetches_the_final_model_is_waited_for_a_minute_at_most(make_field: MakeField) -> None:
    field = make_field(rounds=1)
    field.join_all()
    for name in field.fleet.names:
        field.deliver(name, field.fleet.update(name).data)
    assert field.plan.phase == "finished"
    began, final = field.fleet.now, field.plan

    def waits() -> bool:
        return not field.coordinator._served_all(began, 2.0)

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


# hostile senders


def refused_by_code(field: Field, name: str, update: Any, code: str) -> None:
    before = field.state()
    answer = field.deliver(name, update.data)
    assert isinstance(answer, Refused), answer
    assert answer.code == code, answer
    assert field.state() == before
    assert field.refusals()[name][code] >= 1


def test_an_update_with_nan(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    values = update.values.copy()
    values[3] = 1.0
    good = field.fleet.devices.sign("dev-0", update.header, values, update.counts).data
    at = good.index(values.tobytes()) + 12
    forged = good[:at] + np.float32("nan").tobytes() + good[at + 4 : -64]
    forged += field.fleet.devices.identities["dev-0"].sign(forged)
    update.encoded = update.encoded._replace(data=forged)
    refused_by_code(field, "dev-0", update, "non-finite")


def test_a_zero_update_that_declares_noise(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    silent = field.fleet.devices.sign("dev-0", update.header, np.zeros_like(update.values), update.counts)
    refused_by_code(field, "dev-0", silent, "below-noise")


def test_an_update_with_the_wrong_mask_digest(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    other = field.fleet.devices.sign("dev-0", update.header, update.values, update.counts, public_digest=bytes(16))
    refused_by_code(field, "dev-0", other, "state-unknown")
    attached = field.fleet.devices.sign(
        "dev-0", update.header, update.values, update.counts, public_digest=bytes(16),
        public=field.fleet.prepared.method.init_state().public.to_bytes(),
    )  # fmt: skip
    refused_by_code(field, "dev-0", attached, "malformed")


def test_a_replayed_round(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    first = field.fleet.update("dev-0")
    for name in field.fleet.names:
        field.deliver(name, first.data if name == "dev-0" else field.fleet.update(name).data)
    assert field.plan.round == 2
    before = field.state()
    field.offer("dev-0", first.data, round=2)  # as if it were an update of the open round
    field.push("dev-0", first.data)
    (answer,) = field.answers("dev-0")
    assert (type(answer), answer.code, answer.round) == (Refused, "late", 2)
    assert field.state() == before
    relabelled = field.fleet.devices.sign("dev-0", first.header, first.values, first.counts, round=7)
    assert field.deliver("dev-0", relabelled.data).code == "late"
    assert field.state() == before


def test_an_update_under_another_devices_id(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    stolen = field.fleet.update("dev-0")
    refused_by_code(field, "dev-1", stolen, "bad-signature")
    own_key = field.fleet.devices.sign("dev-1", stolen.header, stolen.values, stolen.counts)
    refused_by_code(field, "dev-1", own_key, "bad-signature")
    assert isinstance(field.deliver("dev-1", field.fleet.update("dev-1").data), Ack)


def test_another_key_for_a_known_device(make_field: MakeField) -> None:
    field = make_field(min_devices=3)
    field.join("dev-0")
    thief = Identity.generate()
    before = field.state()
    for state, session in (("ready", 9), ("lost", 9), ("lost", 1)):
        field.send("dev-0", field.birth("dev-0", state=state, session=session, identity=thief), "state", thief)
    field.send("dev-0", Decline("tiny-0001", 1, "error", ""), identity=thief)
    field.run()
    assert field.state() == before
    assert field.refusals() == {"dev-0": {"bad-signature": 4}}
    (event,) = [e for e in read_events(field.events.path)[0] if e["event"] == "refused"]
    assert (event["device"], event["code"], event["count"]) == ("dev-0", "bad-signature", 4)


def test_the_key_of_one_device_for_another(make_field: MakeField) -> None:
    """One board under two names would count twice in a round."""
    field = make_field(min_devices=3)
    field.join("dev-0")
    field.join("dev-1", identity=field.fleet.devices.identities["dev-0"])
    assert set(field.coordinator.present) == {"dev-0"}
    assert sum(counts["bad-signature"] for counts in field.refusals().values()) == 1
    field.join("dev-1")
    assert set(field.coordinator.present) == {"dev-0", "dev-1"}


def test_a_device_that_is_not_in_the_cohort(make_field: MakeField) -> None:
    field = make_field(min_devices=2)
    field.join("dev-0")
    field.join("dev-1")
    field.join("dev-2")
    plan = field.plan
    assert "dev-2" not in plan.cohort
    assert field.deliver("dev-2", field.fleet.devices.update("dev-2", plan).data).code == "not-in-cohort"


def test_an_offer_that_is_too_large(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    before = field.state()
    field.offer("dev-0", b"x", size=field.fleet.engine.checks.max_bytes + 1)
    (answer,) = field.answers("dev-0")
    assert (type(answer), answer.code) == (Refused, "malformed")
    field.push("dev-0", b"x")
    assert field.state() == before


def test_a_flood_of_chunks(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    before = field.state()
    rng = np.random.default_rng(0)
    for index in range(2000):
        blob = rng.bytes(3000)
        field.push("dev-1" if index % 2 else "dev-0", blob, [index % 3])
        if index % 100 == 0:
            field.run(steps=120)
    field.run(steps=200)
    assert field.state() == before
    counted = field.refusals()
    assert counted["dev-0"]["malformed"] == counted["dev-1"]["malformed"] == 1000
    assert field.kinds().count("refused") < 100
    assert field.coordinator._uploads._transfers._open == {}
    assert isinstance(field.deliver("dev-0", field.fleet.update("dev-0").data), Ack)


def test_chunks_of_wrong_content_only_cost_time(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    data = field.fleet.update("dev-0").data
    offer = field.offer("dev-0", data)
    poison = bytearray(next(split(b"\0" * len(data), CHUNK_BYTES, [0], digest=offer.digest)))
    field.links["dev-1"].publish(field.topics.chunk("dev-0"), bytes(poison))
    field.push("dev-0", data)
    field.run(1.5)
    assert field.answers("dev-0") == [Missing("tiny-0001", 1, offer.digest, ())]
    field.push("dev-0", data)
    assert [type(answer) for answer in field.answers("dev-0")] == [Ack]


def test_a_flood_of_wants_is_bounded(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    digest = field.plan.global_digest
    field.links["dev-1"].subscribe(field.topics.blob(digest))
    for _ in range(300):
        field.send("dev-0", Want(digest, 1024, ()))
        field.run(0.1, steps=4)
    field.send("dev-0", Want(bytes(32), 1024, ()))
    field.send("dev-0", Want(digest, 99, ()))
    field.send("dev-0", Want(digest, 1024, ((0, 5),)))
    field.run(1)
    frames = [d for d in field.inbox["dev-1"] if d.topic == field.topics.blob(digest)]
    assert len(frames) == 6
    assert field.refusals() == {"dev-0": {"malformed": 2}}


def test_headers_that_do_not_amount_to_the_tasks_mechanism(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    header: UpdateHeader = update.header
    stds, norms = np.array(header.noise_stds), np.array(header.clip_norms)
    cases = {
        "less noise than its clip norms demand": {"noise_stds": tuple(stds / 2)},
        "larger clip norms than its noise allows": {"clip_norms": tuple(norms * 2)},
        "larger clip norms and noise than the task's": {"clip_norms": tuple(norms * 9), "noise_stds": tuple(stds * 9)},
        "one layer without noise": {"noise_stds": (0.0, stds[1])},
        "another multiplier": {"multiplier_server": header.multiplier_server * 2},
        "another split": {"noise_split": 2},
        "noise that drowns everything": {"noise_stds": tuple(stds * 100)},
    }
    for what, changes in cases.items():
        forged = field.fleet.devices.sign("dev-0", header, update.values, update.counts, **changes)
        answer = field.deliver("dev-0", forged.data)
        assert (type(answer), answer.code) == (Refused, "out-of-bounds"), what
    loud = field.fleet.devices.sign("dev-0", header, update.values * 3, update.counts)
    assert field.deliver("dev-0", loud.data).code == "out-of-bounds"
    assert field.fleet.store.updates(1) == []


def test_shapes_that_do_not_fit(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    update = field.fleet.update("dev-0")
    identity = field.fleet.devices.identities["dev-0"]
    for counts, stds in (([200, 52], update.header.noise_stds), ([100, 100, 56], (*update.header.noise_stds, 1.0))):
        header = UpdateHeader(
            **{
                **{name: getattr(update.header, name) for name in update.header.__dataclass_fields__},
                "value_count": sum(counts),
                "noise_stds": stds,
                "clip_norms": (0.1,) * len(stds),
            }
        )
        data = encode_update(header, update.values[: sum(counts)], counts=counts, identity=identity).data
        answer = field.deliver("dev-0", data)
        assert isinstance(answer, Refused)
        assert answer.code in ("wrong-shape", "out-of-bounds")
    assert field.fleet.store.updates(1) == []


def test_thousands_of_broken_messages_change_nothing(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    field.run()
    rng = random.Random(7)
    update = field.fleet.update("dev-0", advance=False)
    plan_bytes = field.hub.retained[field.topics.round]
    state_bytes = field.hub.retained[field.topics.state("dev-0")]
    identity = field.fleet.devices.identities["dev-0"]
    offered = Offer("tiny-0001", 1, hashlib.sha256(update.data).digest(), len(update.data))
    offer = encode_message(offered, identity, federation="default")
    seeds = [plan_bytes, state_bytes, offer, next(split(update.data, CHUNK_BYTES)), update.data, b"", b"HF", b"HC"]
    topics = [field.topics.state("dev-0"), field.topics.msg("dev-0"), field.topics.chunk("dev-0")]
    topics += [field.topics.state("dev-9"), field.topics.msg("dev-9"), field.topics.chunk("dev-9")]
    before = field.state()
    intruder = field.hub.link("intruder")
    intruder.open()
    for count in range(10_000):
        payload = mutated(rng.choice(seeds), rng)
        if payload in seeds:
            continue
        intruder.publish(rng.choice(topics), payload)
        if count % 30 == 0:
            field.run(steps=40)
    field.run(steps=100)
    assert field.state() == before
    counted = field.refusals()
    assert sum(counted["dev-0"].values()) > 1000
    assert sum(counted["unknown"].values()) > 1000
    assert set(counted) == {"dev-0", "unknown"}, "names of strangers are not collected"
    assert field.kinds().count("refused") < 200
    assert isinstance(field.deliver("dev-0", update.data), Ack)


def test_ten_thousand_broken_updates_that_are_properly_signed(make_field: MakeField) -> None:
    field = make_field()
    field.join_all()
    rng = random.Random(8)
    update = field.fleet.update("dev-0", advance=False)
    public = field.fleet.prepared.method.init_state().public.to_bytes()
    attached = field.fleet.devices.sign("dev-0", update.header, update.values, update.counts, public=public)
    identity = field.fleet.devices.identities["dev-0"]
    checks, before = field.fleet.engine.checks, field.state()
    held = field.fleet.prepared.method.init_state().public
    codes = set()
    for _ in range(10_000):
        body = mutated(rng.choice((update.data, attached.data))[:-64], rng)
        data = body + identity.sign(body)
        try:
            header, payload = checks.authenticate("dev-0", data, public_key=identity.public_key)
            admitted = checks.check_header(header, data, payload=payload, plan=field.plan, held=held)
            decoded = decode(data, admitted.counts)
            checks.check_values(admitted, decoded)
        except Refusal as refusal:
            codes.add(refusal.code)
        else:
            codes.add("sound")  # changed bits of a value may be a sound update: it is the device's own word
    assert {"malformed", "out-of-bounds", "state-unknown", "sound"} <= codes
    assert field.state() == before


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few flipped, cut, doubled or inserted bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 40)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                changed[at:at] = changed[at : at + rng.randint(1, 40)]
    return bytes(changed)


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
    field.register.add([KnownDevice(name, card.public_key)])
    with DeviceRegister(field.fleet.folder, durable=False) as command:  # another process, whose change is seen
        command.block("nobody", "")
    field.run(2.0)
    field.inbox[name].clear()
    field.send(name, field.birth(name, identity=card), "state", card)
    field.send(name, Ask(1, bytes(16)), "msg", card)
    field.run(0.5)
    (known,) = [answer for answer in field.answers(name) if isinstance(answer, Known)]
    assert (known.yours, known.last_round) == (True, 0)
