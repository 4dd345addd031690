"""Hushfleet's own fast engine, through its public functions: trainer, codec, ledger, store and round engine.

    python -m benchmarks.contenders.ours JOB.json RUNTIME PROCESSES FOLDER DATA_DIR

RUNTIME may be `auto`: the engine's own trial chooses, before the first round. Left out of a round are the tests of
accuracy, as for all contenders.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders.gate import Gate
from benchmarks.contenders.job import Job, job_and_options
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.observe.events import EventLog
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.runtime_choice import choose_runtime
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin

AUTO = "auto"
PACKAGES = ("hushfleet", "numpy", "onnxruntime", "torch")


def task_of(job: Job) -> Task:
    """The workload as a task file would say it."""
    return parse_task(
        {
            "name": f"bench-{job.name.lower()}",
            "seed": job.seed,
            "model": {"name": job.network},
            "method": {
                "name": "dp-fedavg",
                "optimizer": job.optimizer,
                "learning_rate": job.learning_rate,
                "batch_size": job.batch_size,
                "local_epochs": job.epochs,
            },
            # Strict: each device adds the whole noise, as the peers' local mechanisms do.
            "privacy": {
                "accounting": "strict",
                "clip_norm": job.clip_norm,
                "noise_multiplier": job.noise_multiplier,
            },
            "data": {
                "name": job.data_set,
                "devices": job.clients,
                "limit": job.clients * job.samples,
                "test_fraction": 0.0,
                "min_samples": min(10, job.samples),
            },
            "round": {"rounds": job.rounds, "cohort_size": job.cohort},
        }
    )


class Enough(Exception):
    """The benchmark wants no more rounds."""


class GatedLog(EventLog):
    """Holds the engine between two rounds: the run's events say where one ends."""

    def __init__(self, simulation: Simulation, epochs: int, about: Mapping[str, str]) -> None:
        super().__init__(simulation.folder.events)
        self._simulation = simulation
        self._trained_on = {device.name: len(device.train) * epochs for device in simulation.fleet.devices}
        self._samples, self._closed = 0, 0
        self._gate = Gate(self._global_params, PACKAGES, about)

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        event = super().write(kind, **fields)
        if kind == "update":
            self._samples += self._trained_on[fields["device"]]
        elif kind == "round_close":
            self._closed = fields["round"]
            self._gate.close(samples=self._samples)
            self._samples = 0
        if kind in ("run", "round_close") and not self._gate.open():
            raise Enough
        return event

    def _global_params(self) -> np.ndarray:
        folder, layout = self._simulation.folder.aggregator, self._simulation.prepared.spec.model.layout
        return Checkpoints(folder, layout, durable=False).read(self._closed)


def main() -> None:
    job, options = job_and_options()
    runtime, processes, folder, data_dir = options[0], int(options[1]), Path(options[2]), Path(options[3])
    simulation = begin(task_of(job), folder, data_dir=data_dir)
    simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
    with Workers(processes) as workers:
        about = {}
        if runtime == AUTO:
            trial = choose_runtime(simulation, workers)
            runtime, about = trial.runtime, {"trial": trial.shown()}
        with GatedLog(simulation, job.epochs, about) as events:
            try:
                # The last round, in which devices' own models would be tested, is never reached.
                run_rounds(simulation, workers, events, runtime=runtime, evaluate_every=job.rounds + 1)
            except Enough:
                return
    sys.exit(f"the engine ended after {job.rounds} rounds, before the benchmark had enough")


if __name__ == "__main__":
    main()
