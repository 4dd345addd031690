"""Measures the gain of a board by taking part, against training alone, by fleet size, images per device and epsilon.

    python -m benchmarks.private_gain --kept FILE [--quick] [--data-dir DIR] [--table FILE] [--figure FILE.svg]

Method `hush` with secure aggregation, by the simulation of `hushfleet plan --data`
(`simulator/studies/plan/simulated.py`). Unit device, delta 1e-5, every device in every round.

A fleet is a data set, divided by a seed among a number of devices with a number of images. For each epsilon there are

- `shared`: the final shared head, with secure aggregation;
- `chosen`: the head that each device makes from it with its own images, at no cost
  (`hushfleet.learning.personalized_head`);
- `local`: the shared head without trust, so that each device adds all of the noise;

and once for the fleet `alone`: the best way, on the test over all devices, among softmax with three penalties, nearest
neighbour and class means, on the same features. Each is tested on the common test set (`common`), and with each class
weighted by its share among the device's own images (`own`).

A fleet is a line of --kept, so that an interrupted table continues. --table writes the table for `hushfleet plan`. With
--new only fleets that this file lacks are measured, and added to it.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Figures, make_parser, table, write
from hushfleet.aggregator.planning.gain_table import table_name
from hushfleet.methods.hush_rule import signal
from hushfleet.simulator.studies.plan.simulated import Images, SimulatedFleet, deal, mean, over_seeds

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = (0, 1, 2)
ALPHAS = (0.5, 0.1)
DIGITS = {5: (30, 100, 200), 12: (10, 30, 50), 36: (10, 20), 60: (8,)}  # devices, by images; there are 1,200
SHOWN = {
    "hush": ("hush", "#1b6ca8"),
    "dp-fedavg-head": ("DP-FedAvg on its head", "#4fb3a5"),
    "dp-fedavg": ("DP-FedAvg, CNN", "#e0a33e"),
    "fedglp-adp": ("FedGLP-ADP, CNN", "#b5524a"),
}
FEATURES = {"digits": "filters", "fashion-mnist": "scattering", "emnist": "scattering", "cifar10": "scattering"}
MOST_DEALT = 24_000  # images of a fleet
MOST_TRAIN = {"fashion-mnist": 60_000, "emnist": 24_000, "cifar10": 6_000}
MOST_TEST = {"fashion-mnist": 5_000, "emnist": 5_000, "cifar10": 2_000}
BATCH = 64


@dataclass(frozen=True)
class Participants:
    """The fleet that takes part.

    :param classes: number of classes, the first ones of the data set.
    :param alpha: Dirichlet parameter of the devices' labels; None if all devices have equal shares.
    :param honest: the share of honest devices, whose noise counts.
    """

    data: str
    classes: int
    devices: int
    images: int
    seed: int
    alpha: float | None = None
    honest: float = 1.0


def fleets(*, quick: bool) -> Iterator[Participants]:
    """Yields the most important fleets first, so that an early stop keeps them."""
    if quick:
        yield Participants("digits", 10, 30, 12, seed=0)
        return
    alike = [("digits", 10, n, m) for n, m in ((100, 12), (32, 36), (24, 20), (16, 60))]
    alike += [("digits", 10, n, m) for m, sizes in DIGITS.items() for n in sizes]
    alike += [("fashion-mnist", 10, n, m) for m in (20, 5, 60) for n in (100, 30, 1000, 10, 50, 300, 8, 14, 2000)]
    alike += [("fashion-mnist", 10, n, 300) for n in (10, 30, 80)]
    alike += [("fashion-mnist", c, n, m) for c in (2, 5) for m in (5, 20, 60) for n in (10, 30, 100)]
    alike += [("fashion-mnist", c, 300, m) for c in (2, 5) for m in (5, 20)]
    alike += [("emnist", 26, n, m) for m in (20, 60) for n in (30, 100, 300, 1000)]
    alike += [("cifar10", 10, n, m) for m in (20, 5, 60) for n in (100, 30, 300, 14, 50)]
    differ = [("digits", 10, 100, 12), *(("cifar10", 10, n, 20) for n in (100, 30, 300))]
    differ += [("fashion-mnist", 10, n, m) for m in (20, 5, 60) for n in (30, 100, 300, 14, 50)]
    differ += [("fashion-mnist", 10, 1000, m) for m in (20, 5)]
    differ += [("fashion-mnist", c, n, m) for c in (2, 5) for m in (5, 20, 60) for n in (10, 30, 100)]
    differ += [("fashion-mnist", c, 300, m) for c in (2, 5) for m in (5, 20)]
    differ += [("digits", 10, n, m) for m, n in ((12, 30), (36, 10), (36, 32), (5, 30), (5, 200))]
    alike = [size for size in alike if size[2] * size[3] <= min(MOST_DEALT, MOST_TRAIN.get(size[0], MOST_DEALT))]
    for seed in SEEDS:  # one seed after the other, so that an unfinished table has all sizes
        yield from (Participants(*size, seed=seed) for size in alike)
        yield from (Participants(*size, seed=seed, alpha=alpha) for alpha in ALPHAS for size in differ)
        yield Participants("fashion-mnist", 10, 100, 20, seed=seed, honest=0.9)


def measure(fleet: Participants, images: Images, epsilons: Sequence[float] = EPSILONS) -> Figures:
    """Returns all figures of a fleet, from `SimulatedFleet`."""
    dealt = deal(images, devices=fleet.devices, each=fleet.images, seed=fleet.seed, alpha=fleet.alpha)
    simulated = SimulatedFleet(images, dealt, fleet.seed)
    figures: Figures = {"alone": simulated.alone, "epsilon": {}}
    for epsilon in epsilons:
        shared, local = (
            signal(devices=fleet.devices * part, epsilon=epsilon, delta=DELTA)
            for part in (fleet.honest**0.5, fleet.devices**-0.5)
        )
        figures["epsilon"][f"{epsilon:g}"] = simulated.at(shared) | {"local": simulated.shared(local)[1]}
    return figures


def featured(data: str, *, data_dir: Path | None, kept: Path) -> tuple[Images, Figures]:
    """Returns the features of a data set, computed once and kept; and their costs.

    Digits are 1,200 training and 597 test images. Other sets have the first `MOST_TRAIN` and `MOST_TEST` images: all
    60,000 of Fashion-MNIST, because the largest fleet of its first two classes takes 6,000 of their 12,000.
    """
    from hushfleet.data.sets import load
    from hushfleet.learning.graph_session import open_session
    from hushfleet.models.features import get_features

    dataset = load(data, data_dir=data_dir)
    parts = [(dataset.train.images, dataset.train.y), (dataset.test.images, dataset.test.y)]
    if data == "digits":
        x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.random.default_rng(0).permutation(len(y))
        parts = [(x[order[:1200]], y[order[:1200]]), (x[order[1200:]], y[order[1200:]])]
    else:
        parts = [(x[:most], y[:most]) for (x, y), most in zip(parts, (MOST_TRAIN[data], MOST_TEST[data]), strict=True)]
    extractor = get_features(FEATURES[data], parts[0][0].shape[1:])
    path = kept.with_name(f"{data}-{len(parts[0][1])}-{hashlib.sha256(extractor.graph).hexdigest()[:16]}.npz")
    session, began = open_session(extractor.graph), time.process_time()
    trial = [session.run(["features"], {"x": pixels(parts[1][0][:BATCH])}) for _ in range(5)]
    costs = {
        "count": extractor.count,
        "graph_bytes": len(extractor.graph),
        "image_s": (time.process_time() - began) / len(trial) / BATCH,
    }
    if not path.exists():
        arrays = {}
        for name, (x, y) in zip(("train", "test"), parts, strict=True):
            batches = [session.run(["features"], {"x": pixels(x[i : i + BATCH])})[0] for i in range(0, len(x), BATCH)]
            arrays |= {name: np.concatenate(batches), f"{name}_y": y}
        np.savez(path, **arrays)
    with np.load(path) as arrays:
        return Images(arrays["train"], arrays["train_y"], arrays["test"], arrays["test_y"]), costs


def pixels(images: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = images.astype(np.float32) / 255
    return scaled


def summary(lines: list[Figures]) -> Figures:
    """Returns the figures of one fleet, over its seeds."""
    fleet = Participants(**lines[0]["fleet"])
    return who(fleet) | {"features": measured_as(fleet.data)} | over_seeds(lines)


def measured_as(data: str) -> str:
    """Returns the name of a data set's features in the table."""
    return table_name(FEATURES[data], colour=data == "cifar10")


def who(fleet: Participants) -> Figures:
    """Returns what distinguishes a fleet from others in the table."""
    return {key: value for key, value in asdict(fleet).items() if key != "seed"}


def summaries(done: dict[Participants, Figures]) -> list[Figures]:
    groups: dict[Participants, list[Figures]] = {}
    for fleet, line in done.items():
        groups.setdefault(replace(fleet, seed=0), []).append(line)
    return [summary(lines) for lines in groups.values()]


def show(fleets: list[Figures]) -> None:
    for title, head in (("the shared head, common test", "shared"), ("the chosen head, own labels", "chosen")):
        test = "common" if head == "shared" else "own"
        rows = [
            {key: each[key] for key in ("data", "classes", "devices", "images", "alpha", "honest")}
            | {"alone": f"{100 * each['alone'][test]:.1f}"}
            | {f"epsilon {p['epsilon']:g}": f"{100 * p[head][test]:.1f} +-{100 * p['std']:.1f}" for p in each["points"]}
            for each in fleets
        ]
        table(f"accuracy of {title}, in per cent, and over seeds its standard deviation", rows)


def draw(fleets: list[Figures], others: list[Figures], path: Path) -> None:
    """Draws accuracy against epsilon: fleets of 30, 100 and 1,000, and alone; and other methods on one fleet."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14 if others else 7.5, 4), layout="constrained")
    panels = figure.subplots(1, 2 if others else 1, squeeze=False)[0]
    shown = [each for each in fleets if each["classes"] == 10 and each["honest"] == 1 and each["alpha"] is None]
    clothes = [each for each in shown if each["data"] == "fashion-mnist" and each["images"] == 20]
    draw_fleets(panels[0], sorted(clothes, key=lambda each: -each["devices"]))
    if others:
        (digits,) = (e for e in shown if e["data"] == "digits" and (e["devices"], e["images"]) == (100, 12))
        draw_others(panels[1], digits, others)
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.set(xlabel="epsilon against the server (a whole device, delta 1e-5)", ylabel="accuracy, %", ylim=(0, 100))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


def draw_fleets(axes: Any, fleets: list[Figures]) -> None:
    colors = {1000: "#1b6ca8", 100: "#4fb3a5", 30: "#e0a33e"}
    for each in fleets:
        if each["devices"] not in colors:
            continue
        epsilons = [point["epsilon"] for point in each["points"]]
        middle = np.array([100 * point["shared"]["common"] for point in each["points"]])
        wide = np.array([100 * point["std"] for point in each["points"]])
        color = colors[each["devices"]]
        axes.plot(epsilons, middle, "o-", color=color, label=f"{each['devices']:,} devices, secure aggregation")
        axes.fill_between(epsilons, middle - wide, middle + wide, color=color, alpha=0.2, linewidth=0)
        if each["devices"] == 100:
            local = [100 * point["local"]["common"] for point in each["points"]]
            axes.plot(epsilons, local, "o:", color="#888888", label="100 devices, each adds all the noise")
            axes.axhline(100 * each["alone"]["common"], color="black", linestyle="--", label="alone")
    axes.set_title("hush on Fashion-MNIST, 20 images a device", loc="left")


def draw_others(axes: Any, fleet: Figures, others: list[Figures]) -> None:
    """:param others: lines of `benchmarks.other_methods`."""
    curves = {
        ("hush", noise): {p["epsilon"]: [p[head]["common"]] for p in fleet["points"]}
        for noise, head in (("sum", "shared"), ("local", "local"))
    }
    for line in others:
        cell = line["cell"]
        if (cell["data"], cell["devices"]) == (fleet["data"], fleet["devices"]) and cell["epsilon"] is not None:
            curve = curves.setdefault((cell["method"], cell["noise"]), {})
            curve.setdefault(cell["epsilon"], []).append(line["global"])
    for method, noise in sorted(curves, key=lambda curve: (curve[1] == "local", list(SHOWN).index(curve[0]))):
        points, (name, color) = curves[method, noise], SHOWN[method]
        epsilons = sorted(points)
        how = {"sum": "secure aggregation", "local": "each adds all the noise"}[noise]
        how = "if its masks could be summed" if (method, noise) == ("fedglp-adp", "sum") else how
        style = "o-" if noise == "sum" else "o:"
        axes.plot(epsilons, [100 * mean(points[each]) for each in epsilons], style, color=color, label=f"{name}, {how}")
    axes.axhline(100 * fleet["alone"]["common"], color="black", linestyle="--", label="alone")
    axes.set_title("100 devices with 12 digits each", loc="left")


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kept", type=Path, required=True, metavar="FILE", help="finished fleets, a line each")
    parser.add_argument("--data-dir", type=Path, help="where the data sets' files are")
    parser.add_argument("--quick", action="store_true", help="one small fleet")
    parser.add_argument("--data", choices=sorted(FEATURES), help="measure fleets of this data set alone")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="every N-th of them, from the K-th, 0 the first")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, with what there is")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write what `hushfleet plan` reads")
    parser.add_argument("--new", action="store_true", help="measure the fleets that --table lacks, and add them to it")
    parser.add_argument("--others", type=Path, metavar="FILE", help="lines of benchmarks.other_methods, for the figure")
    parser.add_argument("--figure", type=Path, action="append", default=[], metavar="FILE.svg|.png")
    options = parser.parse_args()
    if options.new and options.table is None:
        parser.error("--new needs --table FILE")
    ends = time.monotonic() + 60 * options.minutes
    lines = map(json.loads, options.kept.read_text().splitlines() if options.kept.exists() else [])
    done: dict[Participants, Figures] = {Participants(**line["fleet"]): line for line in lines}
    images: dict[str, Images] = {}
    features: Figures = {}
    first, parts = map(int, options.part.split("/"))
    known = json.loads(options.table.read_text()) if options.new else {"features": {}, "fleets": []}
    wanted = [fleet for fleet in fleets(quick=options.quick) if options.data in (None, fleet.data)]
    wanted = [fleet for fleet in wanted if not any(who(fleet).items() <= row.items() for row in known["fleets"])]
    for fleet in wanted[first::parts]:
        if fleet.data not in images:
            found = featured(fleet.data, data_dir=options.data_dir, kept=options.kept)
            images[fleet.data], features[measured_as(fleet.data)] = found
        if fleet not in done and time.monotonic() < ends:
            done[fleet] = {"fleet": asdict(fleet), **measure(fleet, images[fleet.data].first_classes(fleet.classes))}
            with options.kept.open("a") as file:
                file.write(json.dumps(done[fleet]) + "\n")
    rows = known["fleets"] + summaries(done)
    show(rows)
    figures: Figures = {
        "made_by": "benchmarks/private_gain.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seeds": list(SEEDS),
        "delta": DELTA,
        "features": features | known["features"],
        "fleets": rows,
    }
    if options.table is not None:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in figures.items() if key != "fleets"]
        text = ",\n  ".join(map(json.dumps, rows))
        options.table.write_text("{" + ",\n ".join(lines) + ',\n "fleets": [\n  ' + text + "\n ]}\n")
    others = [] if options.others is None else list(map(json.loads, options.others.read_text().splitlines()))
    for path in options.figure:
        draw(rows, others, path)
    write(options, figures)


if __name__ == "__main__":
    main()
