"""Jobs for workers after one of a run's rounds, device by device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun, loaded_run
from hushfleet.simulator.run_folder import Simulation


@dataclass(frozen=True)
class AfterRound:
    """A job for a worker: one device after a closed round of the run in the folder `path`."""

    path: Path
    runtime: str
    device: str
    round: int

    @property
    def run(self) -> LoadedRun:
        """Loaded once in each process."""
        return loaded_run(self.path, self.runtime)

    def published(self) -> np.ndarray:
        """Reads what the round ended with, float32: the global model, and the method's vectors behind it."""
        layout, vectors = self.run.spec.model.layout, self.run.method.server.vectors
        return Checkpoints(self.run.folder.aggregator, layout, vectors=vectors, durable=False).read(self.round)

    def global_params(self) -> np.ndarray:
        """The global model float32 `[d]` that the round ended with."""
        return self.run.method.split(self.published())[0]


def after_last_round(simulation: Simulation, devices: Iterable[str], *, runtime: str) -> list[AfterRound]:
    """A job for each of these devices."""
    with AggregatorStore(simulation.folder.aggregator, durable=False) as store:
        closed = store.last_closed_round
    path = simulation.folder.path.absolute()
    return [AfterRound(path, runtime, device, closed) for device in devices]
