"""Runs a loop as a researcher writes it by hand: nn.Module, torch.optim, deepcopy, clip, noise, average.

    python -m benchmarks.frameworks.plain_loop FOLDER PROCESSES

With one process it is the reference. With more, each process trains its share of the round's clients from a global
model in shared memory and returns the sum of their updates. What a client keeps (FedPer's last layer, Hush's bias from
its own labels) is no part of its update.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.frameworks.workload import CLIP_NORM, HeldRounds, LinearHead, TrainingJob, to_vector

Share = tuple[list[Tensor], int]
"""The sum of some clients' updates, tensor by tensor, and the number of trained samples."""


class PlainTraining:
    """Everything that a process needs to train any client.

    :param heads: FedPer's last layer of each client, `[clients, n]`; several processes share its memory.
    """

    def __init__(self, job: TrainingJob, global_model: nn.Module, heads: Tensor) -> None:
        torch.set_num_threads(1)
        self.job, self.global_model, self.clients, self.heads = job, global_model, job.clients(), heads
        self.method = job.workload.method

    @torch.no_grad()
    def begin(self, client: int) -> nn.Module:
        """Returns the global model with the client's own part."""
        model = copy.deepcopy(self.global_model)
        if isinstance(model, LinearHead):
            counts = torch.bincount(self.clients[client][1], minlength=len(model.bias)) + 1.0
            model.bias.copy_((counts / counts.sum()).log())
        if self.method == "fedper":
            nn.utils.vector_to_parameters(self.heads[client].clone(), last_layer(model))
        return model

    def shared(self, model: nn.Module) -> list[Tensor]:
        """Returns the parameters that a client sends."""
        return list(model.parameters())[: {"hush": -1, "fedper": -2}.get(self.method)]

    @torch.no_grad()
    def keep(self, client: int, model: nn.Module) -> None:
        if self.method == "fedper":
            self.heads[client] = nn.utils.parameters_to_vector(last_layer(model))

    def sum_of_updates(self, clients: Sequence[int]) -> Share:
        total = [torch.zeros_like(part) for part in self.shared(self.global_model)]
        noise_std = self.job.workload.noise_std
        samples = 0
        for client in clients:
            model = self.begin(client)
            samples += self.job.train(model, *self.clients[client])
            self.keep(client, model)
            with torch.no_grad():
                pairs = zip(self.shared(model), self.shared(self.global_model), strict=True)
                update = [own - start for own, start in pairs]
                norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in update]))
                scale = CLIP_NORM / norm.item()
                if self.method != "hush":  # which scales each update to the clip norm
                    scale = min(1.0, scale)
                for own_sum, part in zip(total, update, strict=True):
                    own_sum += part * scale + torch.randn_like(part) * noise_std
        return total, samples


def last_layer(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())[-2:]


_training: PlainTraining


def _begin(*of_training: Any) -> PlainTraining:
    global _training
    _training = PlainTraining(*of_training)
    return _training


def _share(clients: Sequence[int]) -> Share:
    return _training.sum_of_updates(clients)


def main() -> None:
    job, processes = TrainingJob.load(sys.argv[1]), int(sys.argv[2])
    workload, global_model = job.workload, job.first_model()
    rounds = HeldRounds(lambda: to_vector(global_model), ["torch", "numpy"])
    head = nn.utils.parameters_to_vector(last_layer(global_model)).detach()
    of_training = job, global_model, head.repeat(workload.clients if workload.method == "fedper" else 0, 1)
    training = _begin(*of_training)
    if processes > 1:
        global_model.share_memory()
        training.heads.share_memory_()
    spawn = torch.multiprocessing.get_context("spawn")
    with spawn.Pool(processes, _begin, of_training) if processes > 1 else nullcontext() as pool:
        while rounds.wait():
            chosen = random.sample(range(workload.clients), workload.cohort)
            shares = [chosen[first::processes] for first in range(processes)]
            done = list(pool.imap_unordered(_share, shares) if pool else map(_share, shares))
            rounds.done(samples=_average(job, training.shared(global_model), done))


@torch.no_grad()
def _average(job: TrainingJob, parameters: Sequence[Tensor], shares: Iterable[Share]) -> int:
    """Updates the global model's parameters, and returns the number of trained samples."""
    trained_on = 0
    for total, samples in shares:
        trained_on += samples
        for parameter, part in zip(parameters, total, strict=True):
            parameter += part / job.workload.cohort
    if job.workload.device == "cuda":
        torch.cuda.synchronize()
    return trained_on


if __name__ == "__main__":
    main()
