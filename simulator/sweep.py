"""Repeats a run at other noise, by the fast engine or under the virtual clock, to measure the cost of privacy.

A run shows whether federating is worth it at its own noise; a sweep shows up to how much noise the gain remains. Each
point is a separate run in `sweep/`, so an interrupted sweep continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.gains import common_test
from hushfleet.aggregator.results.result import Result, SeedPoint, SweepPoint, last_measured, last_metrics
from hushfleet.progress import counted
from hushfleet.simulator.engines import RoundsRunner
from hushfleet.simulator.engines.fast.local_only import DeviceLocalOnly
from hushfleet.simulator.engines.fast.personalized_heads import choose_personalized_heads
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.options import tasks_at
from hushfleet.simulator.results import assemble, mean_of, with_baseline
from hushfleet.simulator.run_folder import RunFolder, Simulation, repeated


def sweep_noise(
    simulation: Simulation,
    workers: WorkerPool,
    multipliers: Sequence[float],
    local_only_models: Sequence[DeviceLocalOnly],
    *,
    runtime: str = "onnx",
    rounds: RoundsRunner,
) -> Iterator[SweepPoint]:
    """Yields one point for each multiplier, in ascending order.

    :param rounds: runs the rounds of a point as those of the run itself.
    """
    tasks = tasks_at(simulation.task, multipliers, clocked=True)
    for multiplier, task in counted(tasks.items(), "the same run at other noise", total=len(tasks)):
        result = _run_with(simulation, workers, task, f"noise-{multiplier:g}", runtime, rounds=rounds)
        yield noise_point(with_baseline(result, local_only_models))


def with_sweep(result: Result, points: Sequence[SweepPoint]) -> Result:
    """Adds the points of a sweep to the result; the run itself is one of them."""
    if not points:
        return result
    own = noise_point(result)
    others = [point for point in points if point.noise_multiplier != own.noise_multiplier]
    sweep = sorted([own, *others], key=lambda point: point.noise_multiplier)
    return result.with_details(privacy_sweep=sweep)


def with_seeds(result: Result, others: Sequence[Result]) -> Result:
    """Returns the result with a point for itself and for each of its repetitions with other seeds."""
    points = [seed_point(each) for each in (result, *others)]
    return result.with_details(seeds=points)


def seed_point(result: Result) -> SeedPoint:
    """Makes the point of a run among several seeds."""
    assert result.seed is not None  # a simulation always has one
    local_only = result.local_only
    return SeedPoint(
        seed=result.seed,
        local_only_common=local_only.accuracy_own_common,
        local_only_local=local_only.accuracy_own_local,
        metrics=last_metrics(result.rounds),
        metrics_own={name: mean_of(values) for name, values in result.details.metrics_own.items()},
        **_reached(result),
    )


def noise_point(result: Result) -> SweepPoint:
    """Makes the point of a run in a sweep over noise."""
    return SweepPoint(
        noise_multiplier=result.noise_multiplier,
        epsilon_server=max((row.epsilon_server for row in result.privacy), default=0.0),
        epsilon_release=max((row.epsilon_release for row in result.privacy), default=0.0),
        **_reached(result),
    )


def _reached(result: Result) -> dict[str, float | None]:
    """Returns the last measured accuracies, and the gain over training alone if that was measured."""
    gain, names = common_test(result).gain, ("accuracy_own_common", "accuracy_own_local", "accuracy_global")
    spread = {} if gain is None else {"gain_over_local_only": gain.mean, "gain_standard_error": gain.standard_error}
    return {name: last_measured(result.rounds, attrgetter(name)) for name in names} | spread


def _run_with(
    simulation: Simulation, workers: WorkerPool, task: Task, name: str, runtime: str, *, rounds: RoundsRunner
) -> Result:
    """Returns the result of the run in `sweep/NAME`, which is started, continued, or already finished."""
    folder = RunFolder(simulation.folder.path / "sweep" / name)
    if folder.result.exists():
        return Result.load(folder.result)
    point = repeated(simulation, task, folder)
    every = 1 if task.round.patience else task.round.rounds  # with patience any round may be the last one
    rounds(point, evaluate_every=every)
    choose_personalized_heads(point, workers, runtime=runtime)
    result = assemble(point, engine="fast")
    result.save(folder.result)
    return result
