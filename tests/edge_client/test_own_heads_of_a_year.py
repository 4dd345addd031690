"""Three tasks with real client processes behind a real broker: after each event no board predicts worse than before.

Boards that are there from the start, killed at the close of a round, late, without budget for the second task; a second
task without `start`, a third one with `start` and one more class. After each event the model by which `predict` answers
is within 2 points of the better of two others, on hundreds of images that no board has: a head from the own images
alone, and the model that answered before the event. Noise is drawn from a seed, so that each run has the same result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.broker.process import start_broker
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.devices.enrolment import Enrolment
from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.publish.prepare import prepare
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.storage.identity_file import load_or_create, next_epoch
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import LabelledSamples, Samples
from hushfleet.data.sets import load
from hushfleet.edge_client.board.local_data import inputs_of
from hushfleet.edge_client.own_model import OwnModel, own_model
from hushfleet.edge_client.predict import graphs_of
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.model.evaluation import evaluate_each
from hushfleet.model.own_head import alone_head_of, inputs_of_own, own_logits
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.mqtt import MqttLink

pytestmark = pytest.mark.slow

ROUNDS, IMAGES, PATIENCE_S = 3, 24, 240.0
BOARDS = ("early", "killed", "third", "poor", "off", "late")
WITHIN = 0.02

# A client of the field whose noise comes from a seed, another one for each task.
CLIENT = """
import sys, zlib
from hushfleet.edge_client import runtime
from hushfleet.edge_client.randomness import SeededRandomness


def seeded():
    task = sys._getframe(1).f_locals["spec"].task
    return SeededRandomness(zlib.crc32(task.encode()), int(sys.argv[1]))


runtime.FieldRandomness = seeded
from hushfleet.edge_client.__main__ import main

sys.exit(main(sys.argv[2:]))
"""


class Gate(Rhythm):
    """Rounds open as far as the test allows."""

    allowed = 0

    def is_due(self) -> bool:
        last = self._store.last_round()
        return (0 if last is None else last.round) < self.allowed and super().is_due()


@dataclass
class Board:
    """A board's files, and its process."""

    name: str
    folder: Path
    x: np.ndarray
    y: np.ndarray
    process: subprocess.Popen[bytes] | None = None
    before: OwnModel | None = field(default=None)

    def has(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y
        part = self.folder / "part.npz"
        np.savez(part, images=x, labels=y)
        os.replace(part, self.folder / "train.npz")
        os.utime(self.folder / "train.npz", (time.time() - 600, time.time() - 600 + len(y)))

    def start(self) -> None:
        command = [sys.executable, "-c", CLIENT, str(BOARDS.index(self.name)), "run", str(self.folder / "device.toml")]
        with (self.folder / "client.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def store(self) -> DeviceStore:
        return DeviceStore(self.folder / "state" / "store.sqlite", device=self.name, inspect=True)

    def model(self) -> OwnModel | None:
        if not (self.folder / "state" / "store.sqlite").exists():
            return None
        with self.store() as store:
            return own_model(store) if store.own_models() else None


class Year:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self.boards: dict[str, Board] = {}
        self.coordinator: Coordinator | None = None
        self.gate: Gate | None = None
        self.table: list[str] = []
        self._open: list[Any] = []

    def begin(self, name: str, classes: int, **model: Any) -> None:
        """The aggregator's process for a task."""
        self.end()
        self.name = name
        task = parse_task(
            {
                "name": name,
                "model": {"name": "linear", "features": "filters", "directions": 48, **model},
                "method": {"name": "hush"},
                "privacy": {"accounting": "as-published", "epsilon": 16.0, "delta": 1e-5},
                "data": {
                    "name": "arrays",
                    "class_names": [f"digit-{each}" for each in range(classes)],
                    "input_shape": [1, 8, 8],
                    "values": "pixels",
                    "devices": 5,
                },
                "round": {"rounds": ROUNDS, "min_devices": 4},
            }
        )
        prepared = prepare(task, run_id="1")
        run = self.folder / "runs" / name
        store, register = AggregatorStore(run, durable=False), DeviceRegister(run, durable=False)
        self._open = [store, register]
        key, address = self.folder / "aggregator.key", BrokerAddress.parse(f"mqtt://127.0.0.1:{self.port}")
        self.gate = Gate(task.schedule, store)
        self.coordinator = Coordinator(
            RoundEngine(store, prepared),
            lambda will: MqttLink(address, client_id="aggregator", will=will),
            identity=load_or_create(key),
            epoch=next_epoch(key),
            enrolment=Enrolment(store, register, closed=False),
            rhythm=self.gate,
        )
        self.coordinator.start()

    def end(self) -> None:
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator = None
        for each in self._open:
            each.close()
        self._open = []

    def close(self) -> None:
        for board in self.boards.values():
            board.kill()
        self.end()

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert self.coordinator is not None
            assert time.monotonic() < end, f"{self.name}: {what} did not come"
            for _ in range(20):
                self.coordinator.step(0.01)

    @property
    def closed(self) -> int:
        assert self.coordinator is not None
        return self.coordinator.engine.closed_rounds

    def present(self) -> int:
        assert self.coordinator is not None
        return sum(state == "ready" for state in self.coordinator.present.values())

    def close_round(self, number: int) -> None:
        running = sum(board.process is not None for board in self.boards.values())
        self.until(lambda: self.present() >= running, f"{running} boards")
        assert self.gate is not None
        self.gate.allowed = number
        self.until(lambda: self.closed >= number, f"round {number}")

    def until_chosen(self, round: int, names: tuple[str, ...]) -> None:
        def chosen(board: Board) -> bool:
            own = board.model()
            return own is not None and own.spec.task == f"{self.name}-1" and own.round == round

        self.until(lambda: all(chosen(self.boards[name]) for name in names), f"a head of round {round}")

    def check(self, event: str, test_x: np.ndarray, test_y: np.ndarray, names: tuple[str, ...]) -> None:
        """Compares what answers now with training alone and with what answered before."""
        rows = []
        for name in names:
            board = self.boards[name]
            with board.store() as store:
                own = own_model(store)
                found = right(store, own, test_x, test_y)
                before = (
                    np.zeros(len(test_y), bool) if board.before is None else right(store, board.before, test_x, test_y)
                )
                alone = right_alone(store, own, board, test_x, test_y)
            rows.append((found, before, alone))
            board.before = own
        means = [float(np.mean([row[part].mean() for row in rows])) for part in range(3)]
        answer, before, alone = means
        each = [found.mean() - max(old.mean(), lone.mean()) for found, old, lone in rows]
        self.table.append(
            f"{event:58} alone {100 * alone:5.1f}  before {100 * before:5.1f}  now {100 * answer:5.1f}  "
            f"worst board {100 * min(each):+5.1f}"
        )
        assert answer >= max(before, alone) - WITHIN, "\n".join(self.table)
        for found, old, lone in rows:
            for other in (old, lone):
                error = np.sqrt(np.mean(found != other) / len(found))  # of the difference, on the same images
                assert found.mean() >= other.mean() - WITHIN - 2 * error, "\n".join(self.table)


def featured(store: DeviceStore, own: OwnModel, x: np.ndarray, y: np.ndarray) -> tuple[Any, LabelledSamples]:
    graph, features = graphs_of(store, own.spec)
    model = own.spec.model
    return graph, inputs_of(Samples(x, y, model.mean, model.std, model.targets), features)


def right(store: DeviceStore, own: OwnModel, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    logits_of, inputs = own.answers(*featured(store, own, x, y))
    labels = inputs.y  # a label of a class that the model does not know is never right
    correct: np.ndarray = logits_of(own.params, inputs.x).argmax(1) == labels
    return correct


def right_alone(store: DeviceStore, own: OwnModel, board: Board, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    _, mine = featured(store, own, board.x, board.y)
    head = alone_head_of(mine, int(board.y.max()) + 1)
    _, test = featured(store, own, x, y)
    correct: np.ndarray = own_logits(head, inputs_of_own(test).x).argmax(1) == y
    return correct


@pytest.fixture
def year(tmp_path: Path) -> Iterator[Year]:
    with start_broker("mosquitto", data_dir=tmp_path / "broker") as broker:
        year = Year(tmp_path, broker.port)
        try:
            yield year
        finally:
            year.close()
            print("\n".join(year.table))
            for board in year.boards.values():
                print(board.name, (board.folder / "client.log").read_text()[-1500:] if board.folder.exists() else "")


@pytest.mark.needs("mosquitto")
def test_after_no_event_does_a_board_predict_worse_than_alone_or_than_before(year: Year, tmp_path: Path) -> None:
    digits = load("digits")
    x, y = (
        np.concatenate(each) for each in ((digits.train.images, digits.test.images), (digits.train.y, digits.test.y))
    )
    order = np.random.default_rng(5).permutation(len(y))
    x, y = x[order], y[order].astype(np.int64)
    old, new = np.flatnonzero(y < 9), np.flatnonzero(y == 9)
    for place, name in enumerate(BOARDS):
        mine = old[place * IMAGES : (place + 1) * IMAGES]
        folder = tmp_path / name
        folder.mkdir()
        year.boards[name] = Board(name, folder, x[:0], y[:0])
        year.boards[name].has(x[mine], y[mine])
        limit = "17.0" if name == "poor" else "inf"
        (folder / "device.toml").write_text(
            f'[device]\nid = "{name}"\nstate_dir = "state"\n[broker]\nurl = "mqtt://127.0.0.1:{year.port}"\n[data]\n'
            f'kind = "arrays"\npath = "train.npz"\n[limits]\nepsilon_server = {limit}\naccounting = "as-published"\n'
        )
    test = old[len(BOARDS) * IMAGES :]
    common = x[test], y[test]
    first = ("early", "killed", "third", "poor", "off")

    year.begin("autumn", 9)
    for name in first:
        year.boards[name].start()
    year.close_round(1)
    year.boards["killed"].kill()  # perhaps before its head was chosen
    year.until_chosen(1, ("early", "third", "poor", "off"))
    year.check("first task, round 1", *common, ("early", "third", "poor", "off"))
    year.boards["killed"].start()
    year.until_chosen(1, ("killed",))
    year.check("first task, killed at the close of round 1", *common, ("killed",))
    year.close_round(2)
    year.until_chosen(2, first)
    year.check("first task, round 2", *common, first)
    year.boards["late"].start()
    year.until_chosen(2, ("late",))
    year.check("first task, a board that came after round 2", *common, ("late",))
    year.close_round(3)
    year.until_chosen(3, BOARDS)
    year.check("first task, its end", *common, BOARDS)

    year.boards["off"].kill()
    there = ("early", "killed", "third", "poor", "late")
    year.begin("winter", 9)
    for number in (1, 2, 3):
        if number == 1:
            year.until(lambda: year.present() >= len(there), "all")
            year.check("second task without start, before its first round", *common, there)
        year.close_round(number)
        year.until_chosen(number, there)
        year.check(f"second task without start, round {number}", *common, there)
        if number == 1:
            year.boards["off"].start()
            year.until_chosen(1, ("off",))
            year.check("second task, a board that was off until round 1", *common, ("off",))
            there = (*there, "off")
    with year.boards["poor"].store() as store:
        assert not store.ledger.entries("winter-1"), "it has paid nothing for the second task"

    for place, name in enumerate(BOARDS):
        mine = new[4 * place : 4 * place + 4]
        board = year.boards[name]
        board.kill()
        board.has(np.concatenate([board.x, x[mine]]), np.concatenate([board.y, y[mine]]))
    test = np.concatenate([test, new[4 * len(BOARDS) :]])
    common = x[test], y[test]
    year.begin("spring", 10, start=str(tmp_path / "runs" / "winter"))
    for name in BOARDS:
        year.boards[name].start()
    year.until_chosen(0, BOARDS)
    year.check("third task with start and a new class, before its first round", *common, BOARDS)
    for number in (1, 2, 3):
        year.close_round(number)
        year.until_chosen(number, BOARDS)
        year.check(f"third task with start and a new class, round {number}", *common, BOARDS)
