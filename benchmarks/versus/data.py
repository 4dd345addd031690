"""The data of a comparison, written once: what the product's engine reads, and the same as arrays for the others."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from benchmarks.contenders.job import Job
from benchmarks.contenders.ours import task_of
from benchmarks.versus.workloads import CLIP_NORM, Workload
from hushfleet.data.cifar import TEST_BATCHES, TRAIN_BATCHES
from hushfleet.data.samples import DataSet
from hushfleet.data.sets import load
from hushfleet.models import get_model
from hushfleet.simulator.fleet import make_fleet

CHECK_IMAGES = 1000
SEED = 1
MANY_ROUNDS = 1000
"""A run is begun as a long one, which is what throughput matters for, and left when enough is measured."""


class Data:
    """Data sets by name: from the files in `data_dir`, or without it the digits of scikit-learn, upscaled.

    :param folder: for the digits as files, and for the decoded copy of CIFAR-10.
    """

    def __init__(self, data_dir: Path | None, folder: Path) -> None:
        # The product keeps the decoded CIFAR-10 in the user's cache; a benchmark's belongs into its own folder.
        os.environ["XDG_CACHE_HOME"] = str(folder.absolute() / "cache")
        self.real = data_dir is not None
        self.data_dir = data_dir.absolute() if data_dir else folder.absolute() / "digits"
        self._sets: dict[str, DataSet] = {}

    @property
    def text(self) -> str:
        return "real images" if self.real else "digits of scikit-learn, upscaled and repeated"

    def get(self, name: str, *, samples: int) -> DataSet:
        """The set, with at least so many training samples."""
        if not self.real:
            write_digits(self.data_dir, name, samples)
            return load(name, data_dir=self.data_dir)
        if name not in self._sets:
            self._sets[name] = load(name, data_dir=self.data_dir)
        return self._sets[name]


def write_job(workload: Workload, data: Data, folder: Path, *, noise_multiplier: float, device: str) -> Job:
    """Deals the data to the clients as the product does, and writes what all contenders read."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {field.name for field in fields(Job)} & {field.name for field in fields(Workload)}
    job = Job(
        **{name: value for name, value in asdict(workload).items() if name in shared},
        clip_norm=CLIP_NORM,
        noise_multiplier=noise_multiplier,
        rounds=MANY_ROUNDS,
        device=device,
        seed=SEED,
        folder=str(folder.absolute()),
    )
    dataset = data.get(workload.data_set, samples=workload.clients * workload.samples)
    fleet = make_fleet(task_of(job), dataset)
    clients = [device.train.samples for device in fleet.devices]
    test = dataset.test.take(slice(0, CHECK_IMAGES))
    arrays = {
        "x": np.concatenate([client.x for client in clients]),
        "y": np.concatenate([client.y for client in clients]),
        "test_x": test.x,
        "test_y": test.y,
        "initial": get_model(job.network).init(job.seed),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    job.save()
    return job


def write_digits(folder: Path, name: str, samples: int) -> None:
    """The 1,797 digits of scikit-learn in the shape and the file format of another set, repeated to `samples`.

    :param name: `mnist` (1 x 28 x 28, IDX files) or `cifar10` (3 x 32 x 32, Python batches).
    """
    digits = load("digits")
    parts = []
    for part, count in ((digits.train, max(samples, len(digits.train))), (digits.test, len(digits.test))):
        chosen = np.resize(np.arange(len(part)), count)
        factor, margin = (3, 2) if name == "mnist" else (4, 0)
        images = np.pad(part.images.repeat(factor, 2).repeat(factor, 3), ((0, 0), (0, 0), (margin,) * 2, (margin,) * 2))
        parts.append((images[chosen], part.labels[chosen]))
    place = folder / name
    (write_idx if name == "mnist" else _write_batches)(place, *parts)


Part = tuple[np.ndarray, np.ndarray]


def write_idx(place: Path, train: Part, test: Part) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for prefix, (images, labels) in (("train", train), ("t10k", test)):
        pixels = images[:, 0]
        header = struct.pack(">HBB3I", 0, 8, 3, *pixels.shape)
        (place / f"{prefix}-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
        header = struct.pack(">HBBI", 0, 8, 1, len(labels))
        (place / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def _write_batches(place: Path, train: Part, test: Part) -> None:
    batches = place / "cifar-10-batches-py"
    batches.mkdir(parents=True, exist_ok=True)
    for names, (images, labels) in ((TRAIN_BATCHES, train), (TEST_BATCHES, test)):
        colour = np.repeat(images, 3, axis=1).reshape(len(images), -1)
        for number, name in enumerate(names):
            share = slice(number, None, len(names))
            content = {"data": colour[share], "labels": labels[share].tolist()}
            (batches / name).write_bytes(pickle.dumps(content))
