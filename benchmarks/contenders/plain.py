"""The loop that a researcher writes by hand: nn.Module, torch.optim, deepcopy, clip, noise, average.

    python -m benchmarks.contenders.plain JOB.json [PROCESSES]

With one process it is the reference that all others are compared with. With more, each process trains its share of
the round's clients from a global model in shared memory and returns the sum of their updates.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.contenders.gate import Gate
from benchmarks.contenders.job import Job, job_and_options
from benchmarks.contenders.network import first_model, make_optimizer, to_vector, training_data

Share = tuple[list[Tensor], int]
"""The sum of some clients' updates, tensor by tensor, and how many samples they were trained on."""


class ClientTraining:
    """What a process needs to train any client."""

    def __init__(self, job: Job, global_model: nn.Module) -> None:
        torch.set_num_threads(1)
        self.job, self.global_model = job, global_model
        self.x, self.y = training_data(job)

    def sum_of_updates(self, clients: Sequence[int]) -> Share:
        total = [torch.zeros_like(part) for part in self.global_model.parameters()]
        samples = 0
        for client in clients:
            model = copy.deepcopy(self.global_model)
            samples += self._train(model, client)
            pairs = zip(model.parameters(), self.global_model.parameters(), strict=True)
            with torch.no_grad():
                update = [own - start for own, start in pairs]
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in update]))
                scale = min(1.0, self.job.clip_norm / norm.item())
                for own_sum, part in zip(total, update, strict=True):
                    own_sum += part * scale + torch.randn_like(part) * self.job.noise_std
        return total, samples

    def _train(self, model: nn.Module, client: int) -> int:
        job, samples = self.job, 0
        x, y = self.x[job.client(client)], self.y[job.client(client)]
        optimizer = make_optimizer(job, model.parameters())
        for _ in range(job.epochs):
            for batch in torch.randperm(len(y), device=y.device).split(job.batch_size):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
                samples += len(batch)
        return samples


_training: ClientTraining


def _begin(job: Job, global_model: nn.Module) -> None:
    global _training
    _training = ClientTraining(job, global_model)


def _share(clients: Sequence[int]) -> Share:
    return _training.sum_of_updates(clients)


def main() -> None:
    job, options = job_and_options()
    processes = int(options[0]) if options else 1
    global_model = first_model(job)
    gate = Gate(lambda: to_vector(global_model), ["torch", "numpy"])
    if processes == 1:
        training = ClientTraining(job, global_model)
        while gate.open():
            chosen = random.sample(range(job.clients), job.cohort)
            gate.close(samples=_average(job, global_model, [training.sum_of_updates(chosen)]))
        return
    global_model.share_memory()
    with torch.multiprocessing.get_context("spawn").Pool(processes, _begin, (job, global_model)) as pool:
        while gate.open():
            chosen = random.sample(range(job.clients), job.cohort)
            shares = pool.imap_unordered(_share, [chosen[first::processes] for first in range(processes)])
            gate.close(samples=_average(job, global_model, list(shares)))


@torch.no_grad()
def _average(job: Job, global_model: nn.Module, shares: Iterable[Share]) -> int:
    """Moves the global model, and returns on how many samples it was trained."""
    trained_on = 0
    for total, samples in shares:
        trained_on += samples
        for parameter, part in zip(global_model.parameters(), total, strict=True):
            parameter += part / job.cohort
    if job.device == "cuda":
        torch.cuda.synchronize()
    return trained_on


if __name__ == "__main__":
    main()
