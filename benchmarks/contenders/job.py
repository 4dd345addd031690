"""What every contender of one comparison is given: the same numbers, data and first model.

The folder of a job holds what `benchmarks.versus.data` wrote:

    job.json         the fields of `Job`
    x.npy, y.npy     float32 [n, C, H, W] normalised images and int64 [n] labels, client after client
    initial.npy      float32 [d], the first global model: PyTorch's parameters in order, flattened
    test_x.npy, test_y.npy   held-out images
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Job:
    """One workload.

    :param network: `mnist-cnn` or `cifar10-cnn`.
    :param samples: training samples of each client; :param cohort: clients in a round.
    :param clip_norm: bound C on a client's whole update; :param noise_multiplier: the client's Gaussian noise has
        standard deviation noise_multiplier x C in every entry; 0 is none.
    :param rounds: of the run that is begun, far more than are measured; frameworks must know it at the start.
    :param device: `cpu` or `cuda`.
    """

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
    clip_norm: float
    noise_multiplier: float
    rounds: int
    device: str
    seed: int
    folder: str

    @property
    def samples_per_round(self) -> int:
        """Each sample counts once an epoch."""
        return self.cohort * self.samples * self.epochs

    @property
    def noise_std(self) -> float:
        return self.noise_multiplier * self.clip_norm

    def save(self) -> Path:
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self), indent=1))
        return path

    def array(self, name: str) -> np.ndarray:
        """Mapped copy-on-write: the processes of all contenders share one copy in memory."""
        return np.load(Path(self.folder) / f"{name}.npy", mmap_mode="c")

    def client(self, index: int) -> slice:
        """Which rows of `x` and `y` belong to a client."""
        return slice(index * self.samples, (index + 1) * self.samples)


def load_job(path: str | Path) -> Job:
    return Job(**json.loads(Path(path).read_text()))


def job_and_options() -> tuple[Job, list[str]]:
    """The job that the command line names first, and the words after it."""
    return load_job(sys.argv[1]), sys.argv[2:]
