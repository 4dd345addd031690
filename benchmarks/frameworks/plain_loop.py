"""Runs a loop as a researcher writes it by hand: nn.Module, torch.optim, deepcopy, clip, noise, average.

    python -m benchmarks.frameworks.plain_loop FOLDER PROCESSES

With one process it is the reference. With more, each process trains its share of the round's clients from a global
model in shared memory and returns the sum of their updates.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from benchmarks.frameworks.workload import CLIP_NORM, HeldRounds, TrainingJob, to_vector

Share = tuple[list[Tensor], int]
"""The sum of some clients' updates, tensor by tensor, and the number of trained samples."""


class PlainTraining:
    """Everything that a process needs to train any client."""

    def __init__(self, job: TrainingJob, global_model: nn.Module) -> None:
        torch.set_num_threads(1)
        self.job, self.global_model, self.clients = job, global_model, job.clients()

    def sum_of_updates(self, clients: Sequence[int]) -> Share:
        total = [torch.zeros_like(part) for part in self.global_model.parameters()]
        noise_std = CLIP_NORM * self.job.workload.noise_multiplier
        samples = 0
        for client in clients:
            model = copy.deepcopy(self.global_model)
            samples += self.job.train(model, *self.clients[client])
            with torch.no_grad():
                pairs = zip(model.parameters(), self.global_model.parameters(), strict=True)
                update = [own - start for own, start in pairs]
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in update]))
                scale = min(1.0, CLIP_NORM / norm.item())
                for own_sum, part in zip(total, update, strict=True):
                    own_sum += part * scale + torch.randn_like(part) * noise_std
        return total, samples


_training: PlainTraining


def _begin(job: TrainingJob, global_model: nn.Module) -> None:
    global _training
    _training = PlainTraining(job, global_model)


def _share(clients: Sequence[int]) -> Share:
    return _training.sum_of_updates(clients)


def main() -> None:
    job, processes = TrainingJob.load(sys.argv[1]), int(sys.argv[2])
    workload, global_model = job.workload, job.first_model()
    rounds = HeldRounds(lambda: to_vector(global_model), ["torch", "numpy"])
    if processes == 1:
        _begin(job, global_model)
    else:
        global_model.share_memory()
    spawn = torch.multiprocessing.get_context("spawn")
    with spawn.Pool(processes, _begin, (job, global_model)) if processes > 1 else nullcontext() as pool:
        while rounds.wait():
            chosen = random.sample(range(workload.clients), workload.cohort)
            shares = [chosen[first::processes] for first in range(processes)]
            done = list(pool.imap_unordered(_share, shares) if pool else map(_share, shares))
            rounds.done(samples=_average(job, global_model, done))


@torch.no_grad()
def _average(job: TrainingJob, global_model: nn.Module, shares: Iterable[Share]) -> int:
    """Updates the global model, and returns the number of trained samples."""
    trained_on = 0
    for total, samples in shares:
        trained_on += samples
        for parameter, part in zip(global_model.parameters(), total, strict=True):
            parameter += part / job.workload.cohort
    if job.workload.device == "cuda":
        torch.cuda.synchronize()
    return trained_on


if __name__ == "__main__":
    main()
