"""Makes real updates of a small federation by the product's own engine, for any codec and any device name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.simulator.engines.fast.device_file import store_of
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.runtimes import quickest
from hushfleet.simulator.engines.fast.uncoded import UncodedUpdates
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.wire.format.codecs import steps_for
from hushfleet.wire.format.identity import Identity
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
    log: Callable[[Path], EventLog] = EventLog,
    evaluate_last: int = 0,
) -> None:
    """Runs all rounds, without tests of accuracy but after the last round.

    :param evaluate_last: 1 to test the devices' personalized models too.
    """
    with Workers(processes) as workers, log(simulation.folder.events) as events:
        runtime, every = runtime or quickest(simulation.task.model.name), simulation.task.round.rounds
        run_rounds(simulation, workers, events, runtime=runtime, evaluate_every=every, evaluate_last=evaluate_last)


def train_update(task: Task, folder: Path, *, data_dir: Path | None) -> tuple[Simulation, Update]:
    """Trains a federation, and returns it with the first device's update of the last round.

    The task's codec must be `float32`, which changes no value.
    """
    simulation = begin(task, folder, data_dir=data_dir)
    simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
    name, spec, last = simulation.fleet.devices[0].name, simulation.prepared.spec, task.round.rounds
    found: list[Update] = []

    class UpdateLog(EventLog):
        """Keeps the update when it arrives: its values are removed at the end of the run."""

        def write(self, kind: str, **fields: Any) -> dict[str, Any]:
            if (kind, fields.get("round"), fields.get("device")) == ("update", last, name):
                with store_of(simulation.folder.device(name), name) as store:
                    data = store.outbox(spec.task, last).data
                updates, counts = UncodedUpdates(simulation.folder.updates), tuple(fields["shared"])
                header, _ = updates.authenticate(data, public_key=b"")
                values = updates.values(header, data, counts=counts)
                found.append(Update(header, values, counts, spec.model.layout.size))
            return super().write(kind, **fields)

    train(simulation, log=UpdateLog)
    return simulation, found[0]
