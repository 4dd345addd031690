"""Simulates a task whose rounds cost what its training makes of them, to know the controls of each round."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin
from hushfleet.wire.format.messages import RoundPlan


def simulated_controls(task: Task, *, data_dir: Path | None) -> dict[int, Mapping[str, float]]:
    """Simulates the task to its last round, for devices without a budget; returns the controls of each round's plan.

    Raises `BadInput` for a task without data.
    """
    task = replace(task, privacy=replace(task.privacy, budget=math.inf), round=replace(task.round, patience=0))
    controls: dict[int, Mapping[str, float]] = {}

    def note(plan: RoundPlan) -> None:
        controls[plan.round] = plan.controls

    with tempfile.TemporaryDirectory(prefix="audit-") as folder, Workers() as workers:
        simulation = begin(task, Path(folder) / "run", data_dir=data_dir)
        with EventLog(simulation.folder.events) as events:
            run_rounds(
                simulation, workers, events, evaluate_every=task.round.rounds + 1, evaluate_last=0, on_opened=note
            )
    return controls
