"""A small real task, and an aggregator written out message by message to test the device against.

The graphs are real exports, the messages and identities are the real ones, the hub behaves like a broker;
only the aggregator's decisions are scripted, and the clock is a number that the test moves.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.budget_clock import BudgetClock
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.fleet.health import BoardHealth
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.job import Job, Outcome, Told
from hushfleet.edge_client.worker.loaded_task import LoadedTask
from hushfleet.edge_client.worker.work import JobWork
from hushfleet.methods.state import PublicState
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.chunks import Assembler, chunk_count, expand, parse_frame, split
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
from hushfleet.wire.format.spec import BlobRef, TaskSpec
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery

DEVICE = "board-1"
CHUNK_BYTES = 1024


class Clock:
    """Monotonic seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stop(threading.Event):
    """Ends the agent's work. Whoever waits for it lets the time pass.

    :param meanwhile: is called first.
    """

    def __init__(self, clock: Clock, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._clock, self.meanwhile = clock, meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self.meanwhile()
        self._clock.now += timeout or 0.0
        return self.is_set()


@dataclass(frozen=True)
class Package:
    """A task as the aggregator holds it."""

    spec: TaskSpec
    data: bytes
    blobs: dict[bytes, bytes]
    initial: np.ndarray

    def with_spec(self, **changes: object) -> Package:
        spec = replace(self.spec, **changes)
        data = spec.to_bytes()
        return replace(self, spec=spec, data=data, blobs={**self.blobs, hashlib.sha256(data).digest(): data})


def write_samples(path: Path, *, count: int = 48, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    np.savez(
        path,
        images=rng.integers(0, 256, (count, 1, 8, 8), dtype=np.uint8),
        labels=rng.integers(0, 10, count, dtype=np.int64),
    )


@dataclass
class ScriptedAggregator:
    """Answers as the protocol says, except for what a test tells it to leave out.

    :param epoch: its start; plans and notices name it.
    :param knows: whether it answers who the device is, and what it has of it.
    :param answers: whether it answers offers and complete updates at all.
    :param lose_chunks: indices of update chunks that it does not see the first time.
    """

    hub: LocalHub
    package: Package
    epoch: int = 1
    knows: bool = True
    answers: bool = True
    serves: bool = True
    lose_chunks: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.identity = Identity.generate()
        self.topics = Topics("test")
        self.births: list[Birth] = []
        self.wants: list[Want] = []
        self.offers: list[Offer] = []
        self.asks: list[Ask] = []
        self.newest: Ask | None = None
        self.latest: tuple[int, bytes] = (0, b"")
        self.place: tuple[int, str] = (0, "closed")
        self.declines: list[Decline] = []
        self.chunks_seen: list[int] = []
        self.updates: list[bytes] = []
        self.refuse_next: str | None = None
        self.global_params = self.package.initial
        self.differences: dict[bytes, bytes] = {}
        self._open: dict[bytes, Assembler] = {}
        self.device_key: bytes | None = None
        self.link = self.hub.link(f"aggregator-{id(self)}")
        for topic_filter in (self.topics.all_states, self.topics.all_msgs, self.topics.all_chunks):
            self.link.subscribe(topic_filter)
        self.link.open()

    @property
    def blobs(self) -> dict[bytes, bytes]:
        model = self.global_params.astype("<f4").tobytes()
        return {**self.package.blobs, **self.differences, hashlib.sha256(model).digest(): model}

    def announce(self) -> None:
        """Retained: who the aggregator is, and the task."""
        self.send(self.topics.server, ServerState(self.epoch, "ready", self.identity.public_key), retain=True)
        ref = BlobRef.of(self.package.data)
        notice = TaskNotice(self.package.spec.task, ref.digest, ref.size, self.epoch)
        self.send(self.topics.task, notice, retain=True)

    def plan(self, round: int, **changes: object) -> RoundPlan:
        model = BlobRef.of(self.global_params.astype("<f4").tobytes())
        fields: dict[str, object] = {
            "task": self.package.spec.task,
            "round": round,
            "rounds": self.package.spec.rounds,
            "phase": "open",
            "global_digest": model.digest,
            "global_bytes": model.size,
            "cohort": {DEVICE: self.initial_public().digest()},
            "noise_split": 1,
            "deadline_s": 600.0,
            "epoch": self.epoch,
        }
        return RoundPlan(**{**fields, **changes})

    def initial_public(self) -> PublicState:
        return PublicState.initial(self.package.spec.model.layout.size)

    def open_round(self, round: int, **changes: object) -> RoundPlan:
        plan = self.plan(round, **changes)
        self.place = (plan.round, plan.phase)
        self.send(self.topics.round, plan, retain=True)
        return plan

    def send(self, topic: str, message: Message, *, retain: bool = False) -> None:
        payload = encode_message(message, self.identity, federation=self.topics.federation)
        self.link.publish(topic, payload, retain=retain)

    def pump(self) -> None:
        """Handles all that has come."""
        while (event := self.link.receive(0.0)) is not None:
            if isinstance(event, Delivery) and event.payload:
                self._on_delivery(event)

    def _on_delivery(self, event: Delivery) -> None:
        kind = self.topics.parse(event.topic).kind
        if kind == "state":
            birth = decode_message(event.payload, federation=self.topics.federation)
            self.device_key = birth.public_key
            self.births.append(birth)
        elif kind == "chunk":
            self._on_chunk(event.payload)
        elif kind == "msg":
            message = decode_message(event.payload, federation=self.topics.federation, public_key=self.device_key)
            if isinstance(message, Want):
                self.wants.append(message)
                self._serve(message)
            elif isinstance(message, Offer):
                self.offers.append(message)
                self._on_offer(message)
            elif isinstance(message, Ask):
                self.asks.append(message)
                self._on_ask(message)
            else:
                self.declines.append(message)

    def _serve(self, want: Want) -> None:
        blob = self.blobs.get(want.digest)
        if self.serves and blob is not None:
            indices = expand(want.missing, chunk_count(len(blob), CHUNK_BYTES))
            for frame in split(blob, CHUNK_BYTES, indices):
                self.link.publish(self.topics.blob(want.digest), frame)

    def _on_ask(self, ask: Ask) -> None:
        if self.newest is None or ask.session > self.newest.session:
            self.newest = ask
        if self.knows:
            task, last = self.package.spec.task, self.latest
            yours, session = ask == self.newest, self.newest.session
            known = Known(self.epoch, ask.nonce, session, yours, task, *self.place, *last)
            self.send(self.topics.down(DEVICE), known)

    def _on_offer(self, offer: Offer) -> None:
        if not self.answers:
            return
        key = (offer.task, offer.round, offer.digest)
        if offer.task == self.package.spec.task:
            self.latest = (offer.round, offer.digest)
        if self.refuse_next is not None:
            code, self.refuse_next = self.refuse_next, None
            self.send(self.topics.down(DEVICE), Refused(*key, code, "as scripted"))
        elif any(hashlib.sha256(update).digest() == offer.digest for update in self.updates):
            self.send(self.topics.down(DEVICE), Ack(*key))
        elif offer.digest in self._open:
            self.send(self.topics.down(DEVICE), Missing(*key, self._open[offer.digest].missing()))
        else:
            self._open[offer.digest] = Assembler(offer.digest, offer.size)
            if len(self.offers) > 1:
                self.send(self.topics.down(DEVICE), Missing(*key, ()))

    def _on_chunk(self, frame: bytes) -> None:
        chunk = parse_frame(frame)
        self.chunks_seen.append(chunk.index)
        if chunk.index in self.lose_chunks:
            self.lose_chunks.discard(chunk.index)
            return
        assembler = self._open.setdefault(chunk.digest, Assembler(chunk.digest, chunk.size))
        assembler.add(chunk)
        if assembler.complete:
            data = assembler.blob()
            if data not in self.updates:
                self.updates.append(data)
            if self.answers and self.offers:
                last = self.offers[-1]
                self.send(self.topics.down(DEVICE), Ack(last.task, last.round, chunk.digest))


class Waiting:
    """A workshop whose worker works on while something happens.

    :param meanwhile: is called at each look at a worker that works.
    :param looks: how often, before the work is done.
    """

    def __init__(self, inner: InProcess, meanwhile: Callable[[], None], *, looks: int = 2) -> None:
        self._inner, self.meanwhile, self._looks = inner, meanwhile, looks
        self.jobs: list[Job] = []
        self._job: Job | None = None

    @property
    def work(self) -> JobWork:
        return self._inner.work

    def begin(self, job: Job) -> None:
        self.jobs.append(job)
        self._job, self._left = job, self._looks

    def poll(self) -> Outcome | None:
        if self._job is None:
            return None
        self.meanwhile()
        self._left -= 1
        if self._left >= 0:
            return None
        job, self._job = self._job, None
        self._inner.begin(job)
        return self._inner.poll()

    def told(self) -> list[Told]:
        return self._inner.told()

    def give_up(self) -> None:
        self._job = None


@dataclass
class Bench:
    """One device and one aggregator on one hub, driven step by step."""

    hub: LocalHub
    server: ScriptedAggregator
    config: DeviceConfig
    clock: Clock
    store: DeviceStore
    agent: Agent

    def steps(self, count: int = 60) -> None:
        """Lets both sides handle what there is."""
        for _ in range(count):
            self.agent.step(0.0)
            self.server.pump()

    def until(self, done: Callable[[], bool], *, most: int = 2000) -> None:
        for _ in range(most):
            if done():
                return
            self.agent.step(0.0)
            self.server.pump()
        raise AssertionError(f"not reached in {most} steps; quarantine: {self.agent.rejected.counts}")

    def opens(self, round: int, **changes: object) -> RoundPlan:
        """Opens a round whose plan names the public state that the device has."""
        state = self.store.load_state(self.server.package.spec.task)
        held = {} if state is None else {"cohort": {DEVICE: state.public.digest()}}
        return self.server.open_round(round, **(held | changes))

    def acked(self, round: int) -> None:
        """Waits until the device's update of the round is acknowledged."""
        self.until(lambda: self.entry_status(round) == "acked")

    def train(self, round: int = 1, **changes: object) -> None:
        """Opens a round, and waits until the device's update is acknowledged."""
        self.opens(round, **changes)
        self.acked(round)

    def restart(self, *, witness: Callable[[], float] | None = None, **changes: object) -> None:
        """The device loses power and starts again with what its store holds.

        :param witness: as in `BudgetClock`.
        """
        self.hub.cut(DEVICE)
        self.store.close()
        if changes:
            self.config = replace(self.config, **changes)
        self.store = DeviceStore(self.config.store_path, device=DEVICE, durable=False)
        connect, stop = (lambda will: self.hub.link(DEVICE, will)), Stop(self.clock)
        health = None if self.config.fleet is None else BoardHealth(self.config, now=self.clock())
        counts = BudgetClock(
            self.store.ledger, monotonic=self.clock, witness=witness, waits=self.config.simulation is None
        )
        self.agent = Agent(
            self.config,
            connect,
            self.store,
            clock=self.clock,
            stop=stop,
            health=health,
            budget_clock=counts,
            workshop=InProcess(clock=self.clock),
        )
        self.agent.start()

    @property
    def workshop(self) -> Any:
        """What trains for the agent."""
        return self.agent.rounds._handover._workshop

    def while_training(self, meanwhile: Callable[[], None], *, looks: int = 2) -> Waiting:
        """Lets something happen at each look at a worker that works."""
        waiting = Waiting(self.workshop, meanwhile, looks=looks)
        self.agent.rounds._handover._workshop = waiting
        return waiting

    @property
    def loaded(self) -> LoadedTask:
        """The task as the worker of this process has loaded it."""
        return self.workshop.work.loaded

    def load(self) -> LoadedTask:
        """The same, also before the first round."""
        self.until(lambda: self.agent.tasks.runtime is not None)
        runtime = self.agent.tasks.runtime
        package, graphs = runtime.package()
        of_state = {
            "state": self.store.stored_state(runtime.spec.task),
            "spent": self.store.ledger.totals(),
            "arrivals": self.store.arrivals.all(),
        }
        if runtime.spec.continues is not None:
            of_state["earlier"] = self.store.stored_state(runtime.spec.continues.task)
        self.workshop.work._task(
            Job(self.config, package, graphs, self.server.plan(1), b"", runtime.party.now(), **of_state)
        )
        return self.loaded

    def entry_status(self, round: int) -> str | None:
        entry = self.store.outbox(self.server.package.spec.task, round)
        return None if entry is None else entry.status


def device_file(file: Path, *, kind: str, path: str, more: str = "") -> Path:
    """Writes the DEVICE.toml of a board with an inbox, for commands.

    :param more: further lines of `[data]`, and sections.
    """
    file.write_text(
        f"""
        [device]
        id = "{DEVICE}"
        state_dir = "state"
        allow_volatile_state = true
        [broker]
        url = "mqtt://127.0.0.1:9"
        [limits]
        epsilon_server = 50.0
        [data]
        kind = "{kind}"
        path = "{path}"
        inbox = "inbox"
        {more}
        """
    )
    return file
