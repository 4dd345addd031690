"""One model under one method, as a device would have it after its first contact: a configuration, data, a store.

Written by the benchmark, read by its children. Reading needs nothing but what a board has.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.config.spec import BlobRef, DropoutSpec, ModelSpec, PrivacySpec, TaskSpec, WireSpec
from hushfleet.edge_client.board.config import DeviceConfig, load_config
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.methods import make_method
from hushfleet.wire.format.messages import TaskNotice

if TYPE_CHECKING:
    from hushfleet.models import Model

DEVICE = "board"
ROUNDS = 1000  # more than are ever run

_PRIVACY = PrivacySpec("device", "strict", clip_norm=0.5, noise_multiplier=1.0, delta=1e-5)
_NO_PRIVACY = PrivacySpec("device", "strict", clip_norm=float("inf"), noise_multiplier=0.0, delta=1e-5)

_CONFIG = f"""\
[device]
id = "{DEVICE}"
state_dir = "state"
board = "raspberry-pi-4-4gb"

[broker]
url = "mqtt://localhost"

[data]
kind = "arrays"
path = "train.npz"

[limits]
epsilon_server = inf
"""


@dataclass(frozen=True)
class Case:
    """A folder with everything; `folder / "device.toml"` is what the client is started with."""

    folder: Path

    @property
    def config_path(self) -> Path:
        return self.folder / "device.toml"

    def config(self) -> DeviceConfig:
        return load_config(self.config_path)

    def spec(self) -> TaskSpec:
        return TaskSpec.from_bytes(self._package())

    def notice(self) -> TaskNotice:
        """What the aggregator announces."""
        ref = BlobRef.of(self._package())
        return TaskNotice(self.spec().task, ref.digest, ref.size, 0)

    def initial(self) -> np.ndarray:
        """The first global model, float32 `[d]`."""
        return np.load(self.folder / "initial.npy")

    def _package(self) -> bytes:
        return (self.folder / "task.bin").read_bytes()


def write_case(folder: Path, model: Model, method: str, *, batch: int, samples: int) -> Case:
    """:param samples: how many random images the device has; it trains on each twice a round, in batches of `batch`."""
    from hushfleet.models.export import export_graphs

    layout, channels = model.layout, model.input_shape[0]
    config = {"batch_size": batch, "local_epochs": 2}  # some methods give the head an epoch, then the rest
    privacy = _NO_PRIVACY if method == "fedavg" else _PRIVACY
    objective = make_method(method, config, privacy, layout, rounds=ROUNDS).objective
    graphs = export_graphs(model, objective=objective)
    spec = TaskSpec(
        task=f"board-{model.name}",
        rounds=ROUNDS,
        method=method,
        method_config=config,
        privacy=privacy,
        wire=WireSpec(),
        model=ModelSpec(
            name=model.name,
            layout=layout,
            input_shape=model.input_shape,
            class_names=tuple(f"class-{index}" for index in range(model.classes)),
            mean=(0.5,) * channels,
            std=(0.25,) * channels,
            dropout=tuple(DropoutSpec(tuple(drop.shape), drop.rate) for drop in model.dropout),
            gradient=BlobRef.of(graphs.gradient),
            inference=BlobRef.of(graphs.inference),
        ),
        memory_mib=64,
    )
    folder.mkdir(parents=True)
    package, case = spec.to_bytes(), Case(folder)
    case.config_path.write_text(_CONFIG)
    (folder / "task.bin").write_bytes(package)
    np.save(folder / "initial.npy", model.init(0))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (samples, *model.input_shape), dtype=np.uint8)
    np.savez(folder / "train.npz", images=images, labels=rng.integers(0, model.classes, samples))
    with DeviceStore(case.config().store_path, device=DEVICE) as store:
        for blob in (package, graphs.gradient, graphs.inference):
            store.put_blob(hashlib.sha256(blob).digest(), blob)
    return case
