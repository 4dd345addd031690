"""W1 to W3, on MNIST-shaped and on CIFAR-shaped data.

W1 is the shape of the personalization papers (few devices with much data), W2 that of FedAvg's own paper, W3 that
of a field of many devices with little data each. CIFAR-10 has 50,000 training images, so that W1 and W2 have 5,000
and 500 a client there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CLIP_NORM = 1.0
NOISE_MULTIPLIER = 0.02
"""Protects nobody, and costs the same time as noise that does; the model stays finite over many rounds."""


@dataclass(frozen=True)
class Workload:
    """:param turn: rounds that are measured as one; :param check_rounds: how many show that a contender learns."""

    name: str
    network: str
    data_set: str
    clients: int
    samples: int
    cohort: int
    batch_size: int
    epochs: int
    optimizer: str
    learning_rate: float
    turn: int
    check_rounds: int

    @property
    def text(self) -> str:
        everybody = "all take part" if self.cohort == self.clients else f"{self.cohort} a round"
        epochs = "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return (
            f"{self.name}: {self.network}, {self.clients:,} clients x {self.samples:,} samples, {everybody}, "
            f"batch {self.batch_size}, {epochs}, {self.optimizer}"
        )

    def shrunk(self, by: int) -> Workload:
        """Each client keeps one in `by` of its samples, but at least two."""
        return replace(self, samples=max(2, self.samples // by))


def _workloads(prefix: str, network: str, data_set: str, samples: tuple[int, int, int]) -> tuple[Workload, ...]:
    base = Workload(prefix, network, data_set, 10, samples[0], 10, 16, 1, "adam", 1e-3, turn=1, check_rounds=2)
    return (
        replace(base, name=f"{prefix}1"),
        replace(base, name=f"{prefix}2", clients=100, samples=samples[1], batch_size=64, epochs=4, check_rounds=4),
        replace(
            base,
            name=f"{prefix}3",
            clients=1000,
            samples=samples[2],
            cohort=50,
            batch_size=10,
            optimizer="sgd",
            learning_rate=0.1,
            turn=5,
            check_rounds=20,
        ),
    )


WORKLOADS = {
    workload.name: workload
    for workload in (
        *_workloads("W", "mnist-cnn", "mnist", (6000, 600, 50)),
        *_workloads("C", "cifar10-cnn", "cifar10", (5000, 500, 50)),
    )
}
