"""Compares FedPer, FedRep and Ditto with PFLlib's, on one partition of Fashion-MNIST.

    python -m benchmarks.pfllib --pfllib CHECKOUT --data-dir DIR [--peers-python PYTHON] [--seeds 0,1,2]

PFLlib (github.com/TsingZ0/PFLlib) is in no package index: --pfllib names a checkout, whose interpreter, --peers-python,
needs torch and scikit-learn. Both sides have the same clients, with class shares from Dirichlet(0.1), first model
(PFLlib's FedAvgCNN is our `mnist-cnn`), rates, epochs and batches; all clients take part. Each seed is another
partition and first model. So accuracies may differ by rounding alone, which training amplifies. All clients have
equally many samples, in whole batches: PFLlib weighs clients by samples, which we do not, and leaves a last, smaller
batch out.

Accuracies are means over the clients, each on test images with its own class shares: `own`, of the model that it has
trained in the last round, and `next`, of its head on the new shared layers, which is what PFLlib prints. Processor time
is of the rounds alone, with one process a side.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figures, make_parser, table, write
from benchmarks.processes import ReadyProcess
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.results.gains import final_by_device
from hushfleet.data.sets import load
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.next_models import next_models_accuracy
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.fleet import make_fleet
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import begin

EPOCHS, BATCH, MU = 1, 10, 1.0
SETTINGS = {"rounds": 15, "clients": 20, "epochs": EPOCHS, "batch_size": BATCH, "learning_rate": 0.05, "mu": MU}
IMAGES, TEST_IMAGES = 50, 150
"""Of each client."""
METHODS: dict[str, dict[str, Any]] = {
    "fedper": {"local_epochs": EPOCHS},
    "fedrep": {"local_epochs": 2 * EPOCHS, "head_epochs": EPOCHS},
    "ditto": {"local_epochs": EPOCHS, "lambda_": MU},
}
SIDES = ("ours", "pfllib")


def task_of(method: str, seed: int, data: dict[str, Any]) -> Task:
    training = {"optimizer": "sgd", "learning_rate": SETTINGS["learning_rate"], "batch_size": BATCH}
    return parse_task(
        {
            "name": method,
            "seed": seed,
            "model": {"name": "mnist-cnn"},
            "method": {"name": method, **training, **METHODS[method]},
            "privacy": {"clip_norm": math.inf, "noise_multiplier": 0.0},
            "data": {"devices": SETTINGS["clients"], **data},
            "wire": {"codec": "float32"},
            "round": {"rounds": SETTINGS["rounds"]},
        }
    )


def write_partition(seed: int, data_dir: Path, folder: Path) -> dict[str, Any]:
    """Writes the clients' images for both sides; returns the `[data]` of our tasks."""
    dataset = load("fashion-mnist", data_dir=data_dir)
    dealt = {"name": "fashion-mnist", "partition": "dirichlet-device", "alpha": 0.1, "test_fraction": 0.0}
    fleet = make_fleet(task_of("fedper", seed, {**dealt, "limit": IMAGES * SETTINGS["clients"]}), dataset)
    arrays: dict[str, list[np.ndarray]] = {f"{part}_{what}": [] for part in ("train", "test") for what in "xyd"}
    for device in fleet.devices:
        train, test = device.train.samples, device.local_test.samples
        test = test.take(np.linspace(0, len(test) - 1, TEST_IMAGES).astype(int))
        for part, samples in (("train", train), ("test", test)):
            (folder / part).mkdir(exist_ok=True)
            np.savez(folder / part / f"{device.index}.npz", data={"x": samples.x, "y": samples.y})
            of_device = np.full(len(samples), device.index)
            for what, array in zip("xyd", (samples.images, samples.labels, of_device), strict=True):
                arrays[f"{part}_{what}"].append(array)
    names = {key: key.replace("_d", "_device") for key in arrays}
    np.savez(folder / "data.npz", **{names[key]: np.concatenate(parts) for key, parts in arrays.items()})
    seeds = [SeededRandomness(seed, device.index) for device in fleet.devices]
    orders = [[two_orders(each.order(round)) for round in range(1, SETTINGS["rounds"] + 1)] for each in seeds]
    np.save(folder / "orders.npy", orders)
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    scale = {"mean": list(dataset.mean), "std": list(dataset.std)}
    return {"name": "arrays", "path": str(folder / "data.npz"), "partition": "given", **scale}


def two_orders(rng: np.random.Generator) -> list[np.ndarray]:
    """Returns the orders of a client's samples in the two epochs of a round, as our engine draws them."""
    return [rng.permutation(IMAGES) for _ in range(2)]


def run_ours(method: str, seed: int, data: dict[str, Any], folder: Path) -> Figures:
    """Returns what PFLlib's side answers; `next` is the mean alone."""
    simulation = begin(task_of(method, seed, data), folder / method, data_dir=None)
    np.save(folder / "initial.npy", simulation.prepared.initial)
    simulation = replace(simulation, prepared=replace(simulation.prepared, evaluate_global=None))
    with Workers(1) as workers, EventLog(simulation.folder.events) as events:
        rounds, closed = SETTINGS["rounds"], list[float]()
        every: dict[str, Any] = {"evaluate_every": rounds, "evaluate_last": 1}  # only the last round has tests
        every["on_closed"] = lambda _: closed.append(workers.processor_s())
        run_rounds(simulation, workers, events, runtime="native", **every)
        own = final_by_device(assemble(simulation, engine="fast").details.accuracy_own_local, SETTINGS["clients"])
        following = next_models_accuracy(simulation, workers, rounds, runtime="native") if method != "ditto" else None
    used = (closed[-2] - closed[0]) / (rounds - 2) * rounds
    return {"processor_s": used, "own": own, "next": [statistics.fmean(own) if following is None else following]}


def run_seed(seed: int, pfllib: Path, python: str, data_dir: Path) -> list[Figures]:
    """Returns a row of each method and side."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        data = write_partition(seed, data_dir, Path(name))
        for method in METHODS:
            answers = [run_ours(method, seed, data, Path(name))]
            command = ("-m", "benchmarks.frameworks.pfllib_clients", name, str(pfllib.absolute()))
            with ReadyProcess(*command, python=python) as child:
                answers.append(child.ask("train", method, seed))
            for side, answer in zip(SIDES, answers, strict=True):
                means = {what: 100 * statistics.fmean(answer[what]) for what in ("own", "next")}
                rows.append({"method": method, "side": side, "seed": seed, **means, "cpu_s": answer["processor_s"]})
                print(rows[-1], flush=True)
    return rows


def summary(rows: Sequence[Figures]) -> list[Figures]:
    """Returns a line of each method and side: means over the seeds, their deviations, and the differences to ours."""
    lines = []
    for method in METHODS:
        by_side = {side: [row for row in rows if (row["method"], row["side"]) == (method, side)] for side in SIDES}
        for side, found in by_side.items():
            line: Figures = {"method": method, "side": side}
            for what in ("own", "next"):
                values = [row[what] for row in found]
                apart = [row[what] - own[what] for row, own in zip(found, by_side["ours"], strict=True)]
                several = len(values) > 1
                line |= {what: statistics.fmean(values), f"sd of {what}": statistics.stdev(values) if several else None}
                line |= {"minus ours": statistics.fmean(apart)} if what == "own" else {}
                line |= {"sd": statistics.stdev(apart) if several else None} if what == "own" else {}
            pairs = zip(found, by_side["ours"], strict=True)
            line["x ours, CPU"] = statistics.median(row["cpu_s"] / own["cpu_s"] for row, own in pairs)
            lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--pfllib", type=Path, required=True, help="a checkout of github.com/TsingZ0/PFLlib")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with fashion-mnist/")
    parser.add_argument("--peers-python", required=True, help="interpreter that has torch and scikit-learn")
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2])
    options = parser.parse_args(arguments)
    if not (options.pfllib / "system" / "flcore").is_dir():
        parser.error(f"--pfllib {options.pfllib}: there is no PFLlib, which has system/flcore; name a checkout of it")
    rows: list[Figures] = []
    for seed in options.seeds:
        rows += run_seed(seed, options.pfllib, options.peers_python, options.data_dir)
        write(options, {"settings": SETTINGS, "rows": rows, "summary": summary(rows)})
    table("Fashion-MNIST, Dirichlet(0.1)", summary(rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # leaves the contexts, so that children end
    main()
