"""The two networks as anybody would write them in PyTorch, for the loop and the peers.

Their parameters, in order and flattened, are the flat vector of the product's own `mnist-cnn` and `cifar10-cnn`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contenders.job import Job


class MnistCnn(nn.Module):
    """conv 5x5 1-32, pool, conv 5x5 32-64, pool, linear 1024-512, linear 512-10: 582,026 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2 = nn.Linear(1024, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class Cifar10Cnn(nn.Module):
    """Three padded conv 3x3 with pooling, 3-16-32-32, and linear 512-512-128-10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.fc1, self.fc2, self.fc3 = nn.Linear(512, 512), nn.Linear(512, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.conv1, self.conv2, self.conv3):
            x = F.max_pool2d(F.relu(layer(x)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


NETWORKS: dict[str, type[nn.Module]] = {"mnist-cnn": MnistCnn, "cifar10-cnn": Cifar10Cnn}
INPUT_SHAPES = {"mnist-cnn": (1, 28, 28), "cifar10-cnn": (3, 32, 32)}


def make_optimizer(job: Job, parameters: object) -> torch.optim.Optimizer:
    """As PyTorch makes it by default."""
    return {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[job.optimizer](parameters, lr=job.learning_rate)


def to_vector(module: nn.Module) -> np.ndarray:
    """float32 `[d]`."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().cpu().numpy()


def set_vector(module: nn.Module, vector: np.ndarray) -> None:
    """From float32 `[d]`."""
    place = next(module.parameters()).device
    torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(vector)).to(place), module.parameters())


def first_model(job: Job) -> nn.Module:
    """The network with the job's first global model, on the job's device."""
    module = NETWORKS[job.network]().to(job.device)
    set_vector(module, job.array("initial"))
    return module


def training_data(job: Job) -> tuple[Tensor, Tensor]:
    """All clients' images and labels on the job's device."""
    return torch.from_numpy(job.array("x")).to(job.device), torch.from_numpy(job.array("y")).to(job.device)


def multiply_adds_per_sample(network: str) -> int:
    """Of one training step, for one sample: forward, and the products for the gradients of weights and inputs.

    The first layer's input needs no gradient. Pooling, ReLU, biases, loss and optimizer are left out: they are no
    matrix products, and a ceiling may be too high but not too low.
    """
    module, counts = NETWORKS[network](), []

    def count(layer: nn.Module, _: tuple[Tensor, ...], out: Tensor) -> None:
        positions = out[0, 0].numel() if isinstance(layer, nn.Conv2d) else 1
        counts.append(layer.weight.numel() * positions)

    for layer in module.children():
        layer.register_forward_hook(count)
    module(torch.zeros(1, *INPUT_SHAPES[network]))
    return 3 * sum(counts) - counts[0]
