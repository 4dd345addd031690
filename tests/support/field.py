"""A coordinator and scripted devices on a broker in memory.

Everything runs in one thread on one clock that the test moves, so nothing here depends on timing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.rounds.budgets import Budgets
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.rounds.thresholds import RunningThresholds
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.list_file import ListFile
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.privacy.budget import Budget
from hushfleet.secure.membership_list import MembershipList
from hushfleet.simulator.world.hub import Chaos, LocalHub
from hushfleet.wire.format.chunks import split
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import (
    Birth,
    Message,
    Offer,
    RoundPlan,
    decode_message,
    encode_message,
)
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery

CHUNK_BYTES = 1024


class Field:
    """A hub, a coordinator on it, a clock, and the devices' links."""

    def __init__(
        self,
        fleet: Any,
        folder: Path,
        *,
        chaos: Chaos | None = None,
        closed: bool = True,
        membership_list: ListFile[MembershipList] | None = None,
        charges: bool = False,
        limits: dict[str, Any] | None = None,
        given: bool = False,
    ) -> None:
        """:param limits: of the boards' cards, with which the aggregator knows who can pay.
        :param given: whether the numbers of boards follow the fleet and the file of `fleet set`."""
        self.budget, self.given = Budget.of(limits or {}), folder / "round.toml" if given else None
        self.fleet, self.folder, self.membership_list, self.charges = fleet, folder, membership_list, charges
        self.hub = LocalHub(chaos=chaos)
        self.topics = Topics("default")
        self.links: dict[str, Any] = {}
        self.inbox: dict[str, list[Delivery]] = {}
        self.events = EventLog(folder / "events.jsonl")
        self.sessions: dict[str, int] = {}
        self.identity = Identity.generate()
        self.epoch = 0
        self.closed = closed
        self.pause = folder / "paused"
        self.start()

    def start(self) -> None:
        self.epoch += 1
        self.register = DeviceRegister(self.fleet.folder, durable=False, wall=self.fleet.wall)
        budgets = None if self.budget is None else Budgets(self.register, self.budget, clock=self.fleet.wall)
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
            membership_list=self.membership_list,
            charges=ChargeBook(self.register, self.fleet.engine, budgets) if self.charges else None,
            thresholds=None if self.given is None else self._thresholds(self.given),
            rhythm=Rhythm(
                self.fleet.prepared.task.schedule,
                self.fleet.store,
                pause=self.pause,
                wall=self.fleet.wall,
                elapsed=lambda: self.fleet.now,
            ),
            events=self.events,
            clock=lambda: self.fleet.now,
        )
        self.coordinator.start()
        self.run()

    def _thresholds(self, file: Path) -> RunningThresholds:
        task = self.fleet.prepared.task
        (written := self.folder / "task.json").write_text(json.dumps({"round": self.fleet.rules}))
        return RunningThresholds(task, file, written)

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

    def skip(self, seconds: float) -> None:
        """Lets so much time pass in which nothing happens."""
        self.fleet.now += seconds
        self.run()

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

    def deliver(self, name: str, data: bytes, *, round: int | None = None) -> Message | None:
        """Offer and chunks, and the aggregator's last answer."""
        self.answers(name)
        self.offer(name, data, round=round)
        self.push(name, data)
        self.run()
        return (self.answers(name) or [None])[-1]

    def answers(self, name: str) -> list[Message]:
        """What came on the device's own topic since the last call."""
        self.run()
        topic, key = self.topics.down(name), self.identity.public_key
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
        return [event["event"] for event in iterate_events(self.events.path)]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in iterate_events(self.events.path) if event["event"] == kind]

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
