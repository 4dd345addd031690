"""Runs the runtime `vmap`: a cohort's local training as arrays in this process, the rest of each round in the workers.

It uses the accelerator if there is one. While a group is trained, the workers finish the previous group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from hushfleet.edge_client.worker.trainer import DeviceRound
from hushfleet.learning.draws import Inputs
from hushfleet.models import get_model
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.simulator.engines.fast.jobs import REFUSALS, Job, JobAnswer, TrainedJob, commit, declined, device_of
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.vmap.training import CohortTrainer, Member
from hushfleet.simulator.engines.fast.workers import WorkerPool


def train_at_once(jobs: Sequence[Job], workers: WorkerPool) -> Iterator[JobAnswer]:
    """Trains and commits like `hushfleet.simulator.engines.fast.jobs.train`; yields answers in the jobs' order."""
    before: Iterator[JobAnswer] = iter(())
    first = 0
    while first < len(jobs):
        group = jobs[first : first + _group_size(jobs[first])]
        known, trained = _train(group)
        yield from before
        before = _in_order(group, known, workers.map(commit, trained))
        first += len(group)
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


def _group_size(job: Job) -> int:
    run = job.run
    spec, method = run.spec, run.method
    member = Member(method.init_state(), run.train(job.device), np.random.default_rng(0))
    return cohort_trainer(run).clients_at_once(method, [member], inputs=Inputs(spec.model.dropout, spec.augment))


def _train(group: Sequence[Job]) -> tuple[dict[str, JobAnswer], list[TrainedJob]]:
    """Returns answers of the devices that have already committed this round or decline it, and trains the others."""
    known: dict[str, JobAnswer] = {}
    jobs: list[Job] = []
    members: list[Member] = []
    files = group[0].run
    for job in group:
        with device_of(job, files) as trainer:
            stored = trainer.store.outbox(job.plan.task, job.plan.round)
            if stored is not None:
                known[job.device] = JobAnswer(job.device, trainer.store.identity.public_key, stored.data)
                continue
            round = DeviceRound(trainer, job.plan)
            try:
                _ = round.charge
            except REFUSALS as error:
                known[job.device] = declined(job, trainer, error)
                continue
            jobs.append(job)
            rng, noise = trainer.randomness.order(job.plan.round), trainer.randomness.noise(job.plan.round)
            members.append(Member(round.state(), trainer.samples(), rng, round.terms, noise))
    if not jobs:
        return known, []
    try:
        results = cohort_trainer(files).train(
            trainer.method,
            members,
            files.global_params(jobs[0].plan),
            inputs=Inputs(files.spec.model.dropout, files.spec.augment),
        )
    except REFUSALS as error:
        return _one_by_one(jobs, known, error)
    return known, [TrainedJob(job, result) for job, result in zip(jobs, results, strict=True)]


def _one_by_one(
    jobs: Sequence[Job], known: dict[str, JobAnswer], error: Exception
) -> tuple[dict[str, JobAnswer], list[TrainedJob]]:
    """Trains each device alone after a group's training was refused, so that only devices that must decline do so."""
    if len(jobs) == 1:
        with device_of(jobs[0], jobs[0].run) as trainer:
            return {**known, jobs[0].device: declined(jobs[0], trainer, error)}, []
    trained: list[TrainedJob] = []
    for job in jobs:
        answers, done = _train([job])
        known.update(answers)
        trained += done
    return known, trained


def _in_order(group: Sequence[Job], known: dict[str, JobAnswer], finished: Iterator[JobAnswer]) -> Iterator[JobAnswer]:
    for job in group:
        yield known[job.device] if job.device in known else next(finished)
