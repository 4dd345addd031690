"""A Flower client's round. A module of its own, since actors import it by name and so keep the data between rounds."""

from __future__ import annotations

import functools
import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor
from torch.nn import functional as F

from benchmarks.contenders.job import Job, load_job
from benchmarks.contenders.network import NETWORKS, make_optimizer, training_data

JOB_VARIABLE = "HUSHFLEET_BENCHMARK_JOB"
"""The job's path; Ray hands the environment down to its actors."""


@functools.cache
def kept_job() -> Job:
    return load_job(os.environ[JOB_VARIABLE])


@functools.cache
def kept_data() -> tuple[Tensor, Tensor]:
    return training_data(kept_job())


def train(message: Message, context: Context) -> Message:
    """Trains one client from the global model and returns its model, as Flower's clients do."""
    torch.set_num_threads(1)
    job = kept_job()
    x, y = (part[job.client(int(context.node_config["partition-id"]))] for part in kept_data())
    model = NETWORKS[job.network]()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.to(job.device)
    optimizer, trained_on = make_optimizer(job, model.parameters()), 0
    for _ in range(job.epochs):
        for batch in torch.randperm(len(y), device=y.device).split(job.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            trained_on += len(batch)
    metrics = MetricRecord({"num-examples": len(y), "trained-on": trained_on})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
