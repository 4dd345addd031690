"""What privacy costs: the same run at other noise multipliers, by the fast engine.

One run answers whether federating paid at its own noise; the privacy officer also wants to know how much noise the
gain would survive. Each point is a run of its own in `sweep/`, so an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from aggregator.events import EventLog
from aggregator.result import Result, SweepPoint
from hushfleet.task import Task
from simulator.fast import run_rounds
from simulator.local_only import Alone
from simulator.results import assemble
from simulator.run_folder import RunFolder, Simulation, begin, go_on
from simulator.workers import Crew


def sweep_noise(
    simulation: Simulation,
    workers: Crew,
    multipliers: Sequence[float],
    alone: Sequence[Alone],
    *,
    runtime: str = "onnx",
) -> Iterator[SweepPoint]:
    """One point for each multiplier, in rising order."""
    baseline = fmean(one.accuracy_common for one in alone) if alone else None
    for multiplier in sorted(set(multipliers)):
        result = _run_at(simulation, workers, multiplier, runtime)
        last = result.rounds[-1]
        gain = None if baseline is None else (last.accuracy_own_common or 0.0) - baseline
        yield SweepPoint(
            noise_multiplier=multiplier,
            epsilon_server=max(row.epsilon_server for row in result.privacy),
            epsilon_release=max(row.epsilon_release for row in result.privacy),
            accuracy_own_common=last.accuracy_own_common,
            accuracy_own_local=last.accuracy_own_local,
            accuracy_global=last.accuracy_global,
            gain_over_local_only=gain,
        )


def _run_at(simulation: Simulation, workers: Crew, multiplier: float, runtime: str) -> Result:
    folder = RunFolder(simulation.folder.path / "sweep" / f"noise-{multiplier:g}")
    if folder.result.exists():
        return Result.load(folder.result)
    if folder.task.exists():
        point = go_on(folder.path, data_dir=simulation.data_dir)
    else:
        task = _with_noise(simulation.task, multiplier)
        point = begin(task, folder.path, data_dir=simulation.data_dir, mix=simulation.mix)
    with EventLog(point.folder.events) as events:
        run_rounds(point, workers, events, runtime=runtime, evaluate_every=point.task.round.rounds)
    result = assemble(point, engine="fast")
    result.save(folder.result)
    return result


def _with_noise(task: Task, multiplier: float) -> Task:
    privacy = task.privacy.model_copy(update={"noise_multiplier": multiplier, "epsilon": None})
    return task.model_copy(update={"privacy": privacy})
