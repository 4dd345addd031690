"""A fleet's year on a virtual clock: real stores, ledgers, keys, certificates and rounds; links in memory, no waiting.

Boards are those of a world, whose agents are started each night; the aggregator is the real `Coordinator` on the
fleet's folder. What is not played is the transport and the boards' software.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
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
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.fleet_members import FleetMembers
from hushfleet.aggregator.storage.identity_file import load_or_create
from hushfleet.edge_client.board.budget_clock import BudgetClock
from hushfleet.edge_client.board.config import (
    BrokerSection,
    DeviceConfig,
    DeviceSection,
    LimitsSection,
    OwnDataSection,
    SimulationSection,
)
from hushfleet.edge_client.board.local_data import LocalData
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.verifier import MessageVerifier
from hushfleet.edge_client.worker.job import Job, Outcome
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.edge_client.worker.trainer import Trainer
from hushfleet.errors import WireError
from hushfleet.learning.carry_over import with_outputs
from hushfleet.methods import make_method
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.ledger import LedgerEntry
from hushfleet.simulator.world.board import WorldBoard, trained
from hushfleet.simulator.world.clock import WorldClock
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.simulator.world.run import WorldServer
from hushfleet.simulator.world.times import DeviceTimes
from hushfleet.wire.format.spec import BlobRef, ModelSpec, TaskSpec
from hushfleet.wire.format.topics import Topics
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
    stub = b"a graph that nothing runs"
    parsed, graph = parse_task(section), BlobRef.of(stub)
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
        blobs={BlobRef.of(blob).digest: blob for blob in (package, stub)},
        initial=model.init(5) if earlier is None else earlier.vector(shape),
        method=make_method(spec.method, spec.method_config, spec.privacy, layout, rounds=spec.rounds),
        dataset=None,
        features=None,
        inference=None,  # type: ignore[arg-type]  # nothing here computes logits
        evaluate_global=None,
    )


class Card:
    """One card of a board: its store, its data, and the client on it. A new card has a new store and a new key."""

    def __init__(self, year: Year, name: str, folder: Path, number: int) -> None:
        self.year, self.name, self.number, self._folder = year, name, number, folder
        folder.mkdir()
        self.path = folder / "train.npz"
        self.asker = Asker(name, year.desk.token(name))
        self.certificates, self.carried = 0, 0
        self.committed: list[tuple[str, int]] = []
        self._months = -1
        seconds = {"steps": 1, "step_s": 10.0 if number % 2 else 100.0, "release_s": 1.0, "start_s": 0.0, "load_s": 0.0}
        link = {"latency_s": 0.01, "down_s_per_byte": 0.0, "up_s_per_byte": 0.0}
        self.board = WorldBoard(
            name,
            clock=year.clock,
            hub=year.hub,
            times=DeviceTimes(**seconds, **link, write_s_per_byte=0.0, idle_w=1.0, active_w=1.0),
            config=DeviceConfig(
                device=DeviceSection(name, str(folder), federation=FEDERATION, board="generic-x86"),
                broker=BrokerSection("mqtt://year"),
                data=self.own_data(),
                limits=year.limits,
                simulation=SimulationSection(seed=number, index=number),
            ),
            store=self.opened,
            train=self._train,
            budget_clock=lambda store: BudgetClock(
                store.ledger, wall=year.wall, monotonic=year.clock, witness=year.wall
            ),
        )

    def own_data(self) -> OwnDataSection:
        return OwnDataSection("arrays", str(self.path), values="pixels")

    def opened(self) -> DeviceStore:
        return DeviceStore(self._folder / "store.sqlite", device=self.name, durable=False)

    @property
    def entries(self) -> list[LedgerEntry]:
        with self.opened() as store:
            return store.ledger.entries()

    def enrol(self) -> None:
        """Asks for a certificate, as at the first start and before the last one ends."""
        if self.certificates:
            self.asker = Asker(self.name, seed=1)
        with self.opened() as store:
            self.asker.identity = store.identity
            answer = self.year.desk.ask(self.asker)
            assert answer.verdict == "granted", answer
            if not store.is_enrolled:
                carried = [*answer.carried]
                while answer.up_to is not None:
                    answer = self.year.desk.ask(self.asker, after=answer.up_to)
                    carried += answer.carried
                store.note_enrolled(carried)
                self.carried = len(store.ledger.entries())
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

    def _train(self, job: Job) -> Iterator[Outcome]:
        store, prepared = JobStore(job), self.year.server.prepared
        data = LocalData(
            job.config.data,
            prepared.spec.model,
            features=prepared.features,
            may_be_empty=prepared.method.parts.takes_empty,
            arrivals=store.arrived,
        )
        trainer = Trainer(
            device=self.name,
            store=store,
            spec=prepared.spec,
            method=prepared.method,
            gradient=self.year.gradient(prepared),
            logits_of=None,  # type: ignore[arg-type]  # the method looks at no data
            samples=data.samples,
            arrived=data.samples,
            randomness=SeededRandomness(self.number, self.number),
            limits=job.config.limits,
        )
        self.committed.append((job.plan.task, job.plan.round))
        yield trained(job, trainer)


class Aggregator(WorldServer):
    """The aggregator on the fleet's folder."""

    most_idle_s = 7200.0  # a year is long

    def __init__(self, year: Year, folder: Path, key: Path, task: YearTask) -> None:
        self.year, self.fleet, run = year, folder, folder / "runs" / task.name
        super().__init__(year.prepared(task, folder), run, clock=year.clock, hub=year.hub, starts=BEGINS, key=key)

    def options_of(self, engine: RoundEngine) -> dict[str, Any]:
        self.register = FleetMembers(
            self.fleet / "aggregator",
            file=self.fleet / "admissions",
            authority=self.fleet / "ca/ca.pem",
            federation=FEDERATION,
            durable=False,
            wall=self.wall,
        )
        budget = self.year.limits.budget
        assert budget is not None
        return {
            "enrolment": Enrolment(self.store, self.register, clock=self.year.clock, wall=self.wall),
            "federation": FEDERATION,
            "charges": ChargeBook(self.register, engine, Budgets(self.register, budget, clock=self.wall)),
            "events": EventLog(self.events_path, clock=self.wall),
        }

    def close(self) -> None:
        assert self.coordinator is not None
        self.coordinator.close()
        self.kill()


class Year:
    """A fleet of boards, its clock and its aggregator.

    :param every_days: from one round to the next.
    """

    limits = LimitsSection(**LIMITS, memory_mib=64, constant_time=False)  # type: ignore[arg-type]
    make_card: type[Card] = Card

    def __init__(self, path: Path, *, boards: int, every_days: int, seed: int = 1) -> None:
        self.path, self.every_days = path, every_days
        self.clock = WorldClock()
        self.random = random.Random(seed)
        self.hub = LocalHub(clock=self.clock)
        self.heard: set[str] = set()  # who was asked last to train
        self.desk = self.make_desk(path, boards)
        self.desk.now = self.wall()
        self.names = [board.device for board in self.desk.registry.boards()]
        self.topics = Topics(FEDERATION)
        self.key = path / "aggregator.key"
        self._gradients: dict[str, TorchGradient] = {}
        self._task = self.first_task()
        self._start(self.desk.folder.path)
        self.cards: dict[str, Card] = {}
        self.lost_cards: list[Card] = []
        for name in self.names:
            if self.has_card(name, day=0):
                self.insert_card(name)

    def _start(self, folder: Path) -> None:
        self.server = Aggregator(self, folder, self.key, self._task)
        self.server.start()

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
        return BEGINS.timestamp() + self.clock.now

    def at(self, day: int, hour: float = 0.0) -> float:
        """Returns the second of the year at which the clocks in the fleet's country show this hour."""
        local = datetime(2027, 1, 1) + timedelta(days=day, hours=hour)
        return local.replace(tzinfo=ZONE).timestamp() - BEGINS.timestamp()

    def skip_to(self, at: float) -> None:
        """Lets everything happen until then."""
        while self.clock.next_s <= at:
            self.clock.advance()
        self.clock.now = max(self.clock.now, at)
        self.desk.now = self.wall()

    @property
    def engine(self) -> RoundEngine:
        assert self.server.coordinator is not None
        return self.server.coordinator.engine

    def gradient(self, prepared: PreparedTask) -> TorchGradient:
        return self._gradients.setdefault(prepared.spec.task, TorchGradient(prepared.model))

    def blob(self, digest: bytes) -> bytes:
        found = self.engine.find_blob(digest)
        assert found is not None
        return bytes(found)

    # what happens to the fleet

    def insert_card(self, name: str) -> Card:
        """A board starts for the first time with a new card."""
        before = self.cards.get(name)
        if before is not None:
            self.lost_cards.append(before)
        number = len(self.cards) + len(self.lost_cards)
        card = self.cards[name] = self.make_card(self, name, self.path / f"card-{number}", number)
        card.enrol()
        return card

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
        self.server.close()
        self._task = task
        self._start(self.server.fleet)

    def move(self, to: Path) -> None:
        """The aggregator goes on another machine, with a copy of folder and key."""
        self.server.close()
        old = self.server.fleet, self.key
        self.desk.close()
        shutil.copytree(old[0], to / "fleet")
        self.key = to / "aggregator.key"
        for file in old[1].parent.glob("aggregator.key*"):
            shutil.copy2(file, to / file.name)
        self.desk.folder = FleetFolder(to / "fleet")
        self.desk.open()
        self._start(self.desk.folder.path)

    def refusals_of(self, payload: bytes) -> dict[str, str]:
        """Returns which boards refuse a message of the aggregator, and why."""
        errors, key = {}, load_or_create(self.key).public_key
        for name, card in self.cards.items():
            with card.opened() as store:
                try:
                    MessageVerifier(store, key, federation=FEDERATION).verify(payload)
                except WireError as error:
                    errors[name] = str(error)
        return errors

    # nights

    def night(self, day: int, *, outage: bool = False) -> bool:
        """One night's window: who is there takes part. Returns whether a round was open.

        :param outage: the broker dies when half of the boards have trained, and is back in the next night.
        """
        begins = self.at(day, NIGHT[0] + 0.05)
        self.skip_to(begins)
        rhythm = self.server.coordinator.rounds.rhythm
        if self.engine.plan is None and not rhythm.is_due():
            return False
        if self.engine.finished and day % self.every_days:  # boards hear nothing new, which one night of several shows
            return False
        self.server.link.open()  # if the broker died in the night before
        there = [self.cards[name] for name in self.names if self.takes_part(name)]
        for card in there:
            card.take_pictures(day // 30, len(self._task.classes))
            card.board.start()
        self.skip_to(begins + 60.0)
        plan = self.engine.plan
        if plan is not None:
            self.heard = {card.name for card in there} & (set(self.names) if plan.secure else set(plan.cohort))
        if outage:
            self.hub.crash()
        self.skip_to(self.at(day, NIGHT[1] + 0.05))
        for card in there:
            card.board.stop_client()
        return plan is not None

    def takes_part(self, name: str) -> bool:
        """Nine of ten boards are there in a night."""
        return self.random.random() < 0.9

    def renew_certificates(self) -> None:
        for name, card in self.cards.items():
            board = self.desk.registry.board(name)
            if board.standing == "enrolled" and (board.certificate_end or 0) < self.wall() + 30 * 86400:
                card.enrol()

    def close(self) -> None:
        self.server.close()
        self.desk.close()
