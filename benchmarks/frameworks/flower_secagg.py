"""Runs Flower's simulation with its secure aggregation, SecAgg+, as in its example.

    python -m benchmarks.frameworks.flower_secagg FOLDER ACTORS

The workflow and the mod are Flower's own; they take clients of the older API alone. Each client shares its secrets with
`SHARES` neighbours (its own share included), adds its part of the noise, and sends a quantised, masked model.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
from flwr.client import Client, ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import Context, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import Grid, LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from benchmarks.frameworks.flower_simulation import FOLDER_VARIABLE, kept, simulate
from benchmarks.frameworks.workload import CLIP_NORM, ROUNDS, Enough, HeldRounds, TrainingJob, network_of, to_vector

SHARES, THRESHOLD = 5, 3


class SecureClient(NumPyClient):
    """Trains one client, clips, and adds its part of the noise."""

    def __init__(self, index: int) -> None:
        self._index = index

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        torch.set_num_threads(1)
        job, clients = kept()
        model = network_of(parameters[0], job.workload)
        trained_on = job.train(model, *clients[self._index])
        update = to_vector(model) - parameters[0]
        update *= min(1.0, CLIP_NORM / float(np.linalg.norm(update)))
        update += np.random.default_rng().standard_normal(len(update), np.float32) * np.float32(job.workload.noise_std)
        return [parameters[0] + update], len(clients[self._index][1]), {"trained-on": trained_on}


def client_of(context: Context) -> Client:
    return SecureClient(int(context.node_config["partition-id"])).to_client()


class HeldSecureFedAvg(FedAvg):
    """Pauses the server between two rounds: all of Flower's work between two `configure_fit` calls is measured."""

    def __init__(self, job: TrainingJob, **of_strategy: Any) -> None:
        super().__init__(**of_strategy)
        self._params = job.array("initial")
        self._rounds = HeldRounds(lambda: self._params, ["flwr", "ray", "torch", "numpy"])
        self._trained_on = 0

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        if server_round > 1:
            self._rounds.done(samples=self._trained_on)
        if not self._rounds.wait():
            raise Enough
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        self._trained_on = sum(int(result.metrics["trained-on"]) for _, result in results)
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        if parameters is not None:
            (self._params,) = parameters_to_ndarrays(parameters)
        return parameters, metrics


def main() -> None:
    os.environ[FOLDER_VARIABLE] = sys.argv[1]
    job, actors = TrainingJob.load(sys.argv[1]), int(sys.argv[2])
    workload = job.workload
    strategy = HeldSecureFedAvg(
        job,
        fraction_fit=workload.cohort / workload.clients,
        fraction_evaluate=0.0,
        min_fit_clients=workload.cohort,
        min_available_clients=workload.clients,
        initial_parameters=ndarrays_to_parameters([job.array("initial")]),
    )

    def serve(grid: Grid, context: Context) -> None:
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=ROUNDS), strategy=strategy)
        secure = SecAggPlusWorkflow(SHARES, THRESHOLD, clipping_range=3.0)
        DefaultWorkflow(fit_workflow=secure)(grid, legacy)

    simulate(workload, serve, ClientApp(client_fn=client_of, mods=[secaggplus_mod]), actors=actors)


if __name__ == "__main__":
    # Imported by name, so that actors also import it and do not get a copy of this module's functions.
    from benchmarks.frameworks.flower_secagg import main as main_by_name

    main_by_name()
