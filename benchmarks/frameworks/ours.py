"""Runs Hushfleet's own fast engine through its public functions: trainer, ledger, store and round engine.

Values are rounded as by the codec; updates are not signed, and only a sample of values is encoded, to count bytes.

    python -m benchmarks.frameworks.ours FOLDER RUNTIME PROCESSES RUN_FOLDER DATA_DIR

A round has no accuracy tests, as on all sides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.frameworks.workload import ROUNDS, Enough, HeldRounds, TrainingJob, Workload
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin

PACKAGES = ("hushfleet", "numpy", "onnxruntime", "torch")


def task_of(workload: Workload) -> Task:
    """Returns the workload as a task."""
    method = {
        "name": workload.method,
        "optimizer": workload.optimizer,
        "learning_rate": workload.learning_rate,
        "batch_size": workload.batch_size,
        "local_epochs": workload.epochs,
    }
    # Strict: each device adds the whole noise, as the other frameworks' local mechanisms do.
    accounting = "secure" if workload.secure else "strict"
    multiplier = workload.noise_multiplier if workload.secure else workload.noise_std / workload.clip_norm
    privacy = {"accounting": accounting, "clip_norm": workload.clip_norm, "noise_multiplier": multiplier}
    data = {
        "name": workload.data,
        "devices": workload.clients,
        "limit": workload.clients * workload.samples,
        "test_fraction": 0.0,
        "min_samples": min(10, workload.samples),
    }
    model = {"name": "linear", "features": "scattering"} if workload.method == "hush" else {"name": workload.network}
    return parse_task(
        {
            "name": f"bench-{workload.name.lower()}",
            "seed": workload.seed,
            "model": model,
            "method": method,
            "privacy": privacy,
            "data": data,
            **({"wire": {"codec": "float32"}} if workload.central else {}),  # others add to the noise that is stated
            "round": {"rounds": ROUNDS, "cohort_size": workload.cohort},
        }
    )


class HeldLog(EventLog):
    """Pauses the engine between two rounds: the run's events show where a round ends."""

    def __init__(self, simulation: Simulation, epochs: int) -> None:
        super().__init__(simulation.folder.events)
        self._simulation = simulation
        self._trained_on = {device.name: len(device.train) * epochs for device in simulation.fleet.devices}
        self._samples, self._closed = 0, 0
        self._rounds = HeldRounds(self._global_params, PACKAGES)

    def write_many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        super().write_many(kind, rows)
        if kind == "update":
            self._samples += sum(self._trained_on[row["device"]] for row in rows)

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = super().write(kind, **fields)
        if kind == "round_close":
            self._closed = fields["round"]
            self._rounds.done(samples=self._samples)
            self._samples = 0
        if kind in ("run", "round_close") and not self._rounds.wait():
            raise Enough
        return event

    def _global_params(self) -> np.ndarray:
        folder, layout = self._simulation.folder.aggregator, self._simulation.prepared.spec.model.layout
        return Checkpoints(folder, layout, durable=False).read(self._closed)


def main() -> None:
    job, runtime, processes = TrainingJob.load(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    simulation = begin(task_of(job.workload), Path(sys.argv[4]), data_dir=Path(sys.argv[5]))
    first = {"evaluate_global": None, "initial": np.array(job.array("initial"))}
    simulation = replace(simulation, prepared=replace(simulation.prepared, **first))
    with Workers(processes) as workers, HeldLog(simulation, job.workload.epochs) as events:
        try:
            # The last round, in which devices' personalized models would be tested, is never reached.
            run_rounds(simulation, workers, events, runtime=runtime, evaluate_every=ROUNDS + 1)
        except Enough:
            return
    sys.exit(f"the engine ended after {ROUNDS} rounds, before the benchmark had enough")


if __name__ == "__main__":
    main()
