"""A short simulation, runs of it by both engines, and the audit that every run has to pass."""

from __future__ import annotations

import hashlib
import io
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import paho.mqtt.client as mqtt
import pytest
from rich.console import Console

from aggregator.events import EventLog, read_events
from aggregator.store import AggregatorStore
from edge_client.store import DeviceStore
from hushfleet.privacy.ledger import LedgerEntry
from hushfleet.task import Task, parse_task
from hushfleet.wire.chunks import Assembler, parse_frame
from hushfleet.wire.topics import Topics
from hushfleet.wire.update import payload_digest, read_header
from simulator.director import Director
from simulator.fast import run_rounds
from simulator.live import LiveFleet
from simulator.run_folder import RunFolder, Simulation, begin, go_on
from simulator.workers import Workers

DEVICES = 8
ROUNDS = 3
PATIENCE_S = 240.0  # of a machine that does other things too


def make_task(**sections: dict[str, Any] | int) -> Task:
    """FedGLP-ADP on few digits; `sections` change single keys of its sections, or the seed."""
    plain: dict[str, Any] = {
        "name": "short",
        "seed": 7,
        "model": {"name": "digits-cnn"},
        "method": {"name": "fedglp-adp", "learning_rate": 0.005, "local_epochs": 1},
        "privacy": {"clip_norm": 2.0, "noise_multiplier": 0.3},
        "data": {
            "name": "digits",
            "devices": DEVICES,
            "partition": "dirichlet-class",
            "alpha": 1.0,
            "limit": 640,
            "min_samples": 20,
        },
        # Whoever is killed is waited for, so that every run has the same participants.
        "round": {"rounds": ROUNDS, "min_updates": DEVICES, "deadline_s": 600},
        # Several chunks for each update.
        "wire": {"chunk_bytes": 1024},
    }
    for name, value in sections.items():
        plain[name] = {**plain[name], **value} if isinstance(value, dict) else value
    return parse_task(plain)


@pytest.fixture(scope="session")
def short_task() -> Callable[..., Task]:
    return make_task


class Runs:
    """The short simulation, prepared once; each test works on a copy of its folder."""

    def __init__(self, folder: Path) -> None:
        self._prepared = begin(make_task(), folder, data_dir=None)

    def copy(self, folder: Path) -> Simulation:
        shutil.copytree(self._prepared.folder.path, folder)
        return replace(self._prepared, folder=RunFolder(folder))

    @staticmethod
    def fast(simulation: Simulation, *, workers: int = 1, runtime: str = "onnx") -> Simulation:
        """Runs the rounds, or those that are left."""
        with Workers(workers) as pool, EventLog(simulation.folder.events) as events:
            run_rounds(simulation, pool, events, runtime=runtime)
        return simulation

    @staticmethod
    def again(simulation: Simulation) -> Simulation:
        return go_on(simulation.folder.path, data_dir=None)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("short") / "prepared")


@pytest.fixture(scope="session")
def calm(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """Run by the fast engine without any trouble. Tests only read it."""
    return runs.fast(runs.copy(tmp_path_factory.mktemp("calm") / "run"))


def models_of(simulation: Simulation) -> dict[str, str]:
    """File name -> SHA-256 of every global model that is kept."""
    files = sorted(simulation.folder.aggregator.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def ledger_of(simulation: Simulation, device: str) -> list[LedgerEntry]:
    with DeviceStore(simulation.folder.device(device).store, device=device, inspect=True) as store:
        return store.ledger.entries()


def wait_until(condition: Callable[[], Any], what: str, *, logs: Callable[[], str] = lambda: "") -> Any:
    """The condition's first true value; fails with the logs when it never comes."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        value = condition()
        if value:
            return value
        time.sleep(0.004)
    pytest.fail(f"in {PATIENCE_S:g} s it did not happen that {what}\n{logs()}")


def logs_of(simulation: Simulation, lines: int = 12) -> str:
    """The ends of all logs of a live run, for a failure's text."""
    folder, out = simulation.folder, io.StringIO()
    paths = [folder.path / "aggregator.log", folder.events, folder.path / "broker" / "broker.log"]
    for path in [*paths, *(folder.device(device.name).log for device in simulation.fleet.devices)]:
        if path.exists():
            out.write(f"--- {path.relative_to(folder.path)}\n")
            for line in path.read_text(errors="replace").splitlines()[-lines:]:
                out.write(f"{line[:200]}\n")
    return out.getvalue()


@pytest.fixture(scope="session")
def wait() -> Callable[..., Any]:
    return wait_until


@dataclass(frozen=True)
class Transfer:
    """One update blob that passed the broker, whole."""

    device: str
    round: int
    digest: bytes
    payload: bytes


class Tap:
    """A subscriber that reassembles every update that passes the broker.

    After a restart of the broker it must be attached again, for the broker has forgotten it.
    """

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.errors: list[tuple[str, bytes, Exception]] = []
        self._open: dict[tuple[str, bytes], Assembler] = {}
        self._client: mqtt.Client | None = None
        self._topics = Topics("default")
        self._lock = threading.Lock()

    @property
    def unfinished(self) -> set[tuple[str, bytes]]:
        """(device, digest) of blobs of which chunks are missing."""
        return set(self._open)

    def attach(self, url: str) -> None:
        self.close()
        subscribed = threading.Event()
        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id="tap")
        client.on_message = self._on_message
        client.on_subscribe = lambda *_: subscribed.set()
        address = urlsplit(url)
        client.connect(address.hostname or "", address.port or 1883)
        client.subscribe(self._topics.all_chunks, qos=1)
        client.loop_start()
        self._client = client
        assert subscribed.wait(PATIENCE_S), "the broker gave no answer"

    def close(self) -> None:
        if self._client is not None:
            self._client.disconnect()
            self._client.loop_stop()
            self._client = None

    def _on_message(self, client: mqtt.Client, data: Any, message: mqtt.MQTTMessage) -> None:
        try:
            with self._lock:
                self._add(message.topic, message.payload)
        except Exception as error:
            self.errors.append((message.topic, message.payload[:16], error))

    def _add(self, topic: str, payload: bytes) -> None:
        parsed = self._topics.parse(topic)
        if parsed.kind != "chunk" or parsed.device is None:
            return  # amqtt hands a new client retained messages that others have subscribed
        device, chunk = parsed.device, parse_frame(payload)
        key = (device, chunk.digest)
        assembler = self._open.setdefault(key, Assembler(chunk.digest, chunk.size))
        assembler.add(chunk)
        if assembler.complete:
            blob = self._open.pop(key).blob()
            header = read_header(blob)
            assert header.device == device
            self.transfers.append(Transfer(device, header.round, chunk.digest, payload_digest(blob)))


@pytest.fixture
def tap() -> Iterator[Tap]:
    tap = Tap()
    yield tap
    tap.close()


class Audit:
    """What must hold after any run, whatever happened in it."""

    def logs(self, simulation: Simulation) -> str:
        return logs_of(simulation)

    def models(self, simulation: Simulation) -> dict[str, str]:
        return models_of(simulation)

    def ledger(self, simulation: Simulation, device: str) -> list[LedgerEntry]:
        return ledger_of(simulation, device)

    def events(self, simulation: Simulation, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(simulation.folder.events)[0] if event["event"] == kind]

    def check(self, simulation: Simulation) -> None:
        """Every update counted once, every round charged once, and what was counted is what was charged."""
        names = [device.name for device in simulation.fleet.devices]
        rounds = list(range(1, simulation.task.round.rounds + 1))
        task = simulation.prepared.spec.task
        with AggregatorStore(simulation.folder.aggregator) as store:
            rows = store.rounds()
            accepted = {(r, u.device): u for r in rounds for u in store.updates(r)}
            charges = {(c.round, c.device): c for c in store.charges()}
        assert [(row.round, row.phase) for row in rows] == [(r, "closed") for r in rounds]
        assert [(row.metrics or {})["participants"] for row in rows] == [len(names)] * len(rounds)
        everything = {(r, name) for r in rounds for name in names}
        assert set(accepted) == everything
        assert set(charges) == everything
        for name in names:
            entries = ledger_of(simulation, name)
            assert [(entry.task, entry.round) for entry in entries] == [(task, r) for r in rounds]
            for entry in entries:
                assert accepted[entry.round, name].digest == entry.payload_digest
                charge = charges[entry.round, name]
                assert charge.device_rounds == entry.round
                assert charge.noise_multiplier == entry.charge.noise_multiplier

    def check_tap(self, simulation: Simulation, tap: Tap) -> None:
        """Whatever left a device was charged before, and of each round only one noising ever left."""
        assert tap.errors == []
        assert tap.transfers, "the tap saw nothing"
        charged = {
            (device.name, entry.round): entry.payload_digest
            for device in simulation.fleet.devices
            for entry in ledger_of(simulation, device.name)
        }
        payloads = defaultdict(set)
        for transfer in tap.transfers:
            assert charged[transfer.device, transfer.round] == transfer.digest
            payloads[transfer.device, transfer.round].add(transfer.payload)
        assert [key for key, seen in payloads.items() if len(seen) > 1] == []
        assert tap.unfinished <= {(device, digest) for (device, _), digest in charged.items()}


@pytest.fixture(scope="session")
def audit() -> Audit:
    return Audit()


@pytest.fixture(scope="session")
def finish() -> Callable[[LiveFleet], None]:
    """Waits until a live fleet has finished; what dies unexpectedly, or never ends, fails with all logs."""

    def finish(fleet: LiveFleet) -> None:
        def done() -> bool:
            fleet.check()
            return fleet.finished

        wait_until(done, "the run finished", logs=lambda: logs_of(fleet.simulation))
        fleet.wait()

    return finish


@pytest.fixture(scope="session")
def direct() -> Callable[[LiveFleet, Director], None]:
    """The same for a fleet that is led through a scenario."""

    def direct(fleet: LiveFleet, director: Director) -> None:
        def done() -> bool:
            director.tick(fleet)
            fleet.check()
            return fleet.finished

        wait_until(done, "the run finished", logs=lambda: logs_of(fleet.simulation))
        director.direct(fleet)

    return direct


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO())
