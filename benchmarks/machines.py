"""Compares detectors of anomalies: the fleet's second moments, a shared autoencoder, and what a board has alone.

Pumps and the sound of motors are made up (`examples/machines`). Digits are real: the UCI handwritten digits that
scikit-learn ships, as vectors of 64 pixels; one class is unseen, and anomalous in the test. Boards see all others, or
two.

    python -m benchmarks.machines --out docs/figures/anomaly.json
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import IsolationForest

import hushfleet as hf
from hushfleet.aggregator.payloads.prepare import prepare
from hushfleet.learning.anomaly import EVERY, Threshold, alarm_rates
from hushfleet.learning.graph_session import open_session
from hushfleet.losses import auroc
from hushfleet.models.features import get_features

EXAMPLE = Path(__file__).parents[1] / "examples" / "machines"
COMPONENTS, TESTED = 4, 12
MODELS: dict[str, dict[str, Any]] = {
    "second moments": {
        "model": {"name": "second-moments"},
        "method": {"name": "second-moments"},
        "round": {"rounds": 1},
    },
    "shared autoencoder": {
        "model": {"name": "autoencoder"},
        "method": {"name": "dp-fedavg", "learning_rate": 0.05, "local_steps": 20, "batch_size": 8},
        "round": {"rounds": 20},
    },
}


class Boards(NamedTuple):
    """:param data: `pumps`, `sound`, `digits`, or `digits, two classes a board`."""

    data: str
    boards: int
    samples: int
    epsilons: tuple[float, ...]

    @property
    def false_alarms(self) -> float:
        """The share that a board may call unusual."""
        return 1e-4 if self.data in ("pumps", "sound") else 0.1


FLEETS = [
    Boards("pumps", 60, 20, (2, 8)),
    Boards("pumps", 60, 10, (2, 8)),
    Boards("pumps", 20, 20, (8,)),
    Boards("sound", 60, 20, (2, 8)),
    Boards("digits", 60, 20, (2, 8)),
    Boards("digits, two classes a board", 60, 20, (8,)),
]
FIGURES = ("auroc", "f1", "false_alarms", "detected")


def pumps(fleet: Boards, seed: int, folder: Path) -> tuple[hf.Data, dict[str, Any]]:
    """Returns the data, and the section of a task."""
    made = runpy.run_path(str(EXAMPLE / "make_data.py"))
    made["make"](folder / "machines.npz", machines=fleet.boards, train=fleet.samples, seed=seed)
    section = hf.task(EXAMPLE / "task.toml").to_plain()["data"]
    with np.load(folder / "machines.npz") as arrays:
        return hf.Data(**arrays), {key: section[key] for key in ("mean", "std", "input_shape")}


def sound(fleet: Boards, seed: int, folder: Path) -> tuple[hf.Data, dict[str, Any], list[np.ndarray]]:
    """Returns spectra of clips as data, the section of the clips' task, and mean spectra of 40 bands of both parts."""
    sys.path.insert(0, str(EXAMPLE))
    made = runpy.run_path(str(EXAMPLE / "make_sound.py"))
    made["make"](folder / "sound", machines=fleet.boards, train=fleet.samples, seed=seed)
    task = hf.task(EXAMPLE / "sound.toml", {"data.path": str(folder / "sound")})
    prepared, fine = prepare(task), get_features("sound:log-mel", (1, 1, made["RATE"]), sample_rate=made["RATE"])
    assert prepared.dataset is not None
    assert prepared.features is not None
    parts, session = (prepared.dataset.train, prepared.dataset.test), open_session(fine.graph)
    coarse = [prepared.features.of(part).x.transpose(0, 2, 1, 3) for part in parts]
    each = [[session.run(["features"], {"x": x[None]})[0] for x in part.x] for part in parts]
    means = [np.concatenate(spectra).reshape(-1, *fine.input_shape[1:]).mean(-1) for spectra in each]
    data = hf.Data(coarse[0], test_x=coarse[1], test_y=parts[1].labels[:, 0])
    return data, task.to_plain()["data"], means


def digits(fleet: Boards, seed: int) -> tuple[hf.Data, dict[str, Any]]:
    """:param seed: the class that is unseen, too."""
    found, rng = load_digits(), np.random.default_rng(seed)
    x, classes = found.data.astype(np.float32)[:, :, None, None] / 16, np.setdiff1d(np.arange(10), [seed])
    order = rng.permutation(np.flatnonzero(found.target != seed))
    trains, tests, places = [], [], np.arange(len(order))
    for board in range(fleet.boards):
        has = classes if fleet.data == "digits" else np.roll(classes, board * 4)[:2]
        own = order[np.isin(found.target[order], has) & (places % 4 > 0)]
        trains.append(rng.choice(own, fleet.samples, replace=False))
        own = order[np.isin(found.target[order], has) & (places % 4 == 0)]
        tests += [rng.choice(own, TESTED, replace=False), rng.choice(np.flatnonzero(found.target == seed), TESTED)]
    names = np.array([f"board-{number}" for number in range(fleet.boards)])
    data = hf.Data(
        x[np.concatenate(trains)],
        train_device=np.repeat(names, fleet.samples),
        test_x=x[np.concatenate(tests)],
        test_y=np.tile(np.repeat([0, 1], TESTED), fleet.boards),
        test_device=np.repeat(names, 2 * TESTED),
    )
    return data, {"mean": [0.3] * 64, "std": [0.38] * 64, "input_shape": [64, 1, 1]}


def measured(fleet: Boards, seed: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields the name and the mean figures over boards of each detector."""
    with TemporaryDirectory() as folder:
        means = list[np.ndarray]()
        if fleet.data == "sound":
            data, section, means = sound(fleet, seed, Path(folder))
        else:
            data, section = pumps(fleet, seed, Path(folder)) if fleet.data == "pumps" else digits(fleet, seed)
        more = {"features": "sound:log-mel"} if means else {}
        for epsilon, (name, settings) in product(fleet.epsilons, MODELS.items()):
            task = {
                "name": "machines",
                **settings,
                "model": {**settings["model"], **more, "loss": "reconstruction", "false_alarms": fleet.false_alarms},
                "privacy": {"accounting": "secure", "epsilon": epsilon},
                "data": {"name": "arrays", "path": "x", "partition": "given", "devices": fleet.boards, **section},
                "seed": seed,
            }
            run = hf.simulate(
                task,
                data=None if means else data,
                out=Path(folder) / f"{name} {epsilon}",
                workers=1,
                local_only=False,
                report=False,
                quiet=True,
            )
            yield (
                f"{name}, epsilon {epsilon:g}",
                {figure: float(run.devices[f"{figure}_own_local"].mean()) for figure in FIGURES},
            )
    parts = [data.train_x, data.test_x]
    if not means:
        mean, std = (np.array(section[key], np.float32).reshape(-1, 1, 1) for key in ("mean", "std"))
        parts = [(x.reshape(len(x), *section["input_shape"]) - mean) / std for x in parts]
    faults = np.asarray(data.test_y).reshape(fleet.boards, -1).astype(bool)
    compared = [("own components, alone", components, parts), ("isolation forest, alone", forest, parts)]
    compared += [("own components of mean spectra, alone", components, means)] * bool(means)
    for name, score, given in compared:
        rows = [x.reshape(fleet.boards, -1, math.prod(x.shape[1:])) for x in given]
        boards = [alone(score, fleet.false_alarms, *each) for each in zip(*rows, faults, strict=True)]
        yield name, {figure: float(np.mean([board[figure] for board in boards])) for figure in FIGURES}


def alone(score: Any, false_alarms: float, train: np.ndarray, test: np.ndarray, faults: np.ndarray) -> dict[str, float]:
    """Returns the figures of one board, with the threshold by its held-out samples."""
    held = np.arange(len(train)) % EVERY == EVERY - 1
    errors, own = score(train[~held], test), score(train[~held], train[held])
    return {
        "auroc": auroc(errors[~faults], errors[faults]),
        **alarm_rates(errors, faults, Threshold.of(own, false_alarms)),
    }


def components(train: np.ndarray, x: np.ndarray) -> np.ndarray:
    mean = train.mean(0)
    directions = np.linalg.svd(train - mean, full_matrices=False)[2][:COMPONENTS]
    rest = x - mean - (x - mean) @ directions.T @ directions
    return (rest**2).mean(1)


def forest(train: np.ndarray, x: np.ndarray) -> np.ndarray:
    return -IsolationForest(n_estimators=50, random_state=0).fit(train).score_samples(x)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--data", choices=sorted({fleet.data for fleet in FLEETS}), help="this one alone")
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    rows = []
    print("| data | boards, samples each | detector | AUROC, % | F1, % | false alarms, % | detected, % |")
    print("|---|---|---|---:|---:|---:|---:|")
    for fleet in [each for each in FLEETS if given.data in (None, each.data)]:
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(given.seeds):
            for name, figures in measured(fleet, seed):
                found.setdefault(name, []).append(figures)
        for name, figures in found.items():
            values = {figure: [100 * each[figure] for each in figures] for figure in FIGURES}
            columns = {figure: (round(np.mean(each), 1), round(np.std(each), 1)) for figure, each in values.items()}
            rows.append(
                {"data": fleet.data, "boards": fleet.boards, "samples": fleet.samples, "detector": name, **columns}
            )
            shown = (f"{mean} (sd {deviation})" for mean, deviation in columns.values())
            print(f"| {fleet.data} | {fleet.boards}, {fleet.samples} | {name} | {' | '.join(shown)} |")
            sys.stdout.flush()
    if given.out is not None:
        given.out.write_text(json.dumps({"seeds": given.seeds, "mean and deviation, %": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
