"""A real aggregator and real boards, with secure noise, on one broker: driven step by step in one thread."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import PreparedTask, prepare
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.identity_file import load_or_create, next_epoch
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import BrokerSection, DeviceConfig, DeviceSection, LimitsSection, OwnDataSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.errors import Malformed
from hushfleet.privacy.terms import Accounting
from hushfleet.wire.format.chunks import parse_frame
from hushfleet.wire.format.topics import Topics
from hushfleet.wire.link.interface import Delivery, Link, Will
from support.edge import Stop, write_samples

Connect = Callable[[str, Will | None], Link]
STEPS = 4000  # of which most do nothing, where a real broker takes its time
STEP_S = 0.02


def prepared_digits(run_id: str, *, method: str = "dp-fedavg", rounds: int = 3) -> PreparedTask:
    return prepare(
        parse_task(
            {
                "name": "digits",
                "model": {"name": "digits-cnn"},
                "method": {"name": method, "batch_size": 16},
                "privacy": {"clip_norm": 1.0, "noise_multiplier": 2.0, "accounting": "strict", "delta": 1e-5},
                "data": {"name": "digits", "devices": 2},
                "round": {"rounds": rounds, "min_devices": 2},
                "wire": {"chunk_bytes": 1024},
            }
        ),
        run_id=run_id,
    )


class Board:
    """A device with its state directory; `stopped` is why it stopped for good."""

    def __init__(
        self, bench: Whole, name: str, state_dir: Path, epsilon_server: float, data: OwnDataSection | None = None
    ) -> None:
        self.name, self.state_dir = name, state_dir
        self.config = DeviceConfig(
            device=DeviceSection(name, str(state_dir), federation=bench.federation),
            broker=BrokerSection("mqtt://localhost"),
            data=data or OwnDataSection("arrays", str(bench.samples)),
            limits=LimitsSection(
                epsilon_server=epsilon_server, memory_mib=500, accounting=bench.accounting, min_devices=2
            ),
        )
        self.stopped: Exception | None = None
        self.store = DeviceStore(self.config.store_path, device=name, durable=False)
        client_id = f"{name}-{bench.federation}"
        connect, clock = (lambda will: bench.connect(client_id, will)), bench.clock
        self.agent = Agent(
            self.config, connect, self.store, clock=clock, stop=Stop(clock), workshop=InProcess(clock=clock)
        )
        self.agent.start()

    def entry_status(self, task: str, round: int) -> str | None:
        entry = self.store.outbox(task, round)
        return None if entry is None else entry.status


class Whole:
    """:param connect: makes a link for a client id; :param key: of the aggregator, shared by its runs.

    :param accounting: what the boards' owners allow.
    """

    def __init__(
        self,
        folder: Path,
        connect: Connect,
        *,
        federation: str = "default",
        key: Path | None = None,
        accounting: Accounting = "strict",
    ) -> None:
        self.folder, self.connect, self.federation, self.accounting = folder, connect, federation, accounting
        self.key = key or folder / "aggregator.key"
        self.topics = Topics(federation)
        self.samples = folder / "train.npz"
        folder.mkdir(parents=True, exist_ok=True)
        write_samples(self.samples)
        self.now = 1000.0
        self.boards: list[Board] = []
        self.heard: list[Delivery] = []
        self._stores: list[AggregatorStore] = []
        self.spy = connect(f"spy-{federation}", None)
        self.spy.subscribe(f"{self.topics.prefix}/#")
        self.spy.open()

    def clock(self) -> float:
        """Monotonic seconds, which pass by `drive` alone."""
        return self.now

    def begin(self, prepared: PreparedTask) -> Coordinator:
        """An aggregator's process, of this run or the next start of it."""
        store = AggregatorStore(self.folder / prepared.spec.task, durable=False)
        register = DeviceRegister(self.folder / prepared.spec.task, durable=False)
        seen = ChargedKeys(self.key, durable=False)
        self._stores += [store, register, seen]
        self.coordinator = Coordinator(
            RoundEngine(store, prepared, monotonic=self.clock),
            lambda will: self.connect(f"aggregator-{self.federation}", will),
            identity=load_or_create(self.key),
            epoch=next_epoch(self.key),
            enrolment=Enrolment(store, register, closed=False, clock=self.clock),
            seen=seen,
            federation=self.federation,
            clock=self.clock,
        )
        self.coordinator.start()
        return self.coordinator

    def end(self) -> None:
        """The aggregator's process ends; another `begin` goes on with its run."""
        self.coordinator.close()
        while self._stores:
            self._stores.pop().close()

    def board(
        self,
        name: str,
        state_dir: Path | None = None,
        *,
        epsilon_server: float = 1000.0,
        data: OwnDataSection | None = None,
    ) -> Board:
        """:param epsilon_server: its owner's limit.
        :param data: None: digits."""
        board = Board(self, name, state_dir or self.folder / name, epsilon_server, data)
        self.boards.append(board)
        return board

    def lose(self, board: Board) -> None:
        """The board is switched off; its will is published where the broker is a hub."""
        board.agent.link.close()
        board.store.close()
        self.boards.remove(board)

    def copy(self, board: Board, name: str) -> Path:
        """Its state directory, as a backup or another card would have it."""
        target = self.folder / name
        source = DeviceStore(board.config.store_path, device=board.name, inspect=True)
        source.close()
        shutil.copytree(board.state_dir, target)
        return target

    def drive(self, done: Callable[[], bool] = lambda: False, *, steps: int = STEPS, wait_s: float = 0.0) -> bool:
        """Lets all sides work until `done`, for so many steps at most; whether it is done."""
        for _ in range(steps):
            if done():
                return True
            self.coordinator.step(wait_s)
            self.drive_boards()
        return done()

    def drive_boards(self, *, wait_s: float = 0.0) -> None:
        """One step of all but the aggregator."""
        self.now += STEP_S
        for board in [each for each in self.boards if each.stopped is None]:
            try:
                board.agent.step(wait_s)
            except Exception as error:
                board.stopped = error
        while (event := self.spy.receive(0.0)) is not None:
            if isinstance(event, Delivery):
                self.heard.append(event)

    def noisings(self, name: str) -> set[bytes]:
        """The digests of all updates of which a chunk has left the device."""
        topic, digests = self.topics.chunk(name), set()
        for delivery in self.heard:
            if delivery.topic == topic:
                try:
                    digests.add(parse_frame(delivery.payload).digest)
                except Malformed:
                    continue
        return digests

    def close(self) -> None:
        for board in self.boards:
            board.agent.link.close()
            board.store.close()
        self.coordinator.close()
        self.spy.close()
        for store in self._stores:
            store.close()
