"""Runs Apple's pfl-research, set up as in its tutorials and benchmarks.

    python -m benchmarks.frameworks.pfl_simulation FOLDER
    torchrun --nproc-per-node 2 -m benchmarks.frameworks.pfl_simulation FOLDER

FederatedAveraging on the SimulatedBackend, with tensors in memory. Local privacy is pfl's own: GaussianMechanism as a
postprocessor clips and noises each user's statistics, and every user has the same weight. Users take part in turn
(`minimize_reuse`), because `random` can draw a user twice for one round. Several processes are also pfl's own feature:
the cohort is divided among them and an all-reduce adds the sums (on GPUs this needs one GPU per process).
"""

from __future__ import annotations

import sys

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
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.frameworks.workload import ROUNDS, HeldRounds, TrainingJob, to_vector


class PflNetwork(nn.Module):
    """A module as pfl needs it, which also counts its samples."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.trained_on = network, 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.trained_on += len(y)
        return F.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(F.cross_entropy(self.network(x), y, reduction="sum").item(), len(y))}


class Held(TrainingProcessCallback):
    """Pauses all processes between two rounds; the first one communicates with the benchmark."""

    def __init__(self, module: PflNetwork, device: str) -> None:
        self._module, self._device = module, device
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._rounds = HeldRounds(lambda: to_vector(module), ["pfl", "torch", "numpy"]) if first else None

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        trained_on = self._total(self._module.trained_on)
        self._module.trained_on = 0
        if self._rounds:
            self._rounds.done(samples=trained_on)
        return not self._wait(), Metrics()

    def _wait(self) -> bool:
        return self._total(int(self._rounds.wait()) if self._rounds else 0) == 1

    def _total(self, own: int) -> int:
        """Returns the sum over all processes; they also wait for each other here."""
        count = torch.tensor(own, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(count)
        return int(count.item())


def users_in_turn(job: TrainingJob) -> FederatedDataset:
    users = {user: PyTorchTensorDataset(data, user_id=user) for user, data in enumerate(job.clients())}
    order = list(np.random.default_rng(job.workload.seed).permutation(job.workload.clients))
    return FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", order))


def given_users(job: TrainingJob) -> FederatedDataset:
    """Returns the users of the given cohorts, each with its samples in the given order: pfl does not shuffle them."""
    clients, orders = job.clients(), job.array("orders").reshape(-1, job.workload.samples)
    draws = iter(enumerate(job.array("cohorts").flatten().tolist()))

    def user(draw: tuple[int, int]) -> PyTorchTensorDataset:
        x, y = clients[draw[1]]
        return PyTorchTensorDataset((x[orders[draw[0]]], y[orders[draw[0]]]), user_id=draw[1])

    return FederatedDataset(user, lambda: next(draws))


def main() -> None:
    job = TrainingJob.load(sys.argv[1])
    workload = job.workload
    torch.set_num_threads(1)
    np.random.seed(workload.seed)  # all processes must draw the same users
    module = PflNetwork(job.first_model())
    noise = GaussianMechanism(workload.clip_norm, workload.noise_multiplier)
    data = given_users(job) if (job.folder / "cohorts.npy").exists() else users_in_turn(job)
    model = PyTorchModel(
        module, lambda parameters, lr: job.optimizer(parameters), torch.optim.SGD(module.parameters(), lr=1.0)
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=ROUNDS,
            evaluation_frequency=ROUNDS + 1,  # round 0 is always evaluated; it is the warm-up
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(
            training_data=data,
            val_data=data,
            postprocessors=[WeightByUser(), CentrallyAppliedPrivacyMechanism(noise) if workload.central else noise],
        ),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=workload.learning_rate,
            local_batch_size=workload.batch_size,
        ),
        callbacks=[Held(module, workload.device)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main()
