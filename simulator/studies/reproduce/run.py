"""Runs cells, each in its own process: if one is interrupted, fails or dies, the others continue."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from multiprocessing import connection
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

import psutil

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.results.rerun import commit, input_digests, versions
from hushfleet.aggregator.results.result import Details, write_whole
from hushfleet.errors import HushfleetError
from hushfleet.methods.papers.dp_fedsim import LARGEST_STRETCH
from hushfleet.models.cuda import sees_cuda
from hushfleet.simulator.engines.fast.device import store_of
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.local_only import train_local_only
from hushfleet.simulator.engines.fast.next_models import next_models_accuracy
from hushfleet.simulator.engines.fast.personalized_heads import choose_personalized_heads
from hushfleet.simulator.engines.fast.runtimes import VMAP, quickest
from hushfleet.simulator.engines.fast.workers import Workers, begin_worker, inherited
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin, go_on
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import Kept, KeptCell, View, rounded
from hushfleet.simulator.studies.reproduce.recipe import Metric

MEMORY_EACH = 2 << 30
"""Bytes that a process of a cell may take: the data set, a worker's images, a cohort's updates."""
TIMED_ROUNDS = 4
"""Number of rounds that are run to measure their time; the first does not count."""
RUN = "run"
_LOG = "log.txt"
_MEASURED = "measured.json"
_POLL_S = 0.2
_ACCURACIES = [metric for metric in get_args(Metric) if metric.startswith("accuracy_")]


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result; its folder stays."""

    error: str


def run_cell(cell: Cell, folder: Path, *, data_dir: Path | None, runtime: str = "", workers: int = 1) -> KeptCell:
    """Runs a cell, or continues an interrupted run in `folder`. Raises `HushfleetError`.

    :param workers: number of processes; with one, everything runs in this process.
    """
    if cell.metric == "round_time":
        return _run_times(cell, folder, data_dir=data_dir, runtime=runtime)
    task, run = cell.task(), RunFolder(folder / RUN)
    measured: dict[str, Any] = {"next_local": {}, "processor_s": 0.0, "epochs": cell.epochs}
    if (file := run.path / _MEASURED).exists():
        measured |= json.loads(file.read_text())
    same = run.task.exists() and load_task(run.task) == task and measured["epochs"] == cell.epochs
    if run.path.exists() and not same:
        shutil.rmtree(run.path)  # it was interrupted before it was complete, or recipe or code have changed since
        return run_cell(cell, folder, data_dir=data_dir, runtime=runtime, workers=workers)
    simulation = go_on(run.path, data_dir=data_dir) if run.task.exists() else begin(task, run.path, data_dir=data_dir)
    runtime = runtime or (VMAP if cell.group.gpu else quickest(task.model.name))
    if cell.row.alone:
        return _run_local_only(cell, simulation, runtime=runtime, workers=workers)
    # Personalized models are tested only if a table needs it, because tests can take longer than training.
    every, last = task.round.rounds, cell.evaluate_last
    next_local, before_s = measured["next_local"], measured["processor_s"] - time.process_time()
    with Workers(workers) as pool, EventLog(run.events) as events:

        def on_closed(round: int) -> None:
            if cell.metric == "accuracy_next_local" and round > every - last and str(round) not in next_local:
                next_local[str(round)] = next_models_accuracy(simulation, pool, round, runtime=runtime)
            measured["processor_s"] = before_s + pool.processor_s()
            write_whole(file, json.dumps(measured))

        run_rounds(
            simulation, pool, events, runtime=runtime, evaluate_every=every, evaluate_last=last, on_closed=on_closed
        )  # fmt: skip
        choose_personalized_heads(simulation, pool, runtime=runtime)
        seconds = _computing_s(run.events) if cell.group.gpu else before_s + pool.processor_s()
    result = assemble(simulation, engine="fast")
    accuracies = {name: [getattr(row, name, None) for row in result.rounds] for name in _ACCURACIES}
    accuracies["accuracy_next_local"] = [next_local.get(str(row.round)) for row in result.rounds]

    def noised(of: str) -> list[float]:
        spent = [(getattr(row, f"noised_{of}"), getattr(row, f"epsilon_{of}")) for row in result.privacy]
        return [whole if noised is None else noised for noised, whole in spent] or [math.inf]

    idle = [0.0] * (len(simulation.fleet.devices) - len(result.privacy)) if result.privacy else []
    return _kept(
        cell,
        simulation,
        accuracies,
        epsilons=(max(noised("server")), max(noised("release"))),
        seconds=seconds,
        runtime=runtime,
        noise_multiplier=result.noise_multiplier,
        rounds=len(result.rounds),
        uplink_bytes=sum(row.uplink_bytes for row in result.rounds),
        epsilon_server_median=median(noised("server") + idle),
        largest_stretch=_largest_stretch(simulation),
        by_round=_by_round(result.details),
    )


def _by_round(details: Details) -> dict[View, list[float]]:
    """Returns `KeptCell.by_round` of the rounds so far."""
    views: dict[View, tuple[list[list[float | None]], Callable[..., float]]] = {
        "server": (details.epsilon_server, max),
        "release": (details.epsilon_release, max),
        "median": (details.epsilon_server, median),
    }
    return {
        view: [float(f"{of([0.0 if each is None else each for each in row]):.6g}") for row in table]
        for view, (table, of) in views.items()
    }


def _largest_stretch(simulation: Simulation) -> float | None:
    """Returns DP-FedSim's largest T_s / b of all devices; None if the method has no such thresholds."""
    found = list[float]()
    for name in simulation.took_part:
        with store_of(simulation.folder, name) as store:
            state = store.load_state(simulation.prepared.spec.task)
        found += [] if state is None else map(float, state.private.get(LARGEST_STRETCH, ()))
    return max(found, default=None)


def _run_local_only(cell: Cell, simulation: Simulation, *, runtime: str, workers: int) -> KeptCell:
    """Trains each device alone, without rounds. Nothing leaves the devices, so no privacy is spent."""
    began = time.process_time()
    with Workers(workers) as pool:
        alone = list(train_local_only(simulation, pool, runtime=runtime))
        seconds = pool.processor_s() - began
    accuracies = {
        "accuracy_own_common": [fmean(each.accuracy_common for each in alone)],
        "accuracy_own_local": [fmean(each.accuracy_local for each in alone)],
    }
    return _kept(cell, simulation, accuracies, epsilons=(0.0, 0.0), seconds=seconds, runtime=runtime)


class _Paused(Exception):
    """Stops the rounds of a run, which can be continued."""


def _run_times(cell: Cell, folder: Path, *, data_dir: Path | None, runtime: str) -> KeptCell:
    """Measures the cell's round time divided by the first row's round time; their rounds alternate in this process.

    Separate runs could compare a busy machine with an idle one. The first round does not count: a method that needs a
    device's personalized model has none yet. Models are not tested.
    """
    clock = time.perf_counter if cell.group.gpu else time.process_time
    shutil.rmtree(folder / RUN, ignore_errors=True)
    both = (cell, replace(cell, row=cell.recipe.rows[0]))
    tested = [begin(each.task(), folder / RUN / str(at), data_dir=data_dir) for at, each in enumerate(both)]
    begun = [replace(each, prepared=replace(each.prepared, evaluate_global=None)) for each in tested]
    runtime = runtime or (VMAP if cell.group.gpu else quickest(cell.task().model.name))
    began, seconds = clock(), [0.0, 0.0]
    with Workers(1) as pool:
        for last in range(1, min(cell.rounds, TIMED_ROUNDS) + 1):
            for at, simulation in enumerate(begun):
                spent = _one_round(simulation, pool, last, clock, runtime)
                seconds[at] += spent if last > 1 else 0.0
    ratio, none = {"round_time": [seconds[0] / seconds[1]]}, (math.inf, math.inf)
    return _kept(cell, begun[0], ratio, epsilons=none, seconds=clock() - began, runtime=runtime)


def _one_round(simulation: Simulation, pool: Workers, last: int, clock: Callable[[], float], runtime: str) -> float:
    """Runs the next round, which has the number `last`, without tests. Returns its seconds."""
    marks: list[float] = []

    def on_closed(round: int) -> None:
        marks.append(clock())
        if round == last:
            raise _Paused

    with EventLog(simulation.folder.events) as events, suppress(_Paused):
        every = simulation.task.round.rounds + 1
        run_rounds(
            simulation, pool, events, runtime=runtime, evaluate_every=every, evaluate_last=0, on_closed=on_closed
        )  # fmt: skip
    return marks[-1] - marks[0]


def _kept(
    cell: Cell,
    simulation: Simulation,
    accuracies: Mapping[str, Sequence[float | None]],
    *,
    epsilons: tuple[float, float],
    seconds: float,
    runtime: str,
    **of_rounds: Any,
) -> KeptCell:
    """Makes the record of a cell.

    :param epsilons: against the server, and of the release.
    :param of_rounds: other fields; a cell that runs no rounds of its own has the defaults.
    """
    return KeptCell(
        cell=cell.key,
        digest=cell.digest,
        epochs=cell.epochs,
        quick=cell.quick,
        task=cell.plain,
        accuracies={name: [rounded(value) for value in values] for name, values in accuracies.items()},
        epsilon_server=epsilons[0],
        epsilon_release=epsilons[1],
        seconds=round(seconds, 1),
        runtime=runtime,
        processor=processor(runtime),
        versions=versions(),
        commit=commit(),
        digests=input_digests(simulation.prepared),
        **of_rounds,
    )


def _computing_s(events: Path) -> float:
    """Returns the seconds of all parts of an interrupted run, without the pauses between them, from the event log."""
    times = [(event["at"], event["event"]) for event in iterate_events(events)]
    return sum(at - before for (before, _), (at, kind) in pairwise(times) if kind != "run")


@dataclass(frozen=True)
class Shares:
    """The division of the cores: cells at a time, and processes per cell (several if cells are fewer than cores)."""

    jobs: int
    workers: int

    @classmethod
    def of(cls, cells: int, asked: int = 0) -> Shares:
        """:param asked: cells at a time, if the user sets it. A process takes a core, and must fit in free memory."""
        fitting = psutil.virtual_memory().available // MEMORY_EACH
        processes = max(1, min(len(os.sched_getaffinity(0)), fitting))
        jobs = min(asked or processes, max(1, cells))
        return cls(jobs, max(1, processes // jobs))

    @property
    def processes(self) -> int:
        return self.jobs * self.workers


def run_cells(
    cells: Sequence[Cell],
    kept: Kept,
    *,
    runs: Path,
    shares: Shares,
    data_dir: Path | None,
    runtime: str = "",
    watch: Callable[[Sequence[tuple[Cell, int]]], None] = lambda _: None,
) -> Iterator[tuple[Cell, KeptCell | Failure]]:
    """Runs cells that are not finished yet. Each result is stored at once, and the cell's run folder is then deleted.

    :param runs: the folder that has the run folders of cells that are running or interrupted.
    :param watch: called several times a second with the running cells and how many of their rounds are closed.
    """
    waiting, under_way = deque(cells), dict[object, _Process]()
    try:
        while waiting or under_way:
            while waiting and len(under_way) < shares.jobs:
                cell = waiting.popleft()
                started = _Process(cell, runs, data_dir, runtime, shares.workers)
                under_way[started.receiver] = started
            for ready in connection.wait([each.receiver for each in under_way.values()], timeout=_POLL_S):
                ended = under_way.pop(ready)
                yield ended.cell, ended.outcome(kept)
            watch([(each.cell, each.rounds_done) for each in under_way.values()])
    finally:
        for each in under_way.values():
            each.process.kill()  # every round is a checkpoint, and a run survives a kill
            each.process.join()


class _Process:
    """A cell in its process."""

    def __init__(self, cell: Cell, runs: Path, data_dir: Path | None, runtime: str, workers: int) -> None:
        self.cell, self.folder = cell, runs / cell.key
        context = multiprocessing.get_context("spawn")
        self.receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_run_apart, args=(sender, cell, self.folder, data_dir, runtime, workers))
        with inherited():
            self.process.start()
        sender.close()

    @property
    def rounds_done(self) -> int:
        """The number of closed rounds, including those before an interruption."""
        events = RunFolder(self.folder / RUN).events
        return events.read_bytes().count(b'"event":"round_close"') if events.exists() else 0

    def outcome(self, kept: Kept) -> KeptCell | Failure:
        try:
            outcome: KeptCell | Failure = self.receiver.recv()
        except (EOFError, OSError):
            outcome = Failure(self._why())
        self.process.join()
        if isinstance(outcome, KeptCell):
            try:
                outcome.save(kept.out)
            except HushfleetError as error:
                return Failure(str(error))
            kept.add(outcome)
            shutil.rmtree(self.folder)
        return outcome

    def _why(self) -> str:
        self.process.join()
        code, log = self.process.exitcode or 0, self.folder / _LOG
        lines = log.read_text(errors="replace").split("\n") if log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}: {last} (all of it: {log})"


def _run_apart(
    sender: connection.Connection, cell: Cell, folder: Path, data_dir: Path | None, runtime: str, workers: int
) -> None:
    """Runs a cell; called in the cell's own process."""
    begin_worker()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOG).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        sender.send(run_cell(cell, folder, data_dir=data_dir, runtime=runtime, workers=workers))
    except HushfleetError as error:
        sender.send(Failure(str(error)))


@cache
def processor(runtime: str) -> str:
    """Returns the name of this machine's processor, if the system tells it, and of its GPU if the runtime uses it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    if runtime != VMAP or not sees_cuda():
        return name
    import torch

    return f"{name}, {torch.cuda.get_device_name()}"
