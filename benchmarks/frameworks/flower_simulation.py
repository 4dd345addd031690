"""Runs Flower's simulation on its Ray backend, like its PyTorch quickstart.

    python -m benchmarks.frameworks.flower_simulation FOLDER ACTORS

Message API: FedAvg samples the cohort, a ClientApp trains, and Flower's own LocalDpMod clips and noises the update on
the client. LocalDpMod takes epsilon and delta; they are chosen so that its standard deviation is the workload's. Each
client actor has one core, and keeps the data set once it has loaded it.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.frameworks.workload import (
    CLIP_NORM,
    ROUNDS,
    Enough,
    HeldRounds,
    MnistNetwork,
    TrainingJob,
    Workload,
    to_vector,
)

FOLDER_VARIABLE = "HUSHFLEET_BENCHMARK_FOLDER"
"""Ray passes the environment to its actors."""
DELTA = 1e-5


@functools.cache
def kept() -> tuple[TrainingJob, list[tuple[Tensor, Tensor]]]:
    """Returns the job and all clients' data, loaded once per actor."""
    job = TrainingJob.load(os.environ[FOLDER_VARIABLE])
    return job, job.clients()


def train(message: Message, context: Context) -> Message:
    """Trains one client from the global model and returns its model, as Flower's clients do."""
    torch.set_num_threads(1)
    job, clients = kept()
    x, y = clients[int(context.node_config["partition-id"])]
    model = MnistNetwork()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    trained_on = job.train(model.to(job.workload.device), x, y)
    metrics = MetricRecord({"num-examples": len(y), "trained-on": trained_on})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class HeldFedAvg(FedAvg):
    """Pauses the server between two rounds: all of Flower's work between two `configure_train` calls is measured."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(
            fraction_train=job.workload.cohort / job.workload.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.workload.cohort,
            min_available_nodes=job.workload.clients,
        )
        self._model = job.first_model()
        self._rounds = HeldRounds(lambda: to_vector(self._model), ["flwr", "ray", "torch", "numpy"])
        self._trained_on = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round > 1:
            self._rounds.done(samples=self._trained_on)
        self._model.load_state_dict(arrays.to_torch_state_dict())
        if not self._rounds.wait():
            raise Enough
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        # A client that failed sends an error as its reply, and Flower continues without it.
        self._trained_on = sum(reply.content["metrics"]["trained-on"] for reply in replies if not reply.has_error())
        return super().aggregate_train(server_round, replies)


def simulate(workload: Workload, serve: Callable[[Grid, Context], None], client_app: ClientApp, *, actors: int) -> None:
    """Runs the simulation until the benchmark has enough."""
    server_app = ServerApp()
    server_app.main()(serve)
    gpus = 1 if workload.device == "cuda" else 0
    # "local": does not join a cluster that others have started on this machine.
    init = {"address": "local", "num_cpus": actors, "num_gpus": gpus, "include_dashboard": False}
    try:
        run_simulation(
            server_app=server_app,
            client_app=client_app,
            num_supernodes=workload.clients,
            backend_config={"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": gpus / actors}},
        )
    except Enough:
        return
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of a failed simulation would wait forever


def main() -> None:
    os.environ[FOLDER_VARIABLE] = sys.argv[1]
    job, actors = TrainingJob.load(sys.argv[1]), int(sys.argv[2])
    workload, strategy = job.workload, HeldFedAvg(job)

    def serve(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(job.first_model().cpu().state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS)

    noise = workload.noise_multiplier
    epsilon = math.sqrt(2 * math.log(1.25 / DELTA)) / noise if noise else math.inf
    privacy = LocalDpMod(clipping_norm=CLIP_NORM, sensitivity=CLIP_NORM, epsilon=epsilon, delta=DELTA)
    client_app = ClientApp(mods=[privacy])
    client_app.train()(train)
    simulate(workload, serve, client_app, actors=actors)


if __name__ == "__main__":
    # Imported by name, so that actors also import it and do not get a copy of this module's functions.
    from benchmarks.frameworks.flower_simulation import main as main_by_name

    main_by_name()
