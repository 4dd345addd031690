"""Defines the input of each side of a comparison: the same numbers, data, network and first model.

W1 has the shape of the personalization papers (few devices with much data), W2 the shape of FedAvg's own paper, and W3
the shape of many devices with little data each: all three with DP-FedAvg. W4 is the linear head of Hush on features
that are given, and W5 is FedPer, whose clients keep their last layer. W6 is DP-FedAvg with secure aggregation.
`benchmarks/simulation.py` writes the folder of a workload:

    workload.json    the fields of `Workload`
    x.npy, y.npy     float32 [n, ...] normalised images, or features, and int64 [n] labels, client after client
    initial.npy      float32 [d], the first global model: PyTorch's parameters in order, flattened
    cohorts.npy      int64 [rounds, cohort], the clients of each round; orders.npy int64 [rounds, cohort, samples], the
                     order of each one's samples in its only epoch (both for pfl's own benchmark alone)
    test_x.npy, test_y.npy   held-out images
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.processes import Parent, versions

CLIP_NORM = 1.0
ROUNDS = 1000
"""A run is started with many rounds and stopped after enough of them; frameworks need the number at the start."""


@dataclass(frozen=True)
class Workload:
    """One federation.

    :param samples: training samples of each client.
    :param cohort: clients in a round.
    :param turn: number of rounds that are measured together.
    :param noise_multiplier: each client's Gaussian noise has a standard deviation of this times `clip_norm` in every
        entry. The default gives almost no protection, but needs the same time as more noise; the model stays finite.
    :param device: `cpu` or `cuda`.
    :param method: `dp-fedavg`, `fedper` or `hush`.
    :param secure: whether the aggregator sees the sum of the updates alone, and clients divide the noise.
    :param central: whether the sum has one noise: a server adds it, or clients, without a server that they trust,
        divide it.
    :param data: the data set, with `network`, the product's name of what is trained on it.
    """

    name: str
    clients: int
    samples: int
    cohort: int
    batch_size: int
    epochs: int
    optimizer: str
    learning_rate: float
    turn: int = 1
    noise_multiplier: float = 0.02
    device: str = "cpu"
    seed: int = 1
    method: str = "dp-fedavg"
    secure: bool = False
    central: bool = False
    clip_norm: float = CLIP_NORM
    data: str = "mnist"
    network: str = "mnist-cnn"

    @property
    def text(self) -> str:
        network = "a linear head on features" if self.method == "hush" else self.network
        summed = ", secure aggregation" if self.secure else ""
        return (
            f"{self.name}: {self.method}{summed}, {network}, {self.clients:,} clients x {self.samples:,} samples, "
            f"{self.cohort:,} a round, batch {self.batch_size}, epochs {self.epochs}, {self.optimizer}"
        )

    @property
    def samples_per_round(self) -> int:
        """Trained samples in a round; each sample counts once per epoch."""
        return self.cohort * self.samples * self.epochs

    @property
    def noise_std(self) -> float:
        """The standard deviation of a client's noise; with secure aggregation all clients together make one noise."""
        return self.clip_norm * self.noise_multiplier / math.sqrt(self.cohort if self.secure or self.central else 1)

    def shrunk(self, by: int) -> Workload:
        """Returns the workload with one of `by` samples of each client, but at least two."""
        return replace(self, samples=max(2, self.samples // by))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", 10, 6000, 10, 16, 1, "adam", 1e-3),
        Workload("W2", 100, 600, 10, 64, 4, "adam", 1e-3),
        Workload("W3", 1000, 50, 50, 10, 1, "sgd", 0.1, turn=5),
        Workload("W4", 1000, 20, 1000, 2048, 5, "sgd", 16.0, method="hush"),
        Workload("W5", 100, 100, 10, 10, 1, "sgd", 0.1, turn=5, method="fedper"),
        Workload("W6", 50, 50, 50, 10, 1, "sgd", 0.1, method="dp-fedavg", secure=True),
    )
}


class MnistNetwork(nn.Module):
    """conv 5x5 1-32, pool, conv 5x5 32-64, pool, linear 1024-512, linear 512-10: the product's `mnist-cnn`.

    Its 582,026 parameters, in order and flattened, are the product's flat vector.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2 = nn.Linear(1024, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def simple_cnn() -> nn.Module:
    """Returns the network of pfl-research's own benchmark, which is the product's `svhn-cnn`."""
    convolutions = (nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25))
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    )


def to_vector(module: nn.Module) -> np.ndarray:
    """Returns the parameters, float32 `[d]`."""
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu().numpy()


class LinearHead(nn.Linear):
    """One layer, of which only the weights are trained: the bias belongs to the client."""

    def __init__(self, features: int, classes: int = 10) -> None:
        super().__init__(features, classes)
        self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1))


def network_of(vector: np.ndarray, workload: Workload) -> nn.Module:
    """Returns the workload's network with the parameters float32 `[d]`."""
    if workload.method == "hush":
        module: nn.Module = LinearHead(len(vector) // 10 - 1)
    else:
        module = simple_cnn() if workload.network == "svhn-cnn" else MnistNetwork()
    device = workload.device
    module = module.to(device)
    nn.utils.vector_to_parameters(torch.from_numpy(np.array(vector)).to(device), module.parameters())
    return module


@dataclass(frozen=True)
class TrainingJob:
    """A workload with its data."""

    folder: Path
    workload: Workload

    @classmethod
    def load(cls, folder: str | Path) -> TrainingJob:
        return cls(Path(folder), Workload(**json.loads((Path(folder) / "workload.json").read_text())))

    def save(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            np.save(self.folder / f"{name}.npy", array)
        (self.folder / "workload.json").write_text(json.dumps(asdict(self.workload)))

    def array(self, name: str) -> np.ndarray:
        """Returns an array, mapped copy-on-write: all processes share one copy in memory."""
        return np.load(self.folder / f"{name}.npy", mmap_mode="c")

    def first_model(self) -> nn.Module:
        return network_of(self.array("initial"), self.workload)

    def clients(self) -> list[tuple[Tensor, Tensor]]:
        """Returns images and labels of each client, on the workload's device."""
        x, y = (torch.from_numpy(self.array(name)).to(self.workload.device) for name in ("x", "y"))
        return list(zip(x.split(self.workload.samples), y.split(self.workload.samples), strict=True))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Returns PyTorch's optimizer with its default options."""
        kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        trained = [each for each in parameters if each.requires_grad]
        return kinds[self.workload.optimizer](trained, lr=self.workload.learning_rate)

    def train(self, module: nn.Module, x: Tensor, y: Tensor) -> int:
        """Does the usual local training; returns the number of trained samples."""
        optimizer, samples = self.optimizer(module.parameters()), 0
        for _ in range(self.workload.epochs):
            for batch in torch.randperm(len(y), device=y.device).split(self.workload.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(module(x[batch]), y[batch]).backward()
                optimizer.step()
                samples += len(batch)
        return samples


class Enough(Exception):
    """Raised when the benchmark needs no more rounds."""


class HeldRounds:
    """Pauses a framework between two rounds: all sides are running at the same time, and one trains at a time.

    :param params: returns the global model as float32 `[d]`; only called between rounds.
    :param packages: packages whose versions are reported.
    """

    def __init__(self, params: Callable[[], np.ndarray], packages: Sequence[str]) -> None:
        self._params = params
        self._parent = Parent(versions(packages))
        self._began = 0.0

    def wait(self) -> bool:
        """Waits until a round may start, and starts its clock; returns False if no more rounds are needed."""
        while (words := self._parent.next()) is not None and words[0] == "save":
            np.save(words[1], self._params())
            self._parent.answer({})
        self._began = time.perf_counter()
        return words is not None

    def done(self, **figures: float) -> None:
        """Reports a round. `samples` counts each sample once for each time that it was trained."""
        self._parent.answer({"seconds": time.perf_counter() - self._began, **figures})
