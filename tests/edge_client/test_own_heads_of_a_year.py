"""Three tasks with real client processes behind a real broker: after each event no board predicts worse than before.

Boards that are there from the start, killed at the close of a round, late, without budget for the second task; a second
task without `start`, a third one with `start` and one more class. After each event the model by which `predict` answers
is within 2 points of the better of two others, on hundreds of images that no board has: a head from the own images
alone, and the model that answered before the event. Noise is drawn from a seed, so that each run has the same result.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.aggregator.broker.process import start_broker
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.aggregator.rounds.coordinator import Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.identity_file import load_or_create, next_epoch
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.data.samples import LabelledSamples, Samples, inputs_of
from hushfleet.data.sets import load
from hushfleet.edge_client.agent import Agent
from hushfleet.edge_client.board.config import load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker import loaded_task
from hushfleet.edge_client.worker.in_process import InProcess
from hushfleet.edge_client.worker.personalized_model import PersonalizedModel, personalized_model
from hushfleet.edge_client.worker.predict import graphs_of
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.learning.personalized_head import features_of, local_only_head_of, own_logits
from hushfleet.wire.link.address import BrokerAddress
from hushfleet.wire.link.mqtt import MqttLink

pytestmark = pytest.mark.slow

ROUNDS, IMAGES, NEW_IMAGES, PATIENCE_S = 3, 24, 4, 240.0
BOARDS = ("early", "killed", "third", "poor", "off", "late")
WITHIN, WORST = 0.02, 0.08
"""How far the mean over boards, and one board, may be below: a board's 24 images choose its head with an error."""

CROWD = 14
"""More boards, in this process: in a fleet of six, each would know too much of its own images from the shared head."""


def seeded() -> SeededRandomness:
    """Noise from a seed, for each task and each board another one; called in place of `FieldRandomness`."""
    known = sys._getframe(1).f_locals
    return SeededRandomness(zlib.crc32(known["spec"].task.encode()), zlib.crc32(known["config"].device.id.encode()))


CLIENT = f"""
import sys, zlib
from hushfleet.edge_client.worker.randomness import SeededRandomness

{inspect.getsource(seeded)}
from hushfleet.edge_client import agent
from hushfleet.edge_client.worker import in_process, loaded_task
loaded_task.FieldRandomness, agent.ChildProcess = seeded, lambda features: in_process.InProcess()
from hushfleet.edge_client.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


class Gate(Rhythm):
    """Rounds open as far as the test allows."""

    allowed = 0

    def is_due(self) -> bool:
        last = self._store.last_round()
        return (0 if last is None else last.round) < self.allowed and super().is_due()


class Board:
    """A board's files, and its process.

    :param x: its images, and `y` their labels; the last ones are of the class that the third task adds.
    """

    def __init__(self, name: str, folder: Path, port: int, x: np.ndarray, y: np.ndarray) -> None:
        self.name, self.folder, self._all = name, folder, (x, y)
        self.process: subprocess.Popen[bytes] | None = None
        self.before: np.ndarray | None = None
        """Which of the test images were classified correctly before the event."""
        folder.mkdir()
        self._has(IMAGES)
        (folder / "device.toml").write_text(
            f'[device]\nid = "{name}"\nstate_dir = "state"\nallow_volatile_state = true\n'
            f'[broker]\nurl = "mqtt://127.0.0.1:{port}"\n[data]\n'
            'kind = "arrays"\npath = "train.npz"\n[limits]\nepsilon_server = inf\naccounting = "as-published"\n'
        )

    def has_new_class(self) -> None:
        self._has(IMAGES + NEW_IMAGES)

    def _has(self, count: int) -> None:
        self.x, self.y = (each[:count] for each in self._all)
        np.savez(self.folder / "train.npz", images=self.x, labels=self.y)
        os.utime(self.folder / "train.npz", (time.time() - 600 + count,) * 2)

    def start(self) -> None:
        command = [sys.executable, "-c", CLIENT, "run", str(self.folder / "device.toml")]
        with (self.folder / "client.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def spend_no_more(self) -> None:
        """The owner's limit is what is spent."""
        self.kill()
        with self.store() as store:
            spent = store.ledger.epsilon_server(delta=1e-5)
        file = self.folder / "device.toml"
        file.write_text(file.read_text().replace("= inf", f"= {spent + 0.1}"))
        self.start()

    def store(self) -> DeviceStore:
        return DeviceStore(self.folder / "state" / "store.sqlite", device=self.name, inspect=True)

    def model(self) -> PersonalizedModel | None:
        if not (self.folder / "state" / "store.sqlite").exists():
            return None
        with self.store() as store:
            return personalized_model(store) if store.personalized_models() else None


class Year:
    def __init__(self, folder: Path, port: int, test: tuple[np.ndarray, np.ndarray]) -> None:
        """:param test: images and labels that no board has."""
        self.folder, self.port, self.test = folder, port, test
        self.boards: dict[str, Board] = {}
        self.crowd: list[Agent] = []
        self.coordinator: Coordinator | None = None
        self.gate: Gate | None = None
        self.table: list[str] = []
        self._open: list[Any] = []

    def join(self, board: Board) -> None:
        """A board of the crowd."""
        config, address = (
            load_config(board.folder / "device.toml"),
            BrokerAddress.parse(f"mqtt://127.0.0.1:{self.port}"),
        )
        store = DeviceStore(config.store_path, device=board.name, durable=False)
        connect = lambda will: MqttLink(address, client_id=board.name, will=will)  # noqa: E731
        self.crowd.append(Agent(config, connect, store, workshop=InProcess()))
        self.crowd[-1].start()

    def begin(self, name: str, classes: int, **model: Any) -> None:
        """The aggregator's process for a task."""
        self.end()
        self.name, self.classes = name, classes
        task = parse_task(
            {
                "name": name,
                "model": {"name": "linear", "features": "filters", "directions": 48, **model},
                "method": {"name": "hush"},
                "privacy": {"accounting": "as-published", "epsilon": 3.5, "delta": 1e-5},
                "data": {
                    "name": "arrays",
                    "class_names": [f"digit-{each}" for each in range(classes)],
                    "input_shape": [1, 8, 8],
                    "values": "pixels",
                    "devices": len(BOARDS) + CROWD,
                },
                "round": {"rounds": ROUNDS, "min_devices": CROWD + 4},
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
        for agent in self.crowd:
            agent.close()
            agent.store.close()
        self.end()

    def until(self, done: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not done():
            assert self.coordinator is not None
            assert time.monotonic() < end, f"{self.name}: {what} did not come"
            for _ in range(5):
                self.coordinator.step(0.01)
                for agent in self.crowd:
                    agent.step(0.0)

    @property
    def closed(self) -> int:
        assert self.coordinator is not None
        return self.coordinator.engine.closed_rounds

    def present(self) -> int:
        assert self.coordinator is not None
        return sum(state == "ready" for state in self.coordinator.present.values())

    def until_present(self) -> None:
        running = CROWD + sum(board.process is not None for board in self.boards.values())
        self.until(lambda: self.present() >= running, f"{running} boards")

    def close_round(self, number: int) -> None:
        self.until_present()
        assert self.gate is not None
        self.gate.allowed = number
        self.until(lambda: self.closed >= number, f"round {number}")

    def until_chosen(self, round: int, names: tuple[str, ...]) -> None:
        def chosen(board: Board) -> bool:
            own = board.model()
            return own is not None and own.spec.task == f"{self.name}-1" and own.round == round

        self.until(lambda: all(chosen(self.boards[name]) for name in names), f"a head of round {round}")

    def check(self, event: str, names: tuple[str, ...]) -> None:
        """Compares what answers now with training alone and with what answered before."""
        rows, asked = [], self.test[1] < self.classes
        for name in names:
            board = self.boards[name]
            with board.store() as store:
                own = personalized_model(store)
                found, lone = right(store, own, *self.test), right_alone(store, own, board, *self.test)
            old, board.before = board.before, found
            rows.append([each[asked].mean() for each in (found, lone, lone if old is None else old)])
        now, alone, before = np.mean(rows, 0)
        worst = min(found - max(others) for found, *others in rows)
        self.table.append(
            f"{event:58} alone {100 * alone:5.1f}  before {100 * before:5.1f}  now {100 * now:5.1f}  "
            f"worst board {100 * worst:+5.1f}"
        )
        assert now >= max(alone, before) - WITHIN, "\n".join(self.table)
        assert worst >= -WORST, "\n".join(self.table)


def featured(store: DeviceStore, own: PersonalizedModel, x: np.ndarray, y: np.ndarray) -> tuple[Any, LabelledSamples]:
    graph, features = graphs_of(store, own.spec)
    features._cache = store.path.parents[2] / "features"  # the many images that no board has are shown again and again
    model = own.spec.model
    return graph, inputs_of(Samples(x, y, model.mean, model.std, model.targets), features)


def right(store: DeviceStore, own: PersonalizedModel, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    logits_of, inputs = own.answers(*featured(store, own, x, y))
    labels = inputs.y  # a label of a class that the model does not know is never right
    correct: np.ndarray = logits_of(own.params, inputs.x).argmax(1) == labels
    return correct


def right_alone(store: DeviceStore, own: PersonalizedModel, board: Board, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    _, mine = featured(store, own, board.x, board.y)
    head = local_only_head_of(mine, int(board.y.max()) + 1)
    _, test = featured(store, own, x, y)
    correct: np.ndarray = own_logits(head, features_of(test)).argmax(1) == y
    return correct


@pytest.fixture
def year(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Year]:
    """Boards with images of nine classes each, and more images of the tenth for the third task."""
    digits = load("digits")
    x = np.concatenate((digits.train.images, digits.test.images))
    y = np.concatenate((digits.train.y, digits.test.y)).astype(np.int64)
    order = np.random.default_rng(5).permutation(len(y))
    old, new = (order[part] for part in (y[order] < 9, y[order] == 9))
    names = (*BOARDS, *(f"crowd-{place}" for place in range(CROWD)))
    test = np.concatenate((old[len(names) * IMAGES :], new[len(names) * NEW_IMAGES :]))
    monkeypatch.setattr(loaded_task, "FieldRandomness", seeded)
    with start_broker("mosquitto", data_dir=tmp_path / "broker") as broker:
        year = Year(tmp_path, broker.port, (x[test], y[test]))
        for place, name in enumerate(names):
            mine = np.concatenate((old[place * IMAGES :][:IMAGES], new[place * NEW_IMAGES :][:NEW_IMAGES]))
            board = Board(name, tmp_path / name, broker.port, x[mine], y[mine])
            if name in BOARDS:
                year.boards[name] = board
            else:
                year.join(board)
        try:
            yield year
        finally:
            year.close()
            print("\n".join(year.table))
            for log in sorted(tmp_path.glob("*/client.log")):
                print(log.parent.name, log.read_text()[-1500:])


@pytest.mark.needs("mosquitto")
def test_after_no_event_does_a_board_predict_worse_than_alone_or_than_before(year: Year) -> None:
    first = ("early", "killed", "third", "poor", "off")

    year.begin("autumn", 9)
    for name in first:
        year.boards[name].start()
    year.close_round(1)
    year.boards["killed"].kill()  # perhaps before its head was chosen
    year.until_chosen(1, ("early", "third", "poor", "off"))
    year.check("first task, round 1", ("early", "third", "poor", "off"))
    year.boards["killed"].start()
    year.until_chosen(1, ("killed",))
    year.check("first task, killed at the close of round 1", ("killed",))
    year.close_round(2)
    year.until_chosen(2, first)
    year.check("first task, round 2", first)
    year.boards["late"].start()
    year.until_chosen(2, ("late",))
    year.check("first task, a board that came after round 2", ("late",))
    year.close_round(3)
    year.until_chosen(3, BOARDS)
    year.check("first task, its end", BOARDS)

    year.boards["off"].kill()
    year.boards["poor"].spend_no_more()
    there = ("early", "killed", "third", "poor", "late")
    year.begin("winter", 9)
    for number in (1, 2, 3):
        if number == 1:
            year.until_present()
            year.check("second task without start, before its first round", there)
        year.close_round(number)
        year.until_chosen(number, there)
        year.check(f"second task without start, round {number}", there)
        if number == 1:
            year.boards["off"].start()
            year.until_chosen(1, ("off",))
            year.check("second task, a board that was off until round 1", ("off",))
            there = (*there, "off")
    with year.boards["poor"].store() as store:
        assert not store.ledger.entries("winter-1"), "it has paid nothing for the second task"

    for name in BOARDS:
        year.boards[name].kill()
        year.boards[name].has_new_class()
    year.begin("spring", 10, start=str(year.folder / "runs" / "winter"))
    for name in BOARDS:
        year.boards[name].start()
    year.until_chosen(0, BOARDS)
    year.check("third task with start and a new class, before its first round", BOARDS)
    for number in (1, 2, 3):
        year.close_round(number)
        year.until_chosen(number, BOARDS)
        year.check(f"third task with start and a new class, round {number}", BOARDS)
