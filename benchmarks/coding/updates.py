"""Real updates to measure codecs on: small federations by the product's own trainer and round engine, real images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.versus.data import write_digits
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.observe.events import EventLog
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.config.spec import WireSpec
from hushfleet.data.sets import load
from hushfleet.edge_client.trainer import TrainedRound
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.fast.engine import deliver
from hushfleet.simulator.engines.fast.jobs import Answer, Job, device_of
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.runtimes import unavailable
from hushfleet.simulator.run_folder import Simulation, begin
from hushfleet.wire.format.forms import steps_for
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import EncodedUpdate, UpdateHeader, encode_update, read_header

NETWORKS = {
    "digits-cnn": ("digits", "digits"),
    "mnist-cnn": ("mnist", "mnist"),
    "fashion-mnist-cnn": ("fashion-mnist", "mnist"),
    "svhn-cnn": ("svhn", "cifar10"),
    "cifar10-cnn": ("cifar10", "cifar10"),
    "emnist-cnn": ("emnist", "mnist"),
}
"""The networks, the data set of each, and one of the same shape for where that is not there."""

METHODS: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"clip_norm": 1.0, "noise_multiplier": 0.1},
    "fedglp-adp": {"clip_norm": 1.0, "noise_multiplier": 0.1},
    "fedavg": {"noise_multiplier": 0.0},
}
"""The noise is weak, so that there is signal in the updates: that takes more bits than noise alone."""


class Images(NamedTuple):
    """A data set that is there.

    :param words: what it is, where it is not the network's own.
    """

    name: str
    data_dir: Path | None
    words: str


@dataclass(frozen=True, eq=False)
class Update:
    """An update as a device is about to send it, and everything to code it in any form.

    :param values: float32 `[k]`, clipped and noised: the shared parameters.
    :param size: d, of the whole model.
    :param counts: how many of the values belong to each layer.
    """

    method: str
    round: int
    header: UpdateHeader
    values: np.ndarray
    counts: tuple[int, ...]
    size: int

    @property
    def noised(self) -> bool:
        return any(self.header.noise_stds)

    @cached_property
    def rms(self) -> tuple[float, ...]:
        """Root mean square of each layer's values; 0 where there are none."""
        layers = np.split(self.values.astype(np.float64), np.cumsum(self.counts)[:-1])
        return tuple(float(np.sqrt(np.square(layer).mean())) if layer.size else 0.0 for layer in layers)

    def header_for(self, wire: WireSpec) -> UpdateHeader:
        steps = steps_for(wire, noise_stds=self.header.noise_stds, layer_rms=self.rms)
        return replace(self.header, codec=wire.codec, steps=steps)

    def encoded(self, wire: WireSpec, identity: Identity) -> EncodedUpdate:
        """The whole signed blob."""
        return encode_update(self.header_for(wire), self.values, counts=self.counts, identity=identity)


def find_images(network: str, data_dir: Path | None, folder: Path) -> Images:
    """The network's own data set; else one of its shape; else the digits of scikit-learn, upscaled.

    :param folder: for the digits as files.
    """
    own, like = NETWORKS[network]
    if own == "digits":
        return Images(own, None, "")
    if data_dir is not None:
        for name, words in ((own, ""), (like, f"{like} in place of {own}")):
            with contextlib.suppress(BadInput):
                load(name, data_dir=data_dir)
                return Images(name, data_dir, words)
    write_digits(folder, like, 1)
    return Images(like, folder, f"digits, upscaled, in place of {own}")


def task_of(network: str, images: Images, method: str, *, rounds: int, devices: int, samples: int) -> Task:
    """:param samples: of each device."""
    return parse_task(
        {
            "name": f"wire-{network}",
            "model": {"name": network},
            "method": {"name": method, "optimizer": "adam", "learning_rate": 1e-3, "batch_size": 16},
            "privacy": METHODS[method],
            "data": {"name": images.name, "devices": devices, "limit": devices * samples, "test_fraction": 0.0},
            "round": {"rounds": rounds},
            "wire": {"codec": "float32"},
        }
    )


def train_updates(task: Task, images: Images, folder: Path, *, at: Sequence[int]) -> list[Update]:
    """The first device's updates of the rounds `at`."""
    simulation = begin(task, folder, data_dir=images.data_dir)
    simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
    return [update for update in _federate(simulation) if update.round in at]


def _federate(simulation: Simulation) -> Iterator[Update]:
    """All rounds; the first device's updates."""
    runtime = "onnx" if unavailable("native", simulation.task.model.name) else "native"
    names = [device.name for device in simulation.fleet.devices]
    folder = simulation.folder
    with AggregatorStore(folder.aggregator, durable=False) as store, EventLog(folder.events) as events:
        engine = RoundEngine(store, simulation.prepared)
        while not engine.finished:
            plan = engine.open_round(names)
            for device in simulation.fleet.devices:
                job = Job(folder.path, runtime, device.name, device.index, simulation.seed, plan, evaluate=False)
                files, shown = loaded_run(folder.path, runtime), []
                with device_of(job, files) as trainer:
                    trainer.observer = shown.append
                    entry = trainer.run_round(plan, files.global_params(plan))
                    answer = Answer(job.device, trainer.store.identity.public_key, entry.data)
                deliver(answer, engine, plan, events)
                if device.index == 0:
                    yield _update(simulation, shown[0], read_header(entry.data))
            engine.close()


def _update(simulation: Simulation, trained: TrainedRound, header: UpdateHeader) -> Update:
    layout = simulation.prepared.spec.model.layout
    shared = ~trained.state.public.mask
    return Update(
        method=simulation.task.method.name,
        round=trained.round,
        header=header,
        values=np.ascontiguousarray(trained.release.values[shared], np.float32),
        counts=tuple(int(shared[layer.start : layer.stop].sum()) for layer in layout.layers),
        size=layout.size,
    )
