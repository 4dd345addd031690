"""Runs FedPer, FedRep and Ditto of PFLlib: its servers, clients, optimizers and network; only the batches are given.

    python -m benchmarks.frameworks.pfllib_clients FOLDER PFLLIB

FOLDER is written by `benchmarks.pfllib`. A request names method and seed. The answer has each client's accuracy on its
own test images: `own`, of the model that it has trained in the last round, and `next`, of its head on the new shared
layers.
"""

from __future__ import annotations

import json
import random
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.processes import Parent, Reply, versions

TRAININGS = {"fedper": [0], "fedrep": [0, 1], "ditto": [1, 0]}
"""The places, in the given orders, of the trainings of a client's round, as PFLlib does them: its Ditto begins with the
personalized model, and ours ends with it."""
UNUSED = ("h5py", "matplotlib", "matplotlib.pyplot")
"""PFLlib imports them for files that are not written here."""


def run(folder: Path, method: str, seed: int) -> Reply:
    settings = json.loads((folder / "settings.json").read_text())
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    server = server_of(method)(arguments_of(folder, settings, method), 0)
    found: Reply = {}

    orders = np.load(folder / "orders.npy")  # [clients, rounds, 2, samples]
    for client in server.clients:
        give_batches(client, iter(orders[client.id][:, TRAININGS[method]].reshape(-1, orders.shape[-1])))

    def measure() -> None:
        found["processor_s"] = time.process_time() - began
        personalized = method == "ditto"
        found["own"] = accuracies(server, personalized)
        server.send_models()
        found["next"] = found["own"] if personalized else accuracies(server, personalized)

    # Its loop evaluates before training, so the last round would have no figures.
    server.evaluate = server.evaluate_personalized = lambda: server.rs_test_acc.append(0.0)
    server.save_results, server.save_global_model = measure, lambda: None
    began = time.process_time()
    server.train()
    return found


def give_batches(client: Any, orders: Iterator[np.ndarray]) -> None:
    """Replaces the client's loader by one that gives the batches of the next order each time it is read."""
    x, y = map(torch.stack, zip(*client.load_train_data().dataset, strict=True))

    class Loader:
        def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for batch in torch.from_numpy(next(orders)).split(client.batch_size):
                yield x[batch], y[batch]

    client.load_train_data = Loader


def server_of(method: str) -> Any:
    from flcore.servers.serverditto import Ditto
    from flcore.servers.serverper import FedPer
    from flcore.servers.serverrep import FedRep

    return {"fedper": FedPer, "fedrep": FedRep, "ditto": Ditto}[method]


def accuracies(server: Any, personalized: bool) -> list[float]:
    _, counts, right, _ = server.test_metrics_personalized() if personalized else server.test_metrics()
    return [own / count for own, count in zip(right, counts, strict=True)]


def arguments_of(folder: Path, settings: dict[str, Any], method: str) -> types.SimpleNamespace:
    """Returns what PFLlib's command line would give, with all clients in each round."""
    from flcore.trainmodel.models import BaseHeadSplit, FedAvgCNN

    model: nn.Module = FedAvgCNN(in_features=1, num_classes=10, dim=1024)
    nn.utils.vector_to_parameters(torch.from_numpy(np.load(folder / "initial.npy")), model.parameters())
    if method != "ditto":
        head, model.fc = model.fc, nn.Identity()
        model = BaseHeadSplit(model, head)
    return types.SimpleNamespace(
        model=model,
        algorithm=method,
        dataset=str(folder),
        device="cpu",
        num_classes=10,
        global_rounds=settings["rounds"] - 1,  # it counts from 0
        num_clients=settings["clients"],
        local_epochs=settings["epochs"],
        plocal_epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        local_learning_rate=settings["learning_rate"],
        mu=settings["mu"],
        learning_rate_decay=False,
        learning_rate_decay_gamma=1.0,
        join_ratio=1.0,
        random_join_ratio=False,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        time_select=False,
        time_threthold=1e9,
        goal="",
        save_folder_name="",
        auto_break=False,
        eval_gap=settings["rounds"],
        dlg_eval=False,
        dlg_gap=1,
        batch_num_per_client=0,
        num_new_clients=0,
        fine_tuning_epoch=0,
        privacy=False,
        dp_sigma=0.0,
    )


def main() -> None:
    folder, pfllib = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    sys.path.insert(0, str(pfllib / "system"))
    sys.modules.update({name: types.ModuleType(name) for name in UNUSED})
    parent = Parent(versions(["torch", "numpy", "scikit-learn"]))
    parent.serve({"train": lambda method, seed: run(folder, method, seed)})


if __name__ == "__main__":
    main()
