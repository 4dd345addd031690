"""Runs the runtime `vmap`: a cohort's local training as arrays in this process, the rest of each round in the workers.

It uses the accelerator if there is one. While a group is trained, the workers finish the previous group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.learning.draws import Inputs
from hushfleet.methods.local_round import Trained
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.chunks import (
    REFUSALS,
    Chunk,
    ChunkAnswer,
    Client,
    ClientRow,
    declined,
    divided,
    train,
    trainer_for,
)
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member
from hushfleet.simulator.engines.fast.workers import WorkerPool


def train_at_once(cohort: Chunk, workers: WorkerPool) -> Iterator[ChunkAnswer]:
    """Trains the cohort like `chunks.train`; yields the answers of one chunk after the other."""
    before: Iterator[ChunkAnswer] = iter(())
    first = 0
    while first < len(cohort.clients):
        group = replace(cohort, clients=cohort.clients[first : first + _group_size(cohort, cohort.clients[first])])
        refused, trained = _train(group)
        yield ChunkAnswer(refused, None)
        yield from before
        before = workers.map(train, divided(trained, workers.count))
        first += len(group.clients)
    yield from before


@lru_cache(maxsize=2)
def cohort_trainer(files: LoadedRun) -> CohortTrainer:
    """Returns this process's trainer for a run; the clients' images stay on its device from round to round."""
    spec = files.spec.model
    model = get_model(files.network, classes=spec.outputs, input_shape=spec.input_shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return CohortTrainer(
        TorchGradient(model, device=device, objective=spec.targets.objective(files.method.objective)), device
    )


def _group_size(cohort: Chunk, client: Client) -> int:
    run = cohort.run
    spec, method = run.spec, run.method
    member = Member(method.init_state(), run.train(client.device), np.random.default_rng(0))
    return cohort_trainer(run).clients_at_once(method, [member], inputs=Inputs(spec.model.dropout, spec.augment))


def _train(group: Chunk) -> tuple[list[ClientRow], Chunk]:
    """Returns the answers of the devices that decline the round, and the others with their training."""
    run, plan = group.run, group.plan
    refused: list[ClientRow] = []
    clients: list[Client] = []
    members: list[Member] = []
    for client in group.clients:
        trainer = trainer_for(group, client, None)
        round = DeviceRound(trainer, plan)
        try:
            _ = round.charge
        except REFUSALS as error:
            refused.append(declined(client, error))
            continue
        clients.append(client)
        rng, noise = trainer.randomness.order(plan.round), trainer.randomness.noise(plan.round)
        members.append(Member(round.state(), trainer.samples(), rng, round.terms, noise))
    rest = replace(group, clients=clients)
    if not clients:
        return refused, rest
    try:
        inputs = Inputs(run.spec.model.dropout, run.spec.augment)
        results = cohort_trainer(run).train(run.method, members, run.global_params(plan), inputs=inputs)
    except REFUSALS as error:
        refused_alone, rest = _one_by_one(rest, error)
        return refused + refused_alone, rest
    return refused, replace(rest, trained=results)


def _one_by_one(group: Chunk, error: Exception) -> tuple[list[ClientRow], Chunk]:
    """Trains each device alone after a group's training was refused, so that only devices that must decline do so."""
    if len(group.clients) == 1:
        return [declined(group.clients[0], error)], replace(group, clients=[])
    refused: list[ClientRow] = []
    clients: list[Client] = []
    trained: list[Trained] = []
    for client in group.clients:
        rows, alone = _train(replace(group, clients=[client]))
        refused += rows
        clients += alone.clients
        trained += alone.trained
    return refused, replace(group, clients=clients, trained=trained)
