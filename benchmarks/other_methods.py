"""Compares DP-FedAvg and FedGLP-ADP with `hush`, at the same epsilon against the server, on fleets of small devices.

    python -m benchmarks.other_methods --kept FILE [--data-dir DIR] [--part K/N] [--json FILE]

Each run by the product's fast engine is a line of --kept, which `benchmarks.private_gain --others` draws. Unit device,
delta 1e-5, 20 rounds with every device in each. `sum`: updates are only opened as sums, and all devices are honest.
FedGLP-ADP cannot be summed securely, because each device sends other entries; its `sum` is the result if it could be:
noise for the sum's epsilon alone, and clip norms that follow raw updates, as published. `local`: each device adds all
of the noise. The networks are the kit's own for these images; `dp-fedavg-head` trains the linear head of `hush`. Rates
and clip norms are the best of a few at epsilon 8.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import Figures, make_parser, write
from benchmarks.updates import train
from hushfleet.aggregator.config.task import parse_task
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import begin

DELTA = 1e-5
EPSILONS = (2.0, 8.0, 4.0, 1.0)
SEEDS = (0, 1, 2)
NETWORKS = {"digits": "digits-cnn", "fashion-mnist": "mnist-cnn"}
FEATURES = {"digits": "filters", "fashion-mnist": "scattering"}
CNN = {"optimizer": "adam", "learning_rate": 0.01, "batch_size": 16, "local_epochs": 5}
HEAD = {"optimizer": "sgd", "learning_rate": 16.0, "batch_size": 2048, "local_epochs": 5}
METHODS: dict[str, dict[str, Any]] = {
    "dp-fedavg": {"name": "dp-fedavg", **CNN},
    "fedglp-adp": {"name": "fedglp-adp", **CNN},
    "dp-fedavg-head": {"name": "dp-fedavg", **HEAD},
}
CLIP_NORMS = {"dp-fedavg": 1.0, "fedglp-adp": 0.5, "dp-fedavg-head": 3.0}


@dataclass(frozen=True)
class MethodRun:
    """One run.

    :param noise: `sum` or `local`.
    :param epsilon: None without noise, to check that the settings learn.
    """

    data: str
    devices: int
    images: int
    method: str
    noise: str
    epsilon: float | None
    seed: int

    def plain(self) -> dict[str, Any]:
        """Returns the task as plain values."""
        privacy: dict[str, Any] = {"clip_norm": CLIP_NORMS[self.method], "delta": DELTA}
        if self.epsilon is None:
            privacy["noise_multiplier"] = 0.0
        elif self.noise == "local":
            privacy |= {"accounting": "strict", "epsilon": self.epsilon}
        elif self.method == "fedglp-adp":
            privacy |= {"accounting": "as-published", "epsilon": self.epsilon}
        else:
            privacy |= {"accounting": "secure", "honest_fraction": 1.0, "epsilon": self.epsilon}
        head = self.method.endswith("head")
        model = {"name": "linear", "features": FEATURES[self.data]} if head else {"name": NETWORKS[self.data]}
        return {
            "name": f"{self.data}-{self.method}",
            "seed": self.seed,
            "model": model,
            "method": METHODS[self.method],
            "privacy": privacy,
            "data": {
                "name": self.data,
                "devices": self.devices,
                "limit": self.devices * self.images,
                "test_fraction": 0,
                "min_samples": 2,
            },
            "round": {"rounds": 20, "min_updates": self.devices},
        }


def cells() -> Iterator[MethodRun]:
    """Yields the most important cells first, so that an early stop keeps them."""
    for seed in SEEDS:
        for noise in ("sum", "local"):
            for epsilon in EPSILONS:
                for fleet in (("digits", 100, 12), ("digits", 30, 12)):
                    yield from (MethodRun(*fleet, method, noise, epsilon, seed) for method in METHODS)
        for epsilon in EPSILONS:
            yield MethodRun("fashion-mnist", 100, 20, "dp-fedavg-head", "sum", epsilon, seed)
    for method in METHODS:
        yield from (MethodRun("digits", n, 12, method, "sum", None, 0) for n in (100, 30))
    for epsilon in EPSILONS[:2]:
        yield from (
            MethodRun("fashion-mnist", 100, 20, method, "sum", epsilon, 0) for method in ("dp-fedavg", "fedglp-adp")
        )


def measure(cell: MethodRun, *, data_dir: Path | None) -> Figures:
    """Returns accuracies on the common test set after the last round, of the global model and as the mean of the
    devices' personalized models; and the epsilons spent, by the accountant."""
    began, task = time.process_time(), parse_task(cell.plain(), where=cell.method)
    with tempfile.TemporaryDirectory() as folder:
        simulation = begin(task, Path(folder) / "run", data_dir=data_dir)
        train(simulation, evaluate_last=1)
        result = assemble(simulation, engine="fast")
    row, spent = result.rounds[-1], result.privacy[0]  # all devices spend the same
    return {
        "global": row.accuracy_global,
        "own": row.accuracy_own_common,
        "epsilon_server": spent.noised_server or spent.epsilon_server,
        "epsilon_release": spent.noised_release or spent.epsilon_release,
        "seconds": round(time.process_time() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="finished cells, a line each")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every N-th cell, from the K-th (0 is the first)")
    options = parser.parse_args(arguments)
    first, parts = map(int, options.part.split("/"))
    lines = list(map(json.loads, options.kept.read_text().splitlines() if options.kept.exists() else []))
    done = {MethodRun(**line["cell"]) for line in lines}
    for cell in list(cells())[first::parts]:
        if cell not in done:
            line = {"cell": asdict(cell), **measure(cell, data_dir=options.data_dir)}
            print(line, flush=True)
            with options.kept.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
    write(options, {"cells": lines})


if __name__ == "__main__":
    main()
