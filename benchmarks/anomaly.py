"""Compares anomaly detection by a fleet with each board alone, on the synthetic pumps of examples/machines.

    python -m benchmarks.anomaly [--json FILE] [--quick]

Each board is tested on its own windows, by AUROC, and at the threshold that it chooses with its own held-out windows,
by F1 and the share of normal windows that it reports as unusual. There are four models: the board's own model after the
last round; the shared model; the same network trained alone, for as many steps and without noise; and, also alone, as
many principal components as the network's code has, the best that a linear autoencoder can learn of the windows.
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

import hushfleet as hf
from benchmarks.common import Figures, make_parser, table, write
from hushfleet.data.samples import LabelledSamples
from hushfleet.edge_client.board.sample_files import load_arrays
from hushfleet.edge_client.randomness import SeededRandomness
from hushfleet.losses import auroc, normal
from hushfleet.model.anomaly import Threshold, divided, errors_of
from hushfleet.models import get_model
from hushfleet.models.autoencoder import CODE
from hushfleet.simulator.engines.fast.loaded_run import LoadedRun
from hushfleet.simulator.engines.fast.local_only import trained_alone

EXAMPLE = Path(__file__).parents[1] / "examples" / "machines"
SEEDS = (0, 1, 2)
NO_NOISE = 1e4  # an epsilon with so little noise that it changes nothing
make = runpy.run_path(str(EXAMPLE / "make_data.py"))["make"]
Errors = Callable[[LabelledSamples], np.ndarray]


class PumpFleet(NamedTuple):
    """A fleet: number of boards, windows per board, and epsilon per board; None: no noise."""

    boards: int
    windows: int
    epsilon: float | None


FLEETS = (
    *(PumpFleet(60, 20, epsilon) for epsilon in (8, None, 2)),
    *(PumpFleet(boards, windows, 8) for boards, windows in ((60, 10), (20, 20))),
)


class Found(NamedTuple):
    """The figures of a model on a board's test windows, in fractions of 1."""

    auroc: float
    f1: float
    false_alarms: float


def found(errors: Errors, held_out: LabelledSamples, test: LabelledSamples) -> Found:
    assert test.targets.false_alarms is not None
    chosen, each, fine = Threshold.of(errors(held_out), test.targets.false_alarms), errors(test), normal(test.labels)
    called = each > chosen.error
    right = int((called & ~fine).sum())
    return Found(auroc(each[fine], each[~fine]), 2 * right / (called.sum() + (~fine).sum()), float(called[fine].mean()))


def components(train: LabelledSamples) -> Errors:
    """Returns a function for the distance from the span of the principal components of these samples."""
    mean = train.y.mean(0, dtype=np.float64)
    _, _, directions = np.linalg.svd(train.y - mean, full_matrices=False)
    kept = directions[:CODE]
    return lambda samples: np.square(samples.y - mean - (samples.y - mean) @ kept.T @ kept).mean(1)


def measure(fleet: PumpFleet, seed: int, folder: Path) -> dict[str, Found]:
    """Returns the means over boards, by model."""
    make(folder / "machines.npz", machines=fleet.boards, train=fleet.windows, seed=seed)
    changes = {"data.path": str(folder / "machines.npz"), "data.devices": fleet.boards, "seed": seed}
    task = hf.task(EXAMPLE / "task.toml", {**changes, "privacy.epsilon": fleet.epsilon or NO_NOISE})
    done = hf.simulate(
        task, out=folder / "run", local_only=False, evaluate_every=task.round.rounds, runtime="vmap", quiet=True
    )
    run = LoadedRun(folder / "run", "onnx")
    initial = get_model("autoencoder", input_shape=run.spec.model.input_shape).init(seed)
    shared = flat(done, "global")
    rows: dict[str, list[Found]] = {}
    for index, device in enumerate(done.result.details.devices):
        samples = load_arrays(run.folder.device(device).train, run.spec.model)
        train, held_out = map(samples.take, divided(samples.labels))
        alone = trained_alone(run, device, initial, SeededRandomness(seed, index))
        models: dict[str, Errors] = {
            name: partial(errors_of, run.inference, params)
            for name, params in (("own, of the fleet", flat(done, device)), ("shared", shared), ("alone", alone))
        }
        models["components, alone"] = components(train)
        for name, errors in models.items():
            rows.setdefault(name, []).append(found(errors, held_out, run.local_test(device)))
    return {name: Found(*map(fmean, zip(*each, strict=True))) for name, each in rows.items()}


def flat(run: hf.Run, which: str) -> np.ndarray:
    """Returns a model of a run, float32 `[d]`."""
    return np.concatenate([tensor.numpy().ravel() for tensor in run.model(which).values()])


def main() -> int:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--quick", action="store_true", help="the first fleet with one seed")
    options = parser.parse_args()
    figures: Figures = {"seeds": SEEDS[: 1 if options.quick else None], "fleets": []}
    for fleet in FLEETS[: 1 if options.quick else None]:
        by_seed = []
        for seed in figures["seeds"]:
            with tempfile.TemporaryDirectory() as folder:
                by_seed.append(measure(fleet, seed, Path(folder)))
        for name in by_seed[0]:
            columns = zip(*(each[name] for each in by_seed), strict=True)
            spread = {
                field: [round(value, 4) for value in each] for field, each in zip(Found._fields, columns, strict=True)
            }
            figures["fleets"].append({**fleet._asdict(), "model": name, **spread})
        table(f"{fleet}", [row(each) for each in figures["fleets"][-len(by_seed[0]) :]])
        write(options, figures)
    return 0


def row(figures: Figures) -> Figures:
    """Returns mean and standard deviation over seeds, in percent."""
    shown = {"model": figures["model"]}
    for field in Found._fields:
        values = [100 * value for value in figures[field]]
        shown[field] = f"{fmean(values):.1f} (sd {stdev(values) if len(values) > 1 else 0:.1f})"
    return shown


if __name__ == "__main__":
    sys.exit(main())
