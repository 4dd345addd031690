"""Measures how far the gains that `hushfleet plan` predicts are from those that fleets have.

    python -m benchmarks.gain_errors --kept FILE --part fleets|product [--data-dir DIR] [--data NAME] [--minutes M]
    python -m benchmarks.gain_errors --kept FILE --errors FILE

A fleet is a line of --kept. There are two kinds:

- `fleets`: drawn at random by a seed, and simulated as for the gain table, each with a seed of its own; of the data
  sets of the table (`gain_sets.IN_TABLE`) and of others;
- `product`: the fleets of `PRODUCT`, by the product's fast engine, with all that a real fleet has (secure sums with
  nine of ten devices honest, whole numbers, encoded models). For each, `plan --data` predicts the gain from `PUBLIC`
  other images of the same data set.

--errors compares them with the predictions of three ways, and writes the intervals that `hushfleet plan` prints:

- `other data`: the table, for images of a kind that is not in it: errors on fleets of other data sets;
- `same data`: the table, for a data set that is in it: errors on fleets of these, with other seeds and other sizes;
- `simulated`: `plan --data`: errors on `product`.

An error is divided by its scale (`SCALES`): a floor plus the size of the predicted gain, or the spread of the seeds.
The interval has the 5 % and 95 % quantiles of these, by r and by how unequal labels are (and for colour). It is
stretched until it contains nine of ten gains that were left out when the quantiles were computed: those of a data set,
or, for a data set of the table, those of a fleet.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.common import Figures, make_parser
from benchmarks.gain_sets import IN_TABLE, SETS, images_of
from hushfleet.aggregator.config.task import parse_task
from hushfleet.aggregator.planning.advice import Question
from hushfleet.aggregator.planning.gain_errors import Way, kind_of, scale_of
from hushfleet.aggregator.planning.gain_table import gain_table
from hushfleet.aggregator.results.events import EventLog
from hushfleet.data.samples import Samples
from hushfleet.graphs.features import FeatureGraph
from hushfleet.methods.hush_rule import signal
from hushfleet.models.features import get_features
from hushfleet.simulator.engines.fast.engine import run_rounds
from hushfleet.simulator.engines.fast.local_only import train_alone
from hushfleet.simulator.engines.fast.workers import Workers
from hushfleet.simulator.own_heads import choose_own_heads
from hushfleet.simulator.results import assemble
from hushfleet.simulator.run_folder import begin
from hushfleet.simulator.studies.plan.own_images import OwnImages, features_of, measured_table
from hushfleet.simulator.studies.plan.simulated import Images, SimulatedFleet, deal

DELTA = 1e-5
ALPHAS = (None, 0.5, 0.1)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
EACH = 9  # fleets of a data set
MOST = {1: (12_000, 2_000), 3: (5_000, 1_000)}
"""Images to train on and to test with, by the number of channels."""
IMAGES, LEAST_DEVICES, MOST_DEVICES = (5, 60), 14, 1000
PUBLIC = (600, 6000)  # images for `plan --data`, in turn
PRODUCT_EPSILONS, PRODUCT_TEST = (2.0, 8.0), 1000
PRODUCT: tuple[tuple[str, int, int, float | None], ...] = (
    ("fashion-mnist", 50, 20, 0.5), ("mnist", 50, 20, 0.1), ("letters", 50, 20, None), ("digits", 60, 20, 0.5),
    ("mnist", 50, 20, 0.5), ("fashion-mnist", 50, 20, 0.1), ("photographs", 100, 20, None), ("digits", 24, 20, None),
    ("fashion-mnist", 14, 20, None), ("mnist", 30, 20, None), ("letters", 100, 20, 0.1), ("photographs", 50, 20, 0.5),
    ("mnist", 400, 20, 0.1), ("digits", 100, 12, 0.1), ("letters", 30, 40, None), ("mnist", 100, 5, 0.5),
    ("fashion-mnist", 100, 40, 0.5), ("fashion-mnist", 100, 20, None), ("letters", 200, 20, 0.5),
    ("fashion-mnist", 400, 20, 0.1),
)  # fmt: skip
SHARE = 0.9  # of gains that are in their intervals
HEADS = ("own", "common")

SCALES: dict[Way, dict[str, dict[str, float]]] = {
    "other data": {"own": {"floor": 0.02, "gain": 1, "spread": 0}, "common": {"floor": 0.05, "gain": 0, "spread": 0}},
    "same data": {"own": {"floor": 0.02, "gain": 1, "spread": 0}, "common": {"floor": 0.05, "gain": 0, "spread": 0}},
    "simulated": {"own": {"floor": 0.01, "gain": 0, "spread": 1}, "common": {"floor": 0.02, "gain": 0, "spread": 1}},
}
SIGNALS: dict[Way, tuple[float, ...]] = {
    "other data": (4, 8, 16, 32, 64, 128, 256, 512),
    "same data": (4, 16, 64, 256),
    "simulated": (32,),
}
NEAREST = 4  # errors of a data set for a signal, at least


@dataclass(frozen=True)
class MeasuredFleet:
    """:param part: how it is measured, `fleets` or `product`."""

    part: str
    data: str
    devices: int
    images: int
    alpha: float | None
    seed: int

    def question(self, epsilon: float) -> Question:
        wanted = SETS[self.data]
        return Question(
            devices=self.devices,
            images=self.images,
            classes=wanted.classes,
            epsilon=epsilon,
            delta=DELTA,
            features=wanted.features,
            honest_fraction=1.0 if self.part == "fleets" else 0.9,
            alpha=self.alpha,
            shape=wanted.shape,
        )


def drawn_fleets() -> Iterator[MeasuredFleet]:
    """Yields fleets of random sizes; small numbers are as likely as large ones."""
    for data, wanted in SETS.items():
        for number in range(EACH):
            rng = np.random.default_rng([number, *data.encode()])
            most = 1100 if data == "digits" else MOST[wanted.shape[0]][0] // 2  # few enough for every class to last
            images = _log_uniform(rng, *IMAGES)
            devices = _log_uniform(rng, LEAST_DEVICES, max(LEAST_DEVICES, min(MOST_DEVICES, most // images)))
            yield MeasuredFleet("fleets", data, devices, images, ALPHAS[number % len(ALPHAS)], seed=100 + number)


def product_fleets() -> Iterator[MeasuredFleet]:
    """Yields fleets with two seeds each; those with few public images and those with many take turns."""
    for turn in (0, 1):
        for place, fleet in enumerate(PRODUCT):
            yield MeasuredFleet("product", *fleet, seed=(place + turn) % 2)


class Measurement:
    """Measures fleets. The features of a data set are computed when they are first needed."""

    def __init__(self, data_dir: Path | None) -> None:
        self._data_dir, self._features = data_dir, dict[str, Images]()

    def __call__(self, fleet: MeasuredFleet) -> Figures:
        return self._simulated(fleet) if fleet.part == "fleets" else self._in_product(fleet)

    def _simulated(self, fleet: MeasuredFleet) -> Figures:
        """Returns the gains of a fleet for each epsilon, from `SimulatedFleet`."""
        images, found = self._images(fleet.data), {}
        dealt = deal(images, devices=fleet.devices, each=fleet.images, seed=fleet.seed, alpha=fleet.alpha)
        made = SimulatedFleet(images, dealt, fleet.seed)
        alone = made.alone
        for epsilon in EPSILONS:
            at = made.at(signal(devices=fleet.devices, epsilon=epsilon, delta=DELTA))
            own, common = at["chosen"]["own"] - alone["own"], at["shared"]["common"] - alone["common"]
            found[f"{epsilon:g}"] = {"own": round(own, 4), "common": round(common, 4)}
        return {"measured": found}

    def _images(self, data: str) -> Images:
        if data not in self._features:
            parts, most = images_of(data, self._data_dir), MOST[SETS[data].shape[0]]
            train, test = (_first(part, count) for part, count in zip(parts, most, strict=True))
            extractor = get_features(SETS[data].features, SETS[data].shape)
            graph = FeatureGraph(lambda: extractor.graph, extractor.spec)
            found = Images(features_of(graph, train), train.y, features_of(graph, test), test.y)
            self._features = {data: found}  # of one data set at a time
        return self._features[data]

    def _in_product(self, fleet: MeasuredFleet) -> Figures:
        """Returns the gains of a fleet in the product, and the gains that `plan --data` predicts for it."""
        train, test = images_of(fleet.data, self._data_dir)
        order, count = np.random.default_rng(fleet.seed).permutation(len(train)), fleet.devices * fleet.images
        private, public = train.take(order[:count]), train.take(order[count:][: PUBLIC[fleet.seed % 2]])
        measured = {
            f"{epsilon:g}": _product_gains(fleet, epsilon, private, _first(test, PRODUCT_TEST))
            for epsilon in PRODUCT_EPSILONS
        }
        return {"public": len(public), "measured": measured, "predicted": _predicted(fleet, public)}


def _product_gains(fleet: MeasuredFleet, epsilon: float, train: Samples, test: Samples) -> Figures:
    result = product_result(fleet, epsilon, train, test)
    last, details = result.rounds[-1], result.details
    own = last.accuracy_own_local - fmean(details.local_only_local)
    common = last.accuracy_global - fmean(details.local_only_common)
    return {"own": round(own, 4), "common": round(common, 4)}


def product_result(fleet: MeasuredFleet, epsilon: float, train: Samples, test: Samples) -> Any:
    """Runs a fleet in the product's fast engine, and trains each device alone."""
    unequal = {} if fleet.alpha is None else {"partition": "dirichlet-device", "alpha": fleet.alpha}
    task: dict[str, Any] = {
        "name": "gain",
        "seed": fleet.seed,
        "model": {"name": "linear", "features": SETS[fleet.data].features},
        "method": {"name": "hush"},
        "privacy": {"accounting": "secure", "epsilon": epsilon, "delta": DELTA},
        "data": {"devices": fleet.devices, "test_fraction": 0, "min_samples": 2, **unequal},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        np.savez(path, train_x=train.images, train_y=train.y, test_x=test.images, test_y=test.y)
        task["data"] |= {"name": "arrays", "path": str(path)}
        simulation = begin(parse_task(task), Path(folder) / "run", data_dir=None)
        with Workers(1) as workers, EventLog(simulation.folder.events) as events:
            run_rounds(simulation, workers, events, runtime="onnx", evaluate_every=simulation.task.round.rounds)
            choose_own_heads(simulation, workers)
            alone = list(train_alone(simulation, workers))
        return assemble(simulation, engine="fast", alone=alone)


def _predicted(fleet: MeasuredFleet, public: Samples) -> Figures:
    cut = len(public) * 3 // 4
    own = OwnImages("public", SETS[fleet.data].classes, _first(public, cut), public.take(slice(cut, None)))
    asked = fleet.question(PRODUCT_EPSILONS[0])
    made, found = measured_table(asked, own), {}
    for epsilon in PRODUCT_EPSILONS:
        each = replace(asked, epsilon=epsilon).estimate(made).accuracies
        figures = {"own": each.gain, "common": each.gain_common, "spread": each.spread}
        found[f"{epsilon:g}"] = {key: round(value, 4) for key, value in figures.items()}
    return found


def _first(samples: Samples, most: int) -> Samples:
    return samples.take(slice(most))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


@dataclass(frozen=True)
class Error:
    """The errors of one prediction, of the gain of own heads and of that of the shared head, in units of their scales.

    :param part: of the fleet, `fleets` or `product`.
    :param group: errors that are left out together: of a data set; of a fleet where the data set was measured.
    :param kind: of the fleet: errors of different kinds have intervals of their own.
    """

    way: Way
    part: str
    data: str
    group: str
    kind: str
    signal: float
    own: float
    common: float


def errors_of(line: Figures) -> Iterator[Error]:
    """Yields the errors of all predictions for a fleet, without those that `hushfleet plan` says were not measured."""
    fleet = MeasuredFleet(**line["fleet"])
    for epsilon, measured in line["measured"].items():
        found = fleet.question(float(epsilon)).estimate(gain_table())
        figures, way = found.accuracies, _table_way(fleet.data)
        if not found.outside:
            told = {"own": figures.gain, "common": figures.gain_common, "spread": figures.spread}
            kind = kind_of(found.alpha, colour=found.colour and way == "other data")
            yield _error(way, fleet, kind, found.signal, told, measured)
        if "predicted" in line:
            yield _error("simulated", fleet, "any", found.signal, line["predicted"][epsilon], measured)


def _table_way(data: str) -> Way:
    return "same data" if data in IN_TABLE else "other data"


def _error(way: Way, fleet: MeasuredFleet, kind: str, r: float, told: Figures, measured: Figures) -> Error:
    own, common = (
        (measured[head] - told[head]) / scale_of(SCALES[way][head], told[head], told["spread"]) for head in HEADS
    )
    group = str(fleet) if way == "same data" else fleet.data
    return Error(way, fleet.part, fleet.data, group, kind, r, own, common)


def sides(errors: Sequence[Error], way: Way, head: str) -> dict[str, dict[str, list[float]]]:
    """Returns for each kind how far gains are below and above the predicted one, at each of `SIGNALS`."""
    found = {}
    for kind in dict.fromkeys(error.kind for error in errors):
        kinds = {kind, "alike"} if kind == "colour" else {kind}  # too few other kinds of colour images were tried
        of = [error for error in errors if error.kind in kinds]
        found[kind] = {"below": list[float](), "above": list[float]()}
        for middle in SIGNALS[way]:
            near = [getattr(error, head) for error in _near(of, middle)]
            low, high = np.quantile(near, [(1 - SHARE) / 2, (1 + SHARE) / 2])
            found[kind]["below"].append(max(0.0, -float(low)))
            found[kind]["above"].append(max(0.0, float(high)))
    return found


def _near(errors: Sequence[Error], middle: float) -> list[Error]:
    """Returns the errors within a factor of 2 of a signal, but of each data set at least the `NEAREST`."""
    found = []
    for data in dict.fromkeys(error.data for error in errors):
        away = [(abs(math.log(error.signal / middle)), error) for error in errors if error.data == data]
        away.sort(key=lambda each: each[0])
        found += [error for place, (far, error) in enumerate(away) if place < NEAREST or far <= math.log(2)]
    return found


def stretches(errors: Sequence[Error], way: Way, head: str) -> list[tuple[Error, float]]:
    """Returns for each error the factor on the quantiles of the other groups that takes the gain into its interval."""
    found = []
    for group in dict.fromkeys(error.group for error in errors):
        of = [error for error in errors if error.group == group]
        others = sides([error for error in errors if error.group != group], way, head)
        found += [(error, _stretch(error, others[error.kind], way, head)) for error in of]
    return found


def _stretch(error: Error, around: dict[str, list[float]], way: Way, head: str) -> float:
    value = getattr(error, head)
    width = np.interp(math.log(error.signal), np.log(SIGNALS[way]), around["above" if value > 0 else "below"])
    return abs(value) / max(float(width), 1e-9)


def of_way(errors: Sequence[Error], way: Way) -> Figures:
    """Returns the intervals of a way: quantiles, stretched until `SHARE` of gains that were left out are in them."""
    figures: Figures = {
        "scale": SCALES[way],
        "data": sorted({error.data for error in errors}),
        "fleets": {},
        "product": {},
    }
    kinds: dict[str, Figures] = {}
    for head in HEADS:
        needed = stretches(errors, way, head)
        stretch = max(1.0, float(np.quantile([needs for _, needs in needed], SHARE, method="higher")))
        for part in ("fleets", "product"):
            held = [needs <= stretch for error, needs in needed if error.part == part]
            figures[part][head] = [sum(held), len(held)]
        for kind, around in sides(errors, way, head).items():
            rounded = {side: [round(stretch * value, 3) for value in values] for side, values in around.items()}
            kinds.setdefault(kind, {"of": kind, "signals": list(SIGNALS[way])})[head] = rounded
    return figures | {"errors": list(kinds.values())}


def summary(lines: Sequence[Figures]) -> Figures:
    """Returns what `hushfleet plan` reads: the intervals, and how many of the gains that were left out were in them."""
    errors = [error for line in lines for error in errors_of(line)]
    ways = {way: of_way([error for error in errors if error.way == way], way) for way in SCALES}
    return {"made_by": "benchmarks/gain_errors.py", "share": SHARE, "ways": ways}


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="measured fleets, a line each")
    parser.add_argument("--part", choices=("fleets", "product"), help="measure those that --kept lacks")
    parser.add_argument("--data", choices=tuple(SETS), action="append", help="of this data set alone; repeatable")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, with what there is")
    parser.add_argument("--errors", type=Path, metavar="FILE", help="write what `hushfleet plan` reads")
    options = parser.parse_args()
    ends, measure = time.monotonic() + 60 * options.minutes, Measurement(options.data_dir)
    lines = list(map(json.loads, options.kept.read_text().splitlines() if options.kept.exists() else []))
    done = {MeasuredFleet(**line["fleet"]) for line in lines}
    parts: dict[str | None, Callable[[], Iterator[MeasuredFleet]]] = {"fleets": drawn_fleets, "product": product_fleets}
    for fleet in parts.get(options.part, lambda: iter(()))():
        wanted = fleet not in done and fleet.data in (options.data or SETS)
        if wanted and time.monotonic() < ends:
            lines.append({"fleet": asdict(fleet)} | measure(fleet))
            print(lines[-1], flush=True)
            with options.kept.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    if options.errors is not None:
        options.errors.write_text(json.dumps(summary(lines), indent=1) + "\n")


if __name__ == "__main__":
    main()
