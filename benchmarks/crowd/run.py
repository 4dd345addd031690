"""One live run: a real broker, a real aggregator, and generator processes in the place of the boards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.crowd.certificates import make_certificates
from benchmarks.crowd.generator import DESCRIPTORS_A_DEVICE
from benchmarks.crowd.processes import Meter, Usage, need_descriptors
from hushfleet.aggregator.broker.child import dies_with_parent
from hushfleet.aggregator.observe.events import EventTail, iterate_events
from hushfleet.errors import HushfleetError
from hushfleet.simulator.engines.live.engine import LiveFleet
from hushfleet.simulator.run_folder import Simulation

PATIENCE_S = 180.0
_TICK_S = 0.05
KILL_AT = {"broker": 1 / 3, "aggregator": 2 / 3}  # of the cohort accepted


@dataclass
class Progress:
    """Where the run stands, by the aggregator's event log."""

    present: int = 0
    round: int = 0
    accepted: int = 0
    closed: int = 0

    def apply(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "presence":
            self.present += 1 if event["state"] == "ready" else 0
        elif kind == "round_open":
            self.round, self.accepted = event["round"], 0
        elif kind == "update":
            self.accepted += event["code"] == "accepted"
        elif kind == "round_close":
            self.closed = event["round"]

    def is_at(self, round: int, accepted: float) -> bool:
        """This round is open, and has so many updates or more."""
        return self.round == round > self.closed and self.accepted >= accepted


@dataclass
class Live:
    """What a run leaves for the figures, beside its folder. Times are unix seconds.

    :param began_at: the aggregator is there, and the generators are started.
    :param diaries: the generators' files.
    :param killed: (name, when) of what was killed.
    """

    began_at: float
    ended_at: float = 0.0
    diaries: list[Path] = field(default_factory=list)
    usages: dict[str, Usage] = field(default_factory=dict)
    killed: list[tuple[str, float]] = field(default_factory=list)


def run_live(
    simulation: Simulation,
    *,
    generators: int,
    tls: bool,
    kill: Sequence[str],
    kill_round: int,
    show: Callable[[Progress], None],
) -> Live:
    """Runs the task to its end. Raises `HushfleetError` where something ends that should not, or nothing happens.

    :param tls: mutual, with a certificate for each device.
    :param kill: of `KILL_AT`: killed in the middle of `kill_round`, and started again.
    """
    names = [device.name for device in simulation.fleet.devices]
    need_descriptors(DESCRIPTORS_A_DEVICE * -(-len(names) // generators) + 100)
    folder = simulation.folder.path / "certificates"
    fleet = LiveFleet(simulation, absent=names, tls=make_certificates(folder, devices=names) if tls else None)
    live = Live(time.time())
    processes: dict[str, subprocess.Popen[bytes]] = {}

    def pids() -> dict[str, int]:
        found = {name: process.pid for name, process in processes.items()}
        if fleet.is_running("aggregator"):
            found["aggregator"] = fleet.pid("aggregator")
        if fleet.broker is not None and fleet.broker.is_running:
            found["broker"] = fleet.broker.pid
        return found

    try:
        with fleet.running(), Meter(pids) as meter:
            configs = [simulation.folder.device(name).path / "device.toml" for name in names]
            for name, config in zip(names, configs, strict=True):
                config.write_text(fleet.device_config(name))
            _wait_for_aggregator(fleet)
            live.began_at = time.time()
            for number in range(generators):
                diary = simulation.folder.path / f"generator-{number}.jsonl"
                live.diaries.append(diary)
                processes[f"generator {number}"] = _start_generator(diary, configs[number::generators])
            _watch(fleet, processes, live, kill=list(kill), kill_round=kill_round, show=show)
            live.ended_at = time.time()
            for name, process in processes.items():
                _check_ended(name, process.wait(PATIENCE_S), simulation)
        live.usages = meter.usages
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return live


def _wait_for_aggregator(fleet: LiveFleet) -> None:
    """So that the time until all are present is the devices', not that of loading PyTorch."""
    while not any(event["event"] == "run" for event in iterate_events(fleet.simulation.folder.events)):
        fleet.check()
        time.sleep(_TICK_S)


def _start_generator(diary: Path, configs: list[Path]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",  # else hundreds of threads have a heap each
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "benchmarks.crowd.generator", str(diary), *map(str, configs)]
    with diary.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            dies_with_parent(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )


def _watch(
    fleet: LiveFleet,
    processes: dict[str, subprocess.Popen[bytes]],
    live: Live,
    *,
    kill: list[str],
    kill_round: int,
    show: Callable[[Progress], None],
) -> None:
    tail, progress, heard_at = EventTail(fleet.simulation.folder.events), Progress(), time.monotonic()
    while not fleet.finished:
        events = tail.read()
        for event in events:
            progress.apply(event)
        show(progress)
        if events:
            heard_at = time.monotonic()
        elif time.monotonic() - heard_at > PATIENCE_S:
            raise HushfleetError(f"nothing has happened for {PATIENCE_S:g} s: {progress}")
        for name in [name for name in kill if progress.is_at(kill_round, KILL_AT[name] * len(fleet.devices))]:
            kill.remove(name)
            live.killed.append((name, time.time()))
            fleet.expected_down.add(name)
            fleet.kill(name)
            fleet.start_again(name)
        fleet.check()
        for name, process in processes.items():
            if process.poll() not in (None, 0):
                _check_ended(name, process.returncode, fleet.simulation)
        time.sleep(_TICK_S)


def _check_ended(name: str, status: int, simulation: Simulation) -> None:
    if status:
        log = simulation.folder.path / f"{name.replace(' ', '-')}.log"
        raise HushfleetError(f"{name} ended with status {status}; the end of its log:\n{log.read_text()[-2000:]}")
