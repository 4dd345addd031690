"""The same run with one thing changed, by the fast engine: what privacy costs, and what bytes buy.

One run answers whether federating paid at its own noise; the privacy officer also wants to know how much noise the
gain would survive, and the field engineer how few bytes. Each point is a run of its own in `sweep/`, so an
interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.observe.events import EventLog
from hushfleet.aggregator.results.gains import common_test
from hushfleet.aggregator.results.result import Result, SweepPoint, WirePoint
from hushfleet.errors import BadInput
from hushfleet.progress import counted
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.local_only import Alone
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.own_heads import choose_own_heads
from hushfleet.simulator.results import assemble, with_baseline
from hushfleet.simulator.run_folder import RunFolder, Simulation, begin, go_on


def sweep_noise(
    simulation: Simulation,
    workers: WorkerPool,
    multipliers: Sequence[float],
    alone: Sequence[Alone],
    *,
    runtime: str = "onnx",
) -> Iterator[SweepPoint]:
    """One point for each multiplier, in rising order."""
    chosen = sorted(set(multipliers))
    for multiplier in counted(chosen, "the same run at other noise", total=len(chosen)):
        privacy = replace(simulation.task.privacy, noise_multiplier=multiplier, epsilon=None)
        task = replace(simulation.task, privacy=privacy)
        result = _run_with(simulation, workers, task, f"noise-{multiplier:g}", runtime)
        yield SweepPoint(
            noise_multiplier=multiplier,
            epsilon_server=max(row.epsilon_server for row in result.privacy),
            epsilon_release=max(row.epsilon_release for row in result.privacy),
            **_reached(result, alone),
        )


def sweep_wire(
    simulation: Simulation,
    workers: WorkerPool,
    choices: Sequence[str],
    alone: Sequence[Alone],
    *,
    runtime: str = "onnx",
) -> Iterator[WirePoint]:
    """One point for each choice of `with_wire`, in the order given. Noise, order and partition are the run's own, so
    points differ by the codec alone."""
    chosen = dict.fromkeys(choices)
    for choice in counted(chosen, "the same run with other codecs", total=len(chosen)):
        result = _run_with(simulation, workers, with_wire(simulation.task, choice), f"wire-{choice}", runtime)
        assert result.wire is not None  # the simulator writes it
        yield WirePoint(
            wire=result.wire,
            uplink_bytes=result.uplink_bytes,
            bits_per_value=result.bits_per_value,
            **_reached(result, alone),
        )


def with_wire(task: Task, choice: str) -> Task:
    """The task with another codec, or quantised with another step.

    :param choice: a codec's name, or a step: in units of the noise, or of a layer's root mean square in a task whose
        updates carry none.

    Raises `BadInput`.
    """
    unit = "step" if task.noises_updates else "relative_step"
    try:
        changes: dict[str, Any] = {"codec": "quantized", unit: float(choice)}
    except ValueError:
        changes = {"codec": choice}
    plain = task.to_plain()
    plain["wire"] |= changes
    try:
        return parse_task(plain, where="the task")
    except BadInput as error:
        raise BadInput(f"{choice!r} is neither a quantisation step nor a codec here: {error}") from error


def own_point(result: Result) -> SweepPoint:
    """The run itself among the points of its sweep."""
    gain = common_test(result).gain
    return SweepPoint(
        noise_multiplier=result.noise_multiplier,
        epsilon_server=max(row.epsilon_server for row in result.privacy),
        epsilon_release=max(row.epsilon_release for row in result.privacy),
        **_accuracies(result),
        gain_over_local_only=None if gain is None else gain.mean,
        gain_standard_error=None if gain is None else gain.standard_error,
    )


def _reached(result: Result, alone: Sequence[Alone]) -> dict[str, float | None]:
    """The accuracies of a point, and its gain over training alone where that was measured."""
    gain = common_test(with_baseline(result, alone)).gain
    spread = {} if gain is None else {"gain_over_local_only": gain.mean, "gain_standard_error": gain.standard_error}
    return _accuracies(result) | spread


def _accuracies(result: Result) -> dict[str, float | None]:
    last = result.rounds[-1]
    names = ("accuracy_own_common", "accuracy_own_local", "accuracy_global")
    return {name: getattr(last, name) for name in names}


def _run_with(simulation: Simulation, workers: WorkerPool, task: Task, name: str, runtime: str) -> Result:
    """The result of the run in `sweep/NAME`, which is begun, gone on with, or there already."""
    folder = RunFolder(simulation.folder.path / "sweep" / name)
    if folder.result.exists():
        return Result.load(folder.result)
    if folder.task.exists():
        point = go_on(folder.path, data_dir=simulation.data_dir)
    else:
        point = begin(task, folder.path, data_dir=simulation.data_dir, mix=simulation.mix)
    with EventLog(point.folder.events) as events:
        run_rounds(point, workers, events, runtime=runtime, evaluate_every=point.task.round.rounds)
    choose_own_heads(point, workers, runtime=runtime)
    result = assemble(point, engine="fast")
    result.save(folder.result)
    return result
