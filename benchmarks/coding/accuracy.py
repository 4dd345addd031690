"""Accuracy against bytes: the same noisy federation with each codec, over several seeds.

At one seed the noise, the order and the partition are the same for all codecs, so differences are taken seed by seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.coding.updates import find_images
from benchmarks.versus.data import write_idx
from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.aggregator.results.result import WirePoint
from hushfleet.data.sets import load
from hushfleet.simulator.engines.fast.runtimes import unavailable
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.studies.sweep import sweep_wire

REFERENCE = "float32"
CHOICES = (REFERENCE, "float16", "0.25", "0.5", "1", "2", "4", "one-bit")
TEST_IMAGES = 2000


@dataclass(frozen=True)
class Case:
    """A federation whose noise costs accuracy visibly, and leaves it well above chance.

    :param samples: training images of all devices.
    """

    network: str
    method: str
    devices: int
    samples: int
    rounds: int
    epochs: int
    learning_rate: float
    clip_norm: float
    noise_multiplier: float

    @property
    def name(self) -> str:
        return f"{self.network}, {self.method}"

    def task(self, data_set: str, seed: int) -> Task:
        return parse_task(
            {
                "name": "wire-accuracy",
                "seed": seed,
                "model": {"name": self.network},
                "method": {
                    "name": self.method,
                    "optimizer": "adam",
                    "learning_rate": self.learning_rate,
                    "batch_size": 16,
                    "local_epochs": self.epochs,
                },
                "privacy": {"clip_norm": self.clip_norm, "noise_multiplier": self.noise_multiplier},
                "data": {
                    "name": data_set,
                    "devices": self.devices,
                    "limit": self.samples,
                    "test_fraction": 0.0,
                },
                "round": {"rounds": self.rounds},
            }
        )


CASES = (
    Case("digits-cnn", "dp-fedavg", 10, 1437, 15, 2, 0.005, 2.0, 0.2),
    Case("digits-cnn", "fedglp-adp", 10, 1437, 15, 2, 0.005, 2.0, 0.15),
    Case("mnist-cnn", "dp-fedavg", 6, 1500, 6, 1, 0.001, 2.0, 0.075),
)


def accuracy_against_bytes(
    case: Case,
    folder: Path,
    *,
    data_dir: Path | None,
    seeds: Sequence[int],
    choices: Sequence[str] = CHOICES,
    processes: int = 0,
    told: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Every codec at every seed."""
    images = find_images(case.network, data_dir, folder)
    if images.data_dir is not None:
        write_part(images.name, images.data_dir, folder / "part", case.samples)
        images = images._replace(data_dir=folder / "part")
    runtime = "onnx" if unavailable("native", case.network) else "native"
    points: dict[str, list[WirePoint]] = {choice: [] for choice in choices}
    with Workers(processes) as workers:
        for seed in seeds:
            task = case.task(images.name, seed)
            simulation = begin(task, folder / f"seed-{seed}", data_dir=images.data_dir)
            swept = sweep_wire(simulation, workers, choices, [], runtime=runtime)
            for choice, point in zip(choices, swept, strict=True):
                points[choice].append(point)
                told(f"{case.name}, seed {seed}, {choice}: {100 * point.accuracy_global:.1f} %")
    return {
        "case": case.name,
        "images": images.words or images.name,
        "seeds": list(seeds),
        **{name: getattr(case, name) for name in ("devices", "samples", "rounds", "noise_multiplier", "clip_norm")},
        "codecs": {choice: summary(points[choice], points[REFERENCE]) for choice in choices},
    }


def summary(points: Sequence[WirePoint], reference: Sequence[WirePoint]) -> dict[str, Any]:
    """One codec over the seeds; `differences` are to float32 at the same seed, `spread` is their own deviation."""
    accuracies = [point.accuracy_global for point in points]
    differences = [one.accuracy_global - other.accuracy_global for one, other in zip(points, reference, strict=True)]
    own = [one.accuracy_own_common - other.accuracy_own_common for one, other in zip(points, reference, strict=True)]
    seed_spread = _spread([point.accuracy_global for point in reference])
    return {
        "accuracies": accuracies,
        "accuracy": fmean(accuracies),
        "spread": _spread(accuracies),
        "differences": differences,
        "difference": fmean(differences),
        "difference_own_models": fmean(own),
        "inside_seed_spread": abs(fmean(differences)) <= seed_spread,
        "uplink_bytes": fmean(point.uplink_bytes for point in points),
        "bits_per_value": fmean(point.bits_per_value for point in points),
    }


def write_part(name: str, data_dir: Path, folder: Path, samples: int) -> None:
    """The first images of an IDX data set as files of the same name: testing on all would take most of the time."""
    dataset = load(name, data_dir=data_dir)
    parts = (dataset.train.take(slice(0, samples)), dataset.test.take(slice(0, TEST_IMAGES)))
    write_idx(folder / name, *((part.images, part.labels) for part in parts))


def _spread(values: Iterable[float]) -> float:
    """Standard deviation over seeds."""
    values = list(values)
    return stdev(values) if len(values) > 1 else 0.0
