"""Runs a cell of pfl-research's own benchmark, CIFAR-10 IID with central privacy, by pfl and by our fast engine.

    python -m benchmarks.pfl_cell --data-dir DIR --peers-python PYTHON [--seeds 0,1,2] [--rounds 21]

The settings are those of its `benchmarks/image_classification` (`configs/baseline.yaml`, the network `simple_cnn`):
1,000 users with 50 images, 50 in a round, one epoch of SGD at 0.1 with batches of 10, central rate 1, clip norm 0.4,
and the noise of 3,000 rounds at epsilon 2 and delta 1e-6 of a population of a million, scaled from cohorts of 1,000 to
50. pfl's server adds the noise; our clients divide it, so the sum has the same. Two things differ from the benchmark:
the number of rounds, and images are read as images (its reader takes planes of one colour for pixels).

Both sides have the same images, normalised alike, first model, cohorts, and batches; what differs by chance is dropout
and noise. A first round has neither: `mnist-cnn` on upscaled digits, after which both models must be equal but for
rounding, which more rounds amplify.

pfl's interpreter is that of `benchmarks.simulation`. Each side has one process; they take turns.
"""

from __future__ import annotations

import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common import Figures, make_parser, table, write
from benchmarks.frameworks.workload import WORKLOADS, TrainingJob, Workload
from benchmarks.processes import ReadyProcess
from benchmarks.simulation import Framework, compared, measure, times, write_job
from hushfleet.aggregator.rounds.policy import choose_cohort
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.models import get_model
from hushfleet.simulator.fleet import device_names

NOISE = 0.031638
"""The noise's standard deviation over the clip norm: 0.05 x 0.63276, which pfl 0.6's `PLDPrivacyAccountant` computes,
as the benchmark's code does; its `RDPPrivacyAccountant` gives 0.05 x 0.72467."""
CELL = Workload("pfl-cell", 1000, 50, 50, 10, 1, "sgd", 0.1, noise_multiplier=NOISE, clip_norm=0.4)
CELL = replace(CELL, central=True, data="cifar10", network="svhn-cnn", turn=10)
EXACT = replace(WORKLOADS["W3"], name="exact", clients=200, learning_rate=0.01, central=True)
EXACT = replace(EXACT, noise_multiplier=0.0, clip_norm=0.1)


def make_job(workload: Workload, data_dir: Path | None, rounds: int, folder: Path) -> tuple[TrainingJob, Path]:
    """Writes the workload's folder with the cohorts and batches that our engine will draw."""
    job, data_dir = write_job(workload, data_dir, folder)
    names, seed = device_names(workload.clients), workload.seed
    chosen = [choose_cohort(names, size=workload.cohort, seed=seed, round=each) for each in range(1, rounds + 1)]
    cohorts = [[names.index(name) for name in cohort] for cohort in chosen]
    orders = [
        [SeededRandomness(seed, client).order(each).permutation(workload.samples) for client in cohort]
        for each, cohort in enumerate(cohorts, 1)
    ]
    job.save({"cohorts": np.array(cohorts), "orders": np.array(orders), "initial": glorot(job)})
    return job, data_dir


def glorot(job: TrainingJob) -> np.ndarray:
    """Returns the first model with each weight's range as in Glorot's initialisation, which the benchmark's code has;
    biases keep PyTorch's."""
    vector = np.array(job.array("initial"))
    for name, tensor in get_model(job.workload.network).layout.unflatten(vector).items():
        if name.endswith("weight"):
            inputs, outputs = (math.prod(tensor.shape) // tensor.shape[axis] for axis in (0, 1))
            tensor *= math.sqrt(6 / (inputs + outputs) * inputs)
    return vector


def sides_of(job: TrainingJob, data_dir: Path, python: str) -> list[Framework]:
    folder = str(job.folder)
    ours = ("-m", "benchmarks.frameworks.ours", folder, "native", "1", f"{folder}/run", str(data_dir))
    pfl = ("-m", "benchmarks.frameworks.pfl_simulation", folder)
    return [Framework("ours", "ours", ours), Framework("pfl", "pfl", pfl, python)]


def run(workload: Workload, data_dir: Path, turns: int, python: str) -> list[Figures]:
    """Returns a row of each side."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        job, _ = make_job(workload, data_dir, 2 + turns * workload.turn, Path(name))
        rows = compared(measure(job, sides_of(job, data_dir, python), turns=turns, check=True))["frameworks"]
        if failed := [row["failure"] for row in rows if row["failure"]]:
            raise SystemExit("\n".join(failed))
        return rows


def distance(python: str) -> float:
    """Returns the distance of both models after a round without noise and dropout, over that of ours from the first."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        job, data_dir = make_job(EXACT, None, 2, Path(name))
        models = []
        for side in sides_of(job, data_dir, python):
            with ReadyProcess(*side.command, python=side.python) as child:
                child.ask("round")
                child.ask("save", f"{name}/model.npy")
                models.append(np.load(f"{name}/model.npy"))
        ours, pfl = models
        return float(np.linalg.norm(ours - pfl) / np.linalg.norm(ours - job.array("initial")))


def summary(runs: Sequence[Sequence[Figures]]) -> list[Figures]:
    """Returns a line of each side, and one of the differences: accuracies in percent over the seeds, and processor time
    and clock as medians over all turns."""
    sides = list(zip(*runs, strict=True))
    accuracies = {rows[0]["label"]: np.array([100 * row["accuracy"] for row in rows]) for rows in sides}
    lines: list[Figures] = []
    for name, of_seed in [*accuracies.items(), ("ours - pfl; times", accuracies["ours"] - accuracies["pfl"])]:
        sd = float(of_seed.std(ddof=1)) if len(runs) > 1 else None
        error = sd / math.sqrt(len(runs)) if sd is not None else None
        lines.append({"side": name, "accuracy": float(of_seed.mean()), "sd": sd, "standard error": error})
    for line, rows in zip(lines, sides, strict=False):
        for what, key in (("CPU us/sample", "processor_us"), ("samples/s", "rates")):
            line[what] = statistics.median(value for row in rows for value in row[key])
    ours, pfl = sides
    by_seed = list(zip(ours, pfl, strict=True))
    lines[2]["CPU us/sample"] = statistics.median(times("processor_us", pfl, own) for own, pfl in by_seed)
    lines[2]["samples/s"] = statistics.median(times("rates", own, pfl) for own, pfl in by_seed)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with cifar10/")
    parser.add_argument("--peers-python", required=True, help="interpreter that has pfl")
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=21, help="1 and whole tens (default %(default)s)")
    options = parser.parse_args(arguments)
    figures: Figures = {"distance_without_chance": distance(options.peers_python)}
    print(f"a round without noise and dropout: distance {figures['distance_without_chance']:.1e} of the update")
    runs: list[list[Figures]] = []
    for seed in options.seeds:
        cell = replace(CELL, seed=seed)
        runs.append(run(cell, options.data_dir, options.rounds // cell.turn, options.peers_python))
        figures |= {"rounds": options.rounds, "seeds": options.seeds, "runs": runs, "summary": summary(runs)}
        write(options, figures)
    table(CELL.text, figures["summary"])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # leaves the contexts, so that children end
    main()
