"""Apple's pfl-research, set up as its tutorials and benchmarks do it.

    python -m benchmarks.contenders.pfl_peer JOB.json
    torchrun --nproc-per-node 2 -m benchmarks.contenders.pfl_peer JOB.json

FederatedAveraging on the SimulatedBackend, with tensors in memory. Local privacy is pfl's own: GaussianMechanism as
a postprocessor clips and noises each user's statistics, and every user has the same weight. Users take part in
turn (`minimize_reuse`), since `random` would draw a user twice for one round. Several processes are pfl's own too:
torchrun starts them, the cohort is divided among them and the sums meet in an all-reduce (gloo; on GPUs NCCL, which
wants a GPU for each process, so that one GPU means one process).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contenders.gate import Gate
from benchmarks.contenders.job import Job, job_and_options
from benchmarks.contenders.network import first_model, make_optimizer, to_vector, training_data


class PflNetwork(nn.Module):
    """What pfl asks of a module, and a count of the samples that went through it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.trained_on = network, 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.trained_on += len(y)
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(F.cross_entropy(self.network(x), y, reduction="sum").item(), len(y))}


class Gated(TrainingProcessCallback):
    """Holds all processes between two rounds; the first one talks to the benchmark."""

    def __init__(self, module: PflNetwork, device: str) -> None:
        self._module, self._device = module, device
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        self._gate = Gate(lambda: to_vector(module), ["pfl", "torch", "numpy"]) if self._first else None

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._open()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        trained_on = self._total(self._module.trained_on)
        self._module.trained_on = 0
        if self._gate:
            self._gate.close(samples=trained_on)
        return not self._open(), Metrics()

    def _open(self) -> bool:
        return self._total(int(self._gate.open()) if self._gate else 0) == 1

    def _total(self, own: int) -> int:
        """The sum over all processes, which also makes them wait for each other."""
        count = torch.tensor(own, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(count)
        return int(count.item())


def federated_dataset(job: Job) -> FederatedDataset:
    x, y = training_data(job)
    users = {
        user: PyTorchTensorDataset((x[job.client(user)], y[job.client(user)]), user_id=user)
        for user in range(job.clients)
    }
    sampler = get_user_sampler("minimize_reuse", list(np.random.default_rng(job.seed).permutation(job.clients)))
    return FederatedDataset(users.__getitem__, sampler)


def main() -> None:
    job, _ = job_and_options()
    torch.set_num_threads(1)
    # All processes must draw the same users.
    np.random.seed(job.seed)
    module = PflNetwork(first_model(job))
    data = federated_dataset(job)
    model = PyTorchModel(
        module,
        lambda parameters, lr: make_optimizer(job, parameters),
        torch.optim.SGD(module.parameters(), lr=1.0),
    )
    backend = SimulatedBackend(
        training_data=data,
        val_data=data,
        postprocessors=[WeightByUser(), GaussianMechanism(job.clip_norm, job.noise_multiplier)],
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            # Round 0 is always evaluated; it is the warm-up.
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        backend=backend,
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=job.epochs,
            local_learning_rate=job.learning_rate,
            local_batch_size=job.batch_size,
        ),
        callbacks=[Gated(module, job.device)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
