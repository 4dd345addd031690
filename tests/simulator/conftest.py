"""A short simulation, runs of it by both engines, and the audit that every run has to pass."""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from chaos.audit import check_stores, check_tap, models_of
from chaos.tap import Tap
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.privacy.ledger import LedgerEntry
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin, go_on
from hushfleet.simulator.world.live import LiveFleet
from support.methods import with_norms

DEVICES = 5
ROUNDS = 3
PATIENCE_S = 240.0  # of a machine that does other things too


def make_task(**sections: dict[str, Any] | int) -> Task:
    """FedGLP-ADP on few digits; `sections` change single keys of its sections, or the seed."""
    plain: dict[str, Any] = {
        "name": "short",
        "seed": 7,
        "model": {"name": "digits-cnn"},
        "method": {"name": "fedglp-adp", "learning_rate": 0.005, "local_epochs": 1},
        "privacy": {"accounting": "as-published", "clip_norm": 2.0, "noise_multiplier": 0.3},
        "data": {
            "name": "digits",
            "devices": DEVICES,
            "partition": "dirichlet-class",
            "alpha": 1.0,
            "limit": 400,
            "min_samples": 20,
        },
        # Whoever is killed is waited for, so that every run has the same participants.
        "round": {"rounds": ROUNDS, "min_updates": DEVICES, "deadline_s": 600},
        # Several chunks for each update.
        "wire": {"chunk_bytes": 1024},
    }
    for name, value in sections.items():
        plain[name] = {**plain.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_task(with_norms(plain))


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


def wait_until(condition: Callable[[], Any], what: str, *, logs: Callable[[], str] = lambda: "") -> Any:
    """The condition's first true value; fails with the logs when it never comes."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        value = condition()
        if value:
            return value
        time.sleep(0.004)
    pytest.fail(f"in {PATIENCE_S:g} s it did not happen that {what}\n{logs()}")


@pytest.fixture(scope="session")
def wait() -> Callable[..., Any]:
    return wait_until


@pytest.fixture
def tap() -> Iterator[Tap]:
    tap = Tap()
    yield tap
    tap.close()


def ledger_of(simulation: Simulation, device: str) -> list[LedgerEntry]:
    if not simulation.folder.has_store(device):
        return []  # it has never taken part
    with store_of(simulation.folder, device) as store:
        return store.ledger.entries()


def logs_of(simulation: Simulation, lines: int = 12) -> str:
    """The ends of all logs of a live run, for a failure's text."""
    folder, out = simulation.folder, []
    paths = [folder.path / "aggregator.log", folder.events, folder.path / "broker" / "broker.log"]
    for path in [*paths, *(folder.device(device.name).log for device in simulation.fleet.devices)]:
        if path.exists():
            out.append(f"--- {path.relative_to(folder.path)}")
            out += [line[:200] for line in path.read_text(errors="replace").splitlines()[-lines:]]
    return "\n".join(out)


class Audit:
    """`chaos.audit`, as assertions."""

    logs = staticmethod(logs_of)
    models = staticmethod(models_of)
    ledger = staticmethod(ledger_of)

    def events(self, simulation: Simulation, kind: str) -> list[dict[str, Any]]:
        return [event for event in iterate_events(simulation.folder.events) if event["event"] == kind]

    def check(self, simulation: Simulation) -> None:
        assert check_stores(simulation) == []

    def check_tap(self, simulation: Simulation, tap: Tap) -> None:
        assert check_tap(simulation, tap) == []
        charged = {
            (device.name, entry.payload_digest)
            for device in simulation.fleet.devices
            for entry in ledger_of(simulation, device.name)
        }
        assert tap.unfinished <= charged


@pytest.fixture(scope="module")
def fast(task: Task, runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Simulation:
    """The run of a module's task by the fast engine."""
    return runs.fast(begin(task, tmp_path_factory.mktemp("fast") / "run", data_dir=None))


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


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO())
