"""Defines the jobs of workers after a closed round of a run: one job per device, alone or in groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.engines.fast.loaded_run import DeviceJob
from hushfleet.simulator.engines.fast.workers import Item, WorkerPool
from hushfleet.simulator.run_folder import Simulation

AT_ONCE = 25
"""Most devices in one group: what their models share, such as a converted batch of test images, is computed once."""


@dataclass(frozen=True)
class AfterRound(DeviceJob):
    """One device after a closed round."""

    round: int

    def published(self) -> np.ndarray:
        """Returns the result of the round, float32: the global model, followed by the method's vectors."""
        layout, vectors = self.run.spec.model.layout, self.run.method.server.vectors
        return Checkpoints(self.run.folder.aggregator, layout, vectors=vectors, durable=False).read(self.round)

    def global_params(self) -> np.ndarray:
        """Returns the global model float32 `[d]` after the round."""
        return self.run.method.split(self.published())[0]


def after_last_round(simulation: Simulation, devices: Iterable[str], *, runtime: str) -> list[AfterRound]:
    """Returns a job for each of these devices after the last closed round."""
    with AggregatorStore(simulation.folder.aggregator, durable=False) as store:
        closed = store.last_closed_round
    path = simulation.folder.path.absolute()
    return [AfterRound(path, runtime, device, closed) for device in devices]


def in_groups(jobs: Sequence[Item], workers: WorkerPool) -> list[Sequence[Item]]:
    """Divides the jobs of a test, in their order; each worker gets some."""
    size = min(AT_ONCE, math.ceil(len(jobs) / workers.count)) or 1
    return [jobs[first : first + size] for first in range(0, len(jobs), size)]
