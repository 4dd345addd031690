"""Makes real updates of a small federation by the product's own engine, for any codec and any device name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.simulator.cohort_store import CohortStore
from hushfleet.simulator.engines.fast.chunks import Client, ClientChunk, trainer_for
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.runtimes import quickest
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.wire.format.codecs import steps_for
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import WireSpec
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import EncodedUpdate, encode_update

IDENTITY = Identity.from_bytes(bytes(32))


@dataclass(frozen=True, eq=False)
class Update:
    """An update just before a device sends it.

    :param values: float32 `[k]`, clipped and noised: the shared parameters.
    :param counts: how many of the values belong to each layer.
    :param size: number of parameters of the whole model, d.
    """

    header: UpdateHeader
    values: np.ndarray
    counts: tuple[int, ...]
    size: int

    @property
    def noised(self) -> bool:
        return any(self.header.noise_stds)

    @property
    def rms(self) -> list[float]:
        """Root mean square of each layer's values; 0 for a layer without values."""
        layers = np.split(self.values.astype(np.float64), np.cumsum(self.counts)[:-1])
        return [float(np.sqrt(np.square(layer).mean())) if layer.size else 0.0 for layer in layers]

    def header_for(self, wire: WireSpec, **changes: Any) -> UpdateHeader:
        steps = steps_for(wire, noise_stds=self.header.noise_stds, layer_rms=self.rms)
        return replace(self.header, codec=wire.codec, steps=tuple(steps), **changes)

    def encoded(self, wire: WireSpec, **changes: Any) -> EncodedUpdate:
        """Returns the whole blob, signed by `IDENTITY`."""
        return encode_update(self.header_for(wire, **changes), self.values, counts=self.counts, identity=IDENTITY)


def train(
    simulation: Simulation,
    *,
    processes: int = 1,
    runtime: str | None = None,
    on_opened: Callable[[RoundPlan], None] = lambda plan: None,
    evaluate_last: int = 0,
) -> None:
    """Runs all rounds, without tests of accuracy but after the last round.

    :param on_opened: called with each round's plan, before any device trains.
    :param evaluate_last: 1 to test the devices' personalized models too.
    """
    with Workers(processes) as workers, EventLog(simulation.folder.events) as events:
        runtime, every = runtime or quickest(simulation.task.model.name), simulation.task.round.rounds
        each: dict[str, Any] = {"evaluate_every": every, "evaluate_last": evaluate_last, "on_opened": on_opened}
        run_rounds(simulation, workers, events, runtime=runtime, **each)


def train_update(task: Task, folder: Path, *, data_dir: Path | None) -> tuple[Simulation, Update]:
    """Trains a federation, and returns it with the first device's update of the last round.

    The task's codec must be `float32`, which changes no value.
    """
    simulation = begin(task, folder, data_dir=data_dir)
    simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
    device, found = simulation.fleet.devices[0], list[Update]()

    def keep(header: UpdateHeader, values: np.ndarray, *, counts: Sequence[int], **by: Any) -> EncodedUpdate:
        found.append(Update(header, values.copy(), tuple(counts), simulation.prepared.spec.model.layout.size))
        return encode_update(header, values, counts=counts, **by)

    def train_first(plan: RoundPlan) -> None:
        """Trains the device once more than the engine will: the bits are the same."""
        if plan.round < task.round.rounds:
            return
        carried = CohortStore.read(simulation.folder.cohort).carried(device.index)
        client = Client(device.name, device.index, device.epsilon_limit, device.preference, carried)
        chunk = ClientChunk(folder.absolute(), quickest(task.model.name), plan, task.seed, [client], evaluate=False)
        trainer = trainer_for(chunk, client, None)
        trainer.encode = keep
        DeviceRound(trainer, plan).run(chunk.run.global_params(plan))

    train(simulation, on_opened=train_first)
    return simulation, found[0]
