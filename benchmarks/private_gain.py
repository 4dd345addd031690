"""What a board gains by taking part, by fleet size, images a device and epsilon; beside staying alone.

    python -m benchmarks.private_gain --kept FILE [--quick] [--data-dir DIR] [--table FILE] [--figure FILE.svg]

Method `hush` with secure sums, simulated exactly: the noise of each sum is drawn at once, all devices' local steps are
one array, and nothing is quantised, so that a cell takes seconds. Features, own heads, rounds, clip norm and noise come
from the product's own functions. Unit device, delta 1e-5, every device in every round.

A fleet is a data set, divided among so many devices with so many images, by a seed. For each epsilon there are

- `shared`: the head that all have in the end, at its best with secure sums;
- `chosen`: what each device makes of it by its own images, at no cost (`hushfleet.model.own_head`);
- `local`: the shared head where nobody is trusted, so that each device adds all of the noise;

and once for the fleet `alone`: the best in hindsight, over all devices, of softmax with three penalties, nearest
neighbour and class means, on the same features. Each is tested on the common test set (`common`), and with each class
counted by its share among the device's own images (`own`).

A fleet is a line of --kept, so that an interrupted table goes on. --table writes what `hushfleet plan` reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import softmax

from benchmarks.common import Figures, make_parser, table, write
from hushfleet.methods.hush_rule import rule, signal
from hushfleet.model.own_head import mixture
from hushfleet.model.softmax import fit, rotated
from hushfleet.models.features.whitening import unit_with_bias
from hushfleet.privacy.accounting.epsilon import noise_multiplier_for
from hushfleet.simulator.engines.fast.alone_on_features import PENALTIES

DELTA = 1e-5
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
SEEDS = (0, 1, 2)
ALPHAS = (0.5, 0.1)
STEPS, RATE = 5, 16.0  # of a device's gradient descent in a round
JUDGED = 12  # devices of a fleet that are compared with training alone
DIGITS = {5: (30, 100, 200), 12: (10, 30, 50), 36: (10, 20), 60: (8,)}  # devices, by images; 1,200 are there
SHOWN = {
    "hush": ("hush", "#1b6ca8"),
    "dp-fedavg-head": ("DP-FedAvg on its head", "#4fb3a5"),
    "dp-fedavg": ("DP-FedAvg, CNN", "#e0a33e"),
    "fedglp-adp": ("FedGLP-ADP, CNN", "#b5524a"),
}
FEATURES = {"digits": "filters", "fashion-mnist": "scattering", "emnist": "scattering"}
MOST_DEALT = 24_000  # images of a fleet
MOST_TRAIN, MOST_TEST, BATCH = {"fashion-mnist": 60_000, "emnist": 24_000}, 5_000, 64


@dataclass(frozen=True)
class Fleet:
    """Who takes part.

    :param classes: the first so many of the data set.
    :param alpha: of the Dirichlet by which labels are dealt; None for alike devices.
    :param honest: the share of the devices whose noise is counted on.
    """

    data: str
    classes: int
    devices: int
    images: int
    seed: int
    alpha: float | None = None
    honest: float = 1.0


def fleets(*, quick: bool) -> Iterator[Fleet]:
    """What matters most comes first, for who stops early."""
    if quick:
        yield Fleet("digits", 10, 30, 12, seed=0)
        return
    alike = [("digits", 10, n, m) for n, m in ((100, 12), (32, 36), (24, 20), (16, 60))]
    alike += [("digits", 10, n, m) for m, sizes in DIGITS.items() for n in sizes]
    alike += [("fashion-mnist", 10, n, m) for m in (20, 5, 60) for n in (100, 30, 1000, 10, 50, 300, 8, 14, 2000)]
    alike += [("fashion-mnist", 10, n, 300) for n in (10, 30, 80)]
    alike += [("fashion-mnist", c, n, m) for c in (2, 5) for m in (5, 20, 60) for n in (10, 30, 100)]
    alike += [("emnist", 26, n, m) for m in (20, 60) for n in (30, 100, 300, 1000)]
    differ = [("digits", 10, 100, 12)]
    differ += [("fashion-mnist", 10, n, m) for m in (20, 5, 60) for n in (30, 100, 300, 14, 50)]
    alike = [size for size in alike if size[2] * size[3] <= MOST_DEALT]
    for seed in SEEDS:  # a seed at a time, so that a table that was not finished has all sizes
        yield from (Fleet(*size, seed=seed) for size in alike)
        yield from (Fleet(*size, seed=seed, alpha=alpha) for alpha in ALPHAS for size in differ)
        yield Fleet("fashion-mnist", 10, 100, 20, seed=seed, honest=0.9)


@dataclass(frozen=True)
class Images:
    """Features and labels: float32 `[n, F]` and int64 `[n]`, to train on and to test with."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1

    def first_classes(self, count: int) -> Images:
        train, test = self.y < count, self.test_y < count
        return Images(self.x[train], self.y[train], self.test_x[test], self.test_y[test])

    def by_class(self, guesses: np.ndarray) -> np.ndarray:
        """Accuracy on each class of the test set, `[..., C]`, of guesses `[..., n]`."""
        right = guesses == self.test_y
        return np.stack([right[..., self.test_y == c].mean(-1) for c in range(self.classes)], -1)


@dataclass(frozen=True)
class Dealt:
    """Features `[n, m, F]` and labels `[n, m]` of n devices with m images.

    :param mixes: `[n, C]`, the shares of the classes where a device's images come from; its few images have others.
    """

    x: np.ndarray
    y: np.ndarray
    mixes: np.ndarray

    @property
    def classes(self) -> int:
        return self.mixes.shape[1]

    @property
    def prior(self) -> np.ndarray:
        """The log of the own label shares with one image added to each class, as method `hush` has it."""
        counts = np.stack([np.bincount(y, minlength=self.classes) for y in self.y]) + 1
        logs: np.ndarray = np.log(counts / counts.sum(1, keepdims=True)).astype(np.float32)
        return logs

    def first(self, devices: int) -> Dealt:
        return Dealt(self.x[:devices], self.y[:devices], self.mixes[:devices])


def leading(features: np.ndarray, directions: int) -> np.ndarray:
    """What a shared head is given of all features: the first ones, as the task's graph gives them; or all."""
    if directions >= features.shape[-1] - 1:
        return features
    return unit_with_bias(torch.from_numpy(features[..., :directions])).numpy()


def deal(images: Images, fleet: Fleet) -> Dealt:
    """Draws each device's mix, and then its images by that; a class that is used up is replaced by the others."""
    if fleet.devices * fleet.images > len(images.y):
        raise SystemExit(f"{fleet.data} has {len(images.y)} images: too few for {fleet}")
    rng = np.random.default_rng([fleet.seed, 1])
    pools = [list(rng.permutation(np.flatnonzero(images.y == c))) for c in range(images.classes)]
    if fleet.alpha is None:
        mixes = np.full((fleet.devices, images.classes), 1 / images.classes)
    else:
        mixes = rng.dirichlet(np.full(images.classes, fleet.alpha), fleet.devices)
    of = []
    for mix in mixes:
        held: list[int] = []
        while len(held) < fleet.images:
            left = mix * [bool(pool) for pool in pools] + [1e-9 * bool(pool) for pool in pools]
            for label, count in enumerate(rng.multinomial(fleet.images - len(held), left / left.sum())):
                held += [pools[label].pop() for _ in range(min(count, len(pools[label])))]
        of.append(held)
    return Dealt(images.x[np.array(of)], images.y[np.array(of)], mixes)


def shared_head(
    dealt: Dealt, *, rounds: int, clip_norm: float, noise_std: float, rng: np.random.Generator
) -> np.ndarray:
    """The head `[F, C]` after all rounds: the mean of the last third of the iterates.

    :param noise_std: of a sum's noise.
    """
    devices, count, features = dealt.x.shape
    flat, prior = dealt.x.reshape(-1, features), dealt.prior[:, None]
    gram = dealt.x @ dealt.x.transpose(0, 2, 1)
    targets = np.eye(dealt.classes, dtype=np.float32)[dealt.y]
    head, iterates = np.zeros((features, dealt.classes), np.float32), []
    for _ in range(rounds):
        offset = (flat @ head).reshape(targets.shape) + prior
        dual = np.zeros_like(offset)  # the update is x^T dual
        for _ in range(STEPS):
            dual -= RATE / count * (softmax(offset + gram @ dual, axis=-1) - targets)
        norms = np.sqrt((dual * (gram @ dual)).sum((1, 2)))
        scale = np.divide(clip_norm, norms, out=np.zeros_like(norms), where=norms > 0)
        total = flat.T @ (dual * scale[:, None, None]).reshape(-1, dealt.classes)
        head = head + ((total + noise_std * rng.standard_normal(head.shape)) / devices).astype(np.float32)
        iterates.append(head)
    late: np.ndarray = np.mean(iterates[-math.ceil(rounds / 3) :], axis=0)
    return late


def alone(dealt: Dealt, images: Images) -> np.ndarray:
    """Accuracy by class of each way to learn alone, `[ways, devices, C]`."""
    guesses = []
    for x, y in zip(dealt.x, dealt.y, strict=True):
        basis = rotated(x)
        offsets = np.zeros((len(PENALTIES), images.classes, len(y)), np.float32)
        heads = fit(basis.z, basis.moments, y, offsets, np.array(PENALTIES)) @ basis.axes
        nearest = y[(images.test_x @ x.T).argmax(1)]  # all features have one norm
        held = np.unique(y)
        means = np.stack([x[y == c].mean(0) for c in held])
        closest = held[(images.test_x @ means.T - (means**2).sum(1) / 2).argmax(1)]
        guesses.append([*((images.test_x @ head.T).argmax(1) for head in heads), nearest, closest])
    return images.by_class(np.array(guesses).swapaxes(0, 1))


def measure(fleet: Fleet, images: Images) -> Figures:
    """All figures of a fleet. Accuracies are means over the judged devices; `error` is the standard error of the
    gain's mean over them, and `worse` the share of them that do worse than alone by more than a hundredth."""
    dealt = deal(images, fleet)
    judged = dealt.first(JUDGED)
    shares = judged.mixes
    ways = alone(judged, images)
    own_ways = (ways * shares).sum(-1)  # [ways, devices]
    best = own_ways[own_ways.mean(1).argmax()]
    figures: Figures = {"alone": {"common": float(ways.mean((1, 2)).max()), "own": float(best.mean())}, "epsilon": {}}
    for epsilon in EPSILONS:
        found: dict[str, Any] = {}
        for name, extra in (("shared", fleet.honest**-0.5), ("local", fleet.devices**0.5)):
            counted = fleet.devices / extra
            rounds, clip_norm, directions = rule(devices=counted, epsilon=epsilon, delta=DELTA)
            given = replace(dealt, x=leading(dealt.x, directions))
            tested = leading(images.test_x, directions)
            multiplier = noise_multiplier_for(epsilon=epsilon, delta=DELTA, steps=rounds)
            rng = np.random.default_rng([fleet.seed, 2])
            std = multiplier * clip_norm * extra
            head = shared_head(given, rounds=rounds, clip_norm=clip_norm, noise_std=std, rng=rng)
            by_class = images.by_class((tested @ head).argmax(1))
            found[name] = {"common": float(by_class.mean()), "own": float((shares @ by_class).mean())}
            if name == "shared":
                found |= {"rounds": rounds, "clip_norm": clip_norm, "directions": directions, "multiplier": multiplier}
                r = signal(devices=counted, epsilon=epsilon, delta=DELTA)
                own = zip(judged.x, given.x, judged.y, strict=False)
                heads = [mixture(x, y, (shown @ head).T, r) for x, shown, y in own]
                logits = tested @ head
                guesses = [(each.scale * logits + images.test_x @ each.pull.T + each.prior).argmax(1) for each in heads]
                classes = images.by_class(np.array(guesses))
                own = (classes * shares).sum(-1)
                gain = own - best
                found["chosen"] = {"common": float(classes.mean()), "own": float(own.mean())}
                found["error"] = float(gain.std(ddof=1) / math.sqrt(len(gain)))
                found["worse"] = float((gain < -0.01).mean())
        figures["epsilon"][f"{epsilon:g}"] = found
    return figures


def featured(data: str, *, data_dir: Path | None, kept: Path) -> tuple[Images, Figures]:
    """The features of a data set, computed once and kept; and what they cost.

    Digits are 1,200 training and 597 test images. Of the others the first `MOST_TRAIN` and `MOST_TEST`: all 60,000 of
    Fashion-MNIST, since the largest fleet of its first two classes takes 6,000 of their 12,000.
    """
    from hushfleet.data.sets import load
    from hushfleet.graphs.session import open_session
    from hushfleet.models.features import get_features

    dataset = load(data, data_dir=data_dir)
    parts = [(dataset.train.images, dataset.train.y), (dataset.test.images, dataset.test.y)]
    if data == "digits":
        x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
        order = np.random.default_rng(0).permutation(len(y))
        parts = [(x[order[:1200]], y[order[:1200]]), (x[order[1200:]], y[order[1200:]])]
    else:
        parts = [(x[:most], y[:most]) for (x, y), most in zip(parts, (MOST_TRAIN[data], MOST_TEST), strict=True)]
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
    """One fleet: means over its seeds, and the standard deviations of what hangs on the seed."""
    points = []
    for epsilon, first in lines[0]["epsilon"].items():
        found = [line["epsilon"][epsilon] for line in lines]
        point = {"epsilon": float(epsilon)} | {key: first[key] for key in ("rounds", "clip_norm", "directions")}
        for head in ("shared", "chosen", "local"):
            point[head] = {test: mean([each[head][test] for each in found]) for test in ("common", "own")}
        point["std"] = std([each["shared"]["common"] for each in found])
        gains = [each["chosen"]["own"] - line["alone"]["own"] for each, line in zip(found, lines, strict=True)]
        point |= {"gain_std": std(gains), "error": mean([each["error"] for each in found])}
        points.append(point | {"worse": mean([each["worse"] for each in found])})
    who = {key: value for key, value in lines[0]["fleet"].items() if key != "seed"}
    alone = {test: mean([line["alone"][test] for line in lines]) for test in ("common", "own")}
    return who | {"features": FEATURES[who["data"]], "seeds": len(lines), "alone": alone, "points": points}


def mean(values: list[float]) -> float:
    return round(float(np.mean(values)), 4)


def std(values: list[float]) -> float:
    return round(float(np.std(values, ddof=1)), 4) if len(values) > 1 else 0.0


def summaries(done: dict[Fleet, Figures]) -> list[Figures]:
    groups: dict[Fleet, list[Figures]] = {}
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
    """Accuracy against epsilon: of fleets of 30, 100 and 1,000, beside alone; and of other methods on one fleet."""
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
        axes.plot(epsilons, middle, "o-", color=color, label=f"{each['devices']:,} devices, secure sums")
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
        how = {"sum": "secure sums", "local": "each adds all the noise"}[noise]
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
    parser.add_argument("--others", type=Path, metavar="FILE", help="lines of benchmarks.other_methods, for the figure")
    parser.add_argument("--figure", type=Path, action="append", default=[], metavar="FILE.svg|.png")
    options = parser.parse_args()
    ends = time.monotonic() + 60 * options.minutes
    lines = map(json.loads, options.kept.read_text().splitlines() if options.kept.exists() else [])
    done: dict[Fleet, Figures] = {Fleet(**line["fleet"]): line for line in lines}
    images: dict[str, Images] = {}
    features: Figures = {}
    first, parts = map(int, options.part.split("/"))
    wanted = [fleet for fleet in fleets(quick=options.quick) if options.data in (None, fleet.data)]
    for fleet in wanted[first::parts]:
        if fleet.data not in images:
            found = featured(fleet.data, data_dir=options.data_dir, kept=options.kept)
            images[fleet.data], features[FEATURES[fleet.data]] = found
        if fleet not in done and time.monotonic() < ends:
            done[fleet] = {"fleet": asdict(fleet), **measure(fleet, images[fleet.data].first_classes(fleet.classes))}
            with options.kept.open("a") as file:
                file.write(json.dumps(done[fleet]) + "\n")
    rows = summaries(done)
    show(rows)
    figures: Figures = {
        "made_by": "benchmarks/private_gain.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seeds": sorted({fleet.seed for fleet in done}),
        "delta": DELTA,
        "features": features,
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
