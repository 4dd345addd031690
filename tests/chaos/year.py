"""A fleet's year on a virtual clock: real stores, ledgers, keys, certificates and rounds; links in memory, no waiting.

Boards do what their client does in a round (`DeviceRound` on a `DeviceStore`), one after the other; the aggregator is
the real `Coordinator` on the fleet's folder. What is not played is the transport and the boards' software.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.payloads.start import EarlierModel
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.budgets import Budgets
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.fleet_members import FleetMembers
from hushfleet.aggregator.storage.identity_file import load_or_create, next_epoch
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.board.budget_clock import BudgetClock
from hushfleet.edge_client.board.config import LimitsSection, OwnDataSection
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.declines import Declined, decline_reason
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.verifier import MessageVerifier
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import DeviceRound, Trainer
from hushfleet.errors import PrivacyError, WireError
from hushfleet.learning.carry_over import with_outputs
from hushfleet.methods import make_method
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.secure.roster import Roster
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.chunks import split
from hushfleet.wire.format.messages import Birth, Decline, Message, Offer, RoundPlan, encode_message
from hushfleet.wire.format.spec import BlobRef, ModelSpec, TaskSpec
from support.desk import FEDERATION
from support.enroller import Asker, Desk
from support.fleet import LAYOUT, tiny_model

ZONE = ZoneInfo("Europe/Berlin")
BEGINS = datetime(2027, 1, 1, tzinfo=ZONE)
DAY_S = 86400
LIMITS = {"epsilon_server": 2.0, "per": "90d", "epsilon_lifetime": 4.0, "delta": 1e-5}
DEADLINE_S = 3600.0
NIGHT = (1.0, 5.0)
"""Rounds are open between these hours."""


@dataclass(frozen=True)
class YearTask:
    """One task of the year.

    :param begins: the day on which it begins, from 0 on.
    :param start: the task from whose last model it goes on.
    """

    name: str
    begins: int
    classes: tuple[str, ...]
    window: str | None = None
    start: str | None = None
    method: str = "dp-fedavg"


TASKS = (
    YearTask("spring", 0, ("a", "b", "c", "d")),
    YearTask("summer", 120, ("a", "b", "c", "d", "e"), start="spring"),
    YearTask("autumn", 240, ("a", "b", "c", "d", "e"), window="30d", start="summer", method="hush"),
)


def prepared(task: YearTask, *, devices: int, every_days: int, start: Path | None) -> PreparedTask:
    """A task on a network of 300 numbers, as `prepare` would make it of a file.

    Its noise is such that a board can pay about six of seven rounds of a year.
    """
    multiplier = 5.0 * (14 / every_days) ** 0.5
    section = {
        "name": task.name,
        "model": {"name": "digits-cnn"},
        "method": {"name": task.method, "batch_size": 8},
        "privacy": {"clip_norm": 0.5, "noise_multiplier": multiplier, "accounting": "strict", "delta": 1e-5},
        "data": {"name": "digits", "devices": devices, **({"window": task.window} if task.window else {})},
        "round": {"rounds": 400, "min_devices": 2, "deadline_s": DEADLINE_S},
        "schedule": {"every": f"{every_days}d", "between": "01:00-05:00", "timezone": "Europe/Berlin"},
    }
    parsed, graph = parse_task(section), BlobRef.of(b"a graph that no test runs")
    layout = with_outputs(LAYOUT, len(task.classes))
    model = replace(tiny_model(), classes=len(task.classes), layout=layout)
    shape = ModelSpec(
        name=model.name,
        layout=layout,
        input_shape=model.input_shape,
        class_names=task.classes,
        mean=(0.0,),
        std=(1.0,),
        dropout=(),
        gradient=graph,
        inference=graph,
    )
    earlier = None if start is None else EarlierModel.read(start)
    spec = TaskSpec(
        task=task.name,
        rounds=parsed.round.rounds,
        method=parsed.method.name,
        method_config={"batch_size": 8},
        privacy=parsed.privacy_spec(),
        wire=parsed.wire.spec(),
        model=shape,
        memory_mib=64,
        data_window_s=parsed.data.window_s,
        continues=None if earlier is None else earlier.continued,
    )
    package = spec.to_bytes()
    return PreparedTask(
        task=parsed,
        model=model,
        spec=spec,
        spec_ref=BlobRef.of(package),
        blobs={BlobRef.of(package).digest: package},
        initial=model.init(5) if earlier is None else earlier.vector(shape),
        method=make_method(spec.method, spec.method_config, spec.privacy, layout, rounds=spec.rounds),
        dataset=None,
        features=None,
        inference=None,  # type: ignore[arg-type]  # nothing here computes logits
        evaluate_global=None,
    )


class Card:
    """One card of a board: its store, its budget's clock, its data. A new card has a new store and a new key."""

    def __init__(self, year: Year, name: str, folder: Path, number: int) -> None:
        self.year, self.name, self.number = year, name, number
        self.store = DeviceStore(folder / "store.sqlite", device=name, durable=False)
        self.clock = BudgetClock(self.store.ledger, wall=year.wall, monotonic=lambda: year.elapsed, witness=year.wall)
        self.path = folder / "train.npz"
        self.verifier = MessageVerifier(self.store, year.identity.public_key, federation=FEDERATION)
        self.asker = Asker(name, year.desk.token(name))
        self.asker.identity = self.store.identity
        self.certificates, self.carried = 0, 0
        self.committed: list[tuple[str, int]] = []
        self.refused: list[str] = []
        self.link = year.hub.link(f"{name}-{number}")
        self.link.open()
        self._months = -1
        self._trainer: tuple[str, Trainer] | None = None

    def send(self, message: Message, kind: str = "msg") -> None:
        payload = encode_message(message, self.store.identity, federation=FEDERATION)
        topic = getattr(self.year.topics, kind)(self.name)
        self.link.publish(topic, payload, retain=kind == "state")

    def enrol(self) -> None:
        """Asks for a certificate, as at the first start and before the last one ends."""
        if self.certificates:
            self.asker = Asker(self.name, seed=1)
            self.asker.identity = self.store.identity
        answer = self.year.desk.ask(self.asker)
        assert answer.verdict == "granted", answer
        if not self.store.is_enrolled:
            carried = [*answer.carried]
            while answer.up_to is not None:
                answer = self.year.desk.ask(self.asker, after=answer.up_to)
                carried += answer.carried
            self.store.note_enrolled(carried)
            self.carried = len(self.store.ledger.entries())
        self.certificates += 1

    def take_pictures(self, month: int, classes: int) -> None:
        """Adds the month's samples. They differ with the season, and the newest class appears when it is known."""
        if month == self._months:
            return
        self._months = month
        rng = np.random.default_rng([self.number, month])
        x = rng.integers(0, 256, (6, 1, 4, 4), dtype=np.uint8)
        x[:, :, month % 4] = 255
        y = rng.integers(0, classes, 6)
        if self.path.exists():
            with np.load(self.path) as kept:
                x, y = np.concatenate([kept["images"], x]), np.concatenate([kept["labels"], y])
        np.savez(self.path, images=x, labels=y)

    def trainer(self, prepared: PreparedTask) -> Trainer:
        spec = prepared.spec
        if self._trainer is None or self._trainer[0] != spec.task:
            data = LocalData(
                OwnDataSection("arrays", str(self.path)),
                spec.model,
                features=prepared.features,
                may_be_empty=prepared.method.parts.takes_empty,
                arrivals=lambda keys: self.store.arrivals.of(keys, now=self.clock.now()),
            )
            made = Trainer(
                device=self.name,
                store=self.store,
                spec=spec,
                method=prepared.method,
                gradient=self.year.gradient(prepared),
                logits_of=None,  # type: ignore[arg-type]  # the method looks at no data
                samples=data.samples,
                arrived=data.samples,
                randomness=SeededRandomness(self.number, self.number),
                limits=self.year.limits,
                now=self.clock.now,
            )
            self._trainer = spec.task, made
        return self._trainer[1]

    def hear(self, payload: bytes, prepared: PreparedTask, *, delivers: bool) -> None:
        """Takes a plan and does its round; raises a `WireError` for a plan that is another's, or old."""
        plan = self.verifier.verify(payload)
        assert isinstance(plan, RoundPlan)
        if plan.phase not in ("open", "unmask") or (plan.secure is None and self.name not in plan.cohort):
            return
        published = np.frombuffer(self.year.blob(plan.global_digest), "<f4")
        roster = None if plan.secure is None else Roster.from_bytes(self.year.blob(plan.secure.roster.digest))
        round = DeviceRound(self.trainer(prepared), plan, roster)
        if roster is not None and round.secure.key_of(self.name) is None:
            return  # it came after the round had opened
        if plan.phase == "unmask":
            if (answer := round.answer()) is not None:
                self._deliver(plan, answer)
            return
        try:
            entry = round.run(published)
        except (PrivacyError, Declined) as error:
            self.refused.append(str(error))
            if delivers:
                self.send(Decline(plan.task, plan.round, *decline_reason(error)))
            return
        self.committed.append((plan.task, plan.round))
        if delivers:
            self._deliver(plan, entry)

    def _deliver(self, plan: RoundPlan, entry: OutboxEntry | AnswerEntry) -> None:
        self.send(Offer(plan.task, plan.round, entry.digest, len(entry.data)))
        for frame in split(entry.data, 1024):
            self.link.publish(self.year.topics.chunk(self.name), frame)


class Aggregator:
    """One start of the aggregator's process on a folder."""

    def __init__(self, year: Year, folder: Path, key: Path, task: YearTask) -> None:
        self.folder, self.run = folder, folder / "runs" / task.name
        self.prepared = year.prepared(task, folder)
        self.store = AggregatorStore(self.run, durable=False)
        self.register = FleetMembers(
            folder / "aggregator", file=folder / "admissions", authority=folder / "ca/ca.pem", federation=FEDERATION,
            durable=False, wall=year.wall,
        )  # fmt: skip
        clocks = {"clock": year.wall, "monotonic": lambda: year.elapsed}
        engine = RoundEngine(self.store, self.prepared, **clocks)
        budget = year.limits.budget
        assert budget is not None
        self.rhythm = Rhythm(self.prepared.task.schedule, self.store, wall=year.wall, elapsed=lambda: year.elapsed)
        self.coordinator = Coordinator(
            engine,
            lambda will: year.hub.link("aggregator", will),
            identity=load_or_create(key),
            epoch=next_epoch(key, clock=year.wall),
            enrolment=Enrolment(self.store, self.register, clock=lambda: year.elapsed, wall=year.wall),
            federation=FEDERATION,
            charges=ChargeBook(self.register, engine, Budgets(self.register, budget, clock=year.wall)),
            rhythm=self.rhythm,
            events=EventLog(self.run / "events.jsonl", clock=year.wall),
            clock=lambda: year.elapsed,
        )
        self.coordinator.start()

    def close(self) -> None:
        self.coordinator.close()
        self.store.close()
        self.register.close()


class Year:
    """A fleet of boards, its clock and its aggregator.

    :param every_days: from one round to the next.
    """

    limits = LimitsSection(**LIMITS, memory_mib=64)  # type: ignore[arg-type]
    make_card: type[Card] = Card

    def __init__(self, path: Path, *, boards: int, every_days: int, seed: int = 1) -> None:
        self.path, self.every_days = path, every_days
        self.elapsed, self._begins = 1000.0, BEGINS.timestamp() - 1000.0
        self.random = random.Random(seed)
        self.hub = LocalHub()
        self.present: set[str] = set()
        self.heard: set[str] = set()  # who was asked last to train
        self.desk = self.make_desk(path, boards)
        self.desk.now = self.wall()
        self.names = [board.device for board in self.desk.registry.boards()]
        self.key = path / "aggregator.key"
        self.identity = load_or_create(self.key)
        self._gradients: dict[str, TorchGradient] = {}
        self._task = self.first_task()
        self.aggregator = Aggregator(self, self.desk.folder.path, self.key, self._task)
        self.topics = self.aggregator.coordinator.topics
        self.cards: dict[str, Card] = {}
        self.lost_cards: list[Card] = []
        for name in self.names:
            if self.has_card(name, day=0):
                self.insert_card(name)

    def make_desk(self, path: Path, boards: int) -> Desk:
        desk = Desk(path, boards=boards, certificate_days=120)
        file, lines = desk.folder.path / "fleet.toml", [f"{key} = {json.dumps(LIMITS[key])}" for key in LIMITS]
        written = file.read_text().replace("epsilon_server = 8.0\ndelta = 1e-05", "\n".join(lines))
        file.write_text(written)
        return desk

    def has_card(self, name: str, *, day: int) -> bool:
        return True

    def first_task(self) -> YearTask:
        return TASKS[0]

    def prepared(self, task: YearTask, folder: Path) -> PreparedTask:
        start = None if task.start is None else folder / "runs" / task.start
        return prepared(task, devices=len(self.names), every_days=self.every_days, start=start)

    def wall(self) -> float:
        """Unix seconds."""
        return self._begins + self.elapsed

    def at(self, day: int, hour: float = 0.0) -> float:
        """Returns the elapsed second at which the clocks in the fleet's country show this hour."""
        local = datetime(2027, 1, 1) + timedelta(days=day, hours=hour)
        return local.replace(tzinfo=ZONE).timestamp() - self._begins

    def skip_to(self, elapsed: float) -> None:
        self.elapsed = max(self.elapsed, elapsed)
        self.desk.now = self.wall()
        self.step()

    def step(self, least: int = 6) -> None:
        """Lets the aggregator do all that is due."""
        idle, coordinator = 0, self.aggregator.coordinator
        while idle < least:
            waits = coordinator.link.events.empty()
            coordinator.step(0.0)
            idle = idle + 1 if waits else 0

    def gradient(self, prepared: PreparedTask) -> TorchGradient:
        return self._gradients.setdefault(prepared.spec.task, TorchGradient(prepared.model))

    def blob(self, digest: bytes) -> bytes:
        found = self.aggregator.coordinator.engine.find_blob(digest)
        assert found is not None
        return bytes(found)

    # what happens to the fleet

    def insert_card(self, name: str) -> Card:
        """A board starts for the first time with a new card."""
        before = self.cards.get(name)
        if before is not None:
            self.lost_cards.append(before)
            self.present.discard(name)
        number = len(self.cards) + len(self.lost_cards)
        card = self.cards[name] = self.make_card(self, name, self.path / f"card-{number}", number)
        card.enrol()
        return card

    def announce(self, name: str, state: str = "ready") -> None:
        card = self.cards[name]
        card.send(Birth(name, 1, state, "generic-x86", "0.3.0", card.store.identity.public_key, 512), "state")  # type: ignore[arg-type]

    def lock_out(self, name: str) -> None:
        """`hushfleet fleet block`: the board was stolen."""
        self.desk.registry.block(name, "stolen")
        apply(self.desk.folder, self.desk.registry)

    def flash_anew(self, name: str) -> None:
        """`hushfleet fleet renew --new-card` and a new card."""
        self.desk.registry.expect_new_card(name)
        apply(self.desk.folder, self.desk.registry)
        self.insert_card(name)

    def begin_task(self, task: YearTask) -> None:
        """`hushfleet fleet task`, and a start of the aggregator."""
        self.aggregator.close()
        self._task = task
        self.aggregator = Aggregator(self, self.aggregator.folder, self.key, task)
        self.present = set()

    def move(self, to: Path) -> None:
        """The aggregator goes on another machine, with a copy of folder and key."""
        self.aggregator.close()
        old = self.aggregator.folder, self.key
        self.desk.close()
        shutil.copytree(old[0], to / "fleet")
        self.key = to / "aggregator.key"
        for file in old[1].parent.glob("aggregator.key*"):
            shutil.copy2(file, to / file.name)
        self.desk.folder = FleetFolder(to / "fleet")
        self.desk.open()
        self.aggregator = Aggregator(self, self.desk.folder.path, self.key, self._task)
        self.present = set()

    def refusals_of(self, payload: bytes) -> dict[str, str]:
        """Returns which boards refuse a message of the aggregator, and why."""
        errors = {}
        for name, card in self.cards.items():
            try:
                card.verifier.verify(payload)
            except WireError as error:
                errors[name] = str(error)
        return errors

    # nights

    def night(self, day: int, *, outage: bool = False) -> bool:
        """One night's window: who is there takes part. Returns whether a round was open.

        :param outage: the broker dies when boards have trained, and is back in the next night.
        """
        month = day // 30
        self.skip_to(self.at(day, NIGHT[0] + 0.05))
        if self.aggregator.coordinator.engine.plan is None and not self.aggregator.rhythm.is_due():
            return False
        self._announce_present()
        self.step()
        plan = self.aggregator.coordinator.engine.plan
        if plan is not None:
            payload = self.hub.retained[self.topics.round]
            self.heard = self.present & (set(self.names) if plan.secure else set(plan.cohort))
            for place, name in enumerate(sorted(self.heard)):
                card = self.cards[name]
                card.take_pictures(month, len(self._task.classes))
                card.hear(payload, self.aggregator.prepared, delivers=not outage or place % 2 == 0)
            self.step()
            if plan.secure is not None:
                self._open_sum()
        if outage:
            self.hub.cut("aggregator")
            self.step()
        self.skip_to(self.at(day, NIGHT[1] + 0.05))
        if outage:
            self.hub.restore("aggregator")
            self.step()
        return plan is not None

    def _open_sum(self) -> None:
        """The deadline passes; members of the committee who are there answer."""
        self.skip_to(self.elapsed + DEADLINE_S)
        payload = self.hub.retained[self.topics.round]
        for name in sorted(self.heard):
            self.cards[name].hear(payload, self.aggregator.prepared, delivers=True)
        self.step()

    def takes_part(self, name: str) -> bool:
        """Nine of ten boards are there in a night."""
        return self.random.random() < 0.9

    def _announce_present(self) -> None:
        there = {name for name in self.names if self.takes_part(name)}
        for name in sorted(there ^ self.present):
            self.announce(name, "ready" if name in there else "sleeping")
        self.present = there

    def renew_certificates(self) -> None:
        for name, card in self.cards.items():
            board = self.desk.registry.board(name)
            if board.standing == "enrolled" and (board.certificate_end or 0) < self.wall() + 30 * 86400:
                card.enrol()

    def close(self) -> None:
        self.aggregator.close()
        for card in [*self.cards.values(), *self.lost_cards]:
            card.store.close()
        self.desk.close()
