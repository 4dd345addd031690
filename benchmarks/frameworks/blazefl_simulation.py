"""Runs BlazeFL, like its FedAvg quickstart, with clients in threads.

    python -m benchmarks.frameworks.blazefl_simulation FOLDER THREADS

FedAvg's own server handler samples the cohort and averages the models, weighted by their samples, which are equally
many. A client's worker is written by the user: here it trains as on all sides, clips, and adds noise. BlazeFL gains
from threads if Python has no global lock (3.14, free-threaded); otherwise only PyTorch's kernels run side by side.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgDownlinkPackage, FedAvgUplinkPackage
from blazefl.core import ThreadPoolClientTrainer, deserialize_model
from torch import nn

from benchmarks.frameworks.workload import CLIP_NORM, ROUNDS, HeldRounds, TrainingJob, to_vector


class GivenModel:
    """Selects the workload's first model."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job

    def select_model(self, model_name: str) -> nn.Module:
        return self._job.first_model()


class Clients(ThreadPoolClientTrainer[FedAvgUplinkPackage, FedAvgDownlinkPackage]):
    """Trains clients, several at the same time."""

    def __init__(self, job: TrainingJob, threads: int) -> None:
        self.num_parallels, self.device, self.device_count = threads, job.workload.device, 1
        self.cache: list[FedAvgUplinkPackage] = []
        self.stop_event = threading.Event()
        self._job, self._data = job, job.clients()
        self.trained_on = 0

    def worker(
        self, cid: int, device: str, payload: FedAvgDownlinkPackage, stop_event: threading.Event
    ) -> FedAvgUplinkPackage:
        model = self._job.first_model()
        deserialize_model(model, payload.model_parameters)
        trained_on = self._job.train(model, *self._data[cid])
        with torch.no_grad():
            update = nn.utils.parameters_to_vector(model.parameters()) - payload.model_parameters
            update *= min(1.0, CLIP_NORM / torch.linalg.vector_norm(update).item())
            update += torch.randn_like(update) * self._job.workload.noise_std
        sent = payload.model_parameters + update
        return FedAvgUplinkPackage(cid, sent, len(self._data[cid][1]), {"trained_on": trained_on})

    def uplink_package(self) -> list[FedAvgUplinkPackage]:
        packages, self.cache = self.cache, []
        self.trained_on = sum(int(package.metadata["trained_on"]) for package in packages)
        return packages


def main() -> None:
    job = TrainingJob.load(sys.argv[1])
    workload = job.workload
    torch.set_num_threads(1)
    without_tests: Any = None
    server = FedAvgBaseServerHandler(
        GivenModel(job),
        "given",
        without_tests,
        global_round=ROUNDS,
        num_clients=workload.clients,
        sample_ratio=workload.cohort / workload.clients,
        device=workload.device,
        batch_size=workload.batch_size,
        seed=workload.seed,
    )
    clients = Clients(job, int(sys.argv[2]))
    rounds = HeldRounds(lambda: to_vector(server.model), ["blazefl", "torch"])
    while rounds.wait():
        clients.local_process(server.downlink_package(), server.sample_clients())
        for package in clients.uplink_package():
            server.load(package)
        rounds.done(samples=clients.trained_on)


if __name__ == "__main__":
    main()
