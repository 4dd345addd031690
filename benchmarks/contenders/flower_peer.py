"""Flower's simulation on its Ray backend, in the form of its PyTorch quickstart.

    python -m benchmarks.contenders.flower_peer JOB.json ACTORS

Message API: FedAvg samples the cohort, a ClientApp trains, and Flower's own LocalDpMod clips and noises the update on
the client. LocalDpMod takes epsilon and delta; they are chosen so that its standard deviation is the job's. Each
client actor has one core, and keeps the data set once it has loaded it.
"""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.contenders.flower_client import JOB_VARIABLE, train
from benchmarks.contenders.gate import Gate
from benchmarks.contenders.job import Job, job_and_options
from benchmarks.contenders.network import first_model, to_vector

DELTA = 1e-5


class Enough(Exception):
    """The benchmark wants no more rounds."""


class GatedFedAvg(FedAvg):
    """Holds the server between two rounds: all that Flower does from one `configure_train` to the next is measured."""

    def __init__(self, job: Job) -> None:
        super().__init__(
            fraction_train=job.cohort / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.cohort,
            min_available_nodes=job.clients,
        )
        self._model = first_model(job)
        self._gate = Gate(lambda: to_vector(self._model), ["flwr", "ray", "torch", "numpy"])
        self._trained_on = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if server_round > 1:
            self._gate.close(samples=self._trained_on)
        self._model.load_state_dict(arrays.to_torch_state_dict())
        if not self._gate.open():
            raise Enough
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        # A client that failed is an error in its reply, and Flower goes on without it.
        self._trained_on = sum(reply.content["metrics"]["trained-on"] for reply in replies if not reply.has_error())
        return super().aggregate_train(server_round, replies)


def main() -> None:
    job, options = job_and_options()
    actors = int(options[0])
    os.environ[JOB_VARIABLE] = f"{job.folder}/job.json"
    strategy = GatedFedAvg(job)

    def serve(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(first_model(job).cpu().state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=job.rounds)

    epsilon = math.sqrt(2 * math.log(1.25 / DELTA)) / job.noise_multiplier if job.noise_multiplier else math.inf
    local_privacy = LocalDpMod(clipping_norm=job.clip_norm, sensitivity=job.clip_norm, epsilon=epsilon, delta=DELTA)
    client_app = ClientApp(mods=[local_privacy])
    client_app.train()(train)
    server_app = ServerApp()
    server_app.main()(serve)
    gpus = 1 if job.device == "cuda" else 0
    # "local": not a cluster that somebody else has started on this machine.
    init = {"address": "local", "num_cpus": actors, "num_gpus": gpus, "include_dashboard": False}
    try:
        run_simulation(
            server_app=server_app,
            client_app=client_app,
            num_supernodes=job.clients,
            backend_config={"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": gpus / actors}},
        )
    except Enough:
        return
    except BaseException:
        # Threads of a simulation that broke down would wait for ever.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
