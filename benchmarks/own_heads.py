"""Tests the goal of own heads: at most a point below the better of shared head and training alone.

    python -m benchmarks.own_heads [--data-dir DIR] [--json FILE] [--quick]

Method `hush`, every device honest, unit device, delta 1e-5, with the rounds, clip norm and directions of its rule, and
exact sums (`simulator/studies/plan/simulated.py`). Features are those of the product's graphs: `filters` for digits,
`scattering` for Fashion-MNIST, and `unit-norm` where a task names none. Fashion-MNIST and MNIST need --data-dir.
*Alone* is the best in hindsight of five ways, and *linear* the best of the three of them that are linear, as own heads
are. Twelve devices of a fleet are judged, each on samples like its own.
Figures are means over five seeds; the difference to the better of the two has its standard error over the seeds.

The tasks name mean and deviation (those of the training part), except where values are unchanged. Made up are

- embeddings: 192 numbers of 12 classes, such as a fixed network gives for spoken words, with a mean far from zero;
- sensors: four values, five classes;
- series: three channels of 40 steps, six classes with a shape each; two channels have a large mean;
- activity: the accelerometers of examples/activity, windows that begin at any point of a step.

Label shift: the classes' shares differ between devices (Dirichlet). Speaker shift: each device sees all its samples in
its own way. Digits are rotated, resized, moved, darker and noisier. Embeddings are moved and mixed. Machines have their
own gain, mean, delay and mixture of channels, and in each class's shape a part of their own.
"""

from __future__ import annotations

import math
import runpy
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
from scipy.ndimage import affine_transform

from benchmarks.common import Figures, make_parser, table, write
from hushfleet.data.samples import FeatureSamples
from hushfleet.data.sets import load
from hushfleet.graphs.session import open_session
from hushfleet.methods.hush import TailMean
from hushfleet.methods.hush_rule import signal, steps_at
from hushfleet.model.own_head import inputs_of_own, own_head_of, own_logits
from hushfleet.models.features import get_features
from hushfleet.params import PRIOR, WEIGHT, ParamLayout
from hushfleet.simulator.engines.fast.alone_on_features import PENALTIES, predict_alone
from hushfleet.simulator.studies.plan.simulated import JUDGED, Dealt, Images, deal, leading, shared_head

DELTA = 1e-5
EPSILONS = (2, 8)
SEEDS = range(5)
GOAL = -1.0  # the lowest difference that passes, in points
TESTED = 400  # samples that are made to test a device
person = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "activity" / "make_data.py"))["person"]

FeaturesAndLabels = tuple[np.ndarray, np.ndarray]
Draw = Callable[[np.ndarray], np.ndarray]
"""Makes samples `[n, C, H, W]` of labels `[n]`, as one device sees them."""
World = Callable[[np.random.Generator], tuple[int, Callable[[], Draw]]]
"""Returns the number of classes, and a function that makes a device."""


class DealtFleet(NamedTuple):
    """Devices and their tests.

    :param tests: for each judged device, features and labels; a class counts by its share in the device's mix.
    :param have_order: whether the most important features come first.
    """

    dealt: Dealt
    tests: list[FeaturesAndLabels]
    have_order: bool


class HeadsReach(NamedTuple):
    """Accuracies in per cent, means over the judged devices; `alone` has one for each way."""

    shared: float
    alone: np.ndarray
    own: float


def measure(fleet: DealtFleet, seed: int) -> Iterator[HeadsReach]:
    """Yields the figures at each epsilon."""
    dealt, judged, devices = fleet.dealt, range(len(fleet.tests)), len(fleet.dealt.y)

    def right(said: list[np.ndarray]) -> float:
        return 100 * float(np.mean([accuracy(said[i], fleet.tests[i][1], dealt.mixes[i]) for i in judged]))

    train = [samples(dealt.x[i], dealt.y[i]) for i in judged]
    ways = [predict_alone(train[i], [samples(*fleet.tests[i])], classes=dealt.classes)[0] for i in judged]
    alone = np.array([right([each[way] for each in ways]) for way in ways[0]])
    for epsilon in EPSILONS:
        r = signal(devices=devices, epsilon=epsilon, delta=DELTA)
        rounds, clip_norm, directions = steps_at(r)
        given = partial(leading, directions=directions if fleet.have_order else sys.maxsize)
        server = TailMean(rounds, 0.0, clip_norm, math.sqrt(rounds) * devices / r)
        head = shared_head(Dealt(given(dealt.x), dealt.y, dealt.mixes), server, np.random.default_rng([seed, 2]))
        params = np.concatenate([head.T.ravel(), np.zeros(dealt.classes, np.float32)])
        layout = ParamLayout((WEIGHT, PRIOR), (head.T.shape, (dealt.classes,)))
        kept = [own_head_of(params, layout, samples(dealt.x[i], dealt.y[i], given), r).params for i in judged]
        tests = [inputs_of_own(samples(*each, given)).x for each in fleet.tests]
        own = right([own_logits(kept[i], tests[i]).argmax(1) for i in judged])
        yield HeadsReach(right([(given(x) @ head).argmax(1) for x, _ in fleet.tests]), alone, own)


def accuracy(said: np.ndarray, labels: np.ndarray, mix: np.ndarray) -> float:
    """Returns the accuracy if the classes had the shares `mix`."""
    weights = mix[labels] / np.bincount(labels, minlength=len(mix))[labels]
    return float(weights @ (said == labels) / weights.sum())


def samples(x: np.ndarray, y: np.ndarray, given: Callable[[np.ndarray], np.ndarray] | None = None) -> FeatureSamples:
    """Returns samples as from a task's graph: the features of the shared head if they are others, followed by all."""
    shared = x if given is None else given(x)
    both, count = (x, None) if shared is x else (np.concatenate([shared, x], 1), shared.shape[1])
    return FeatureSamples(np.ascontiguousarray(both)[:, :, None, None], y, given=count)


@cache
def graph(name: str, shape: tuple[int, int, int], standardised: bool) -> onnxruntime.InferenceSession:
    return open_session(get_features(name, shape, standardised=standardised).graph)


def featured(name: str, x: np.ndarray, *, standardised: bool = False) -> np.ndarray:
    """Returns features float32 `[..., F]` of samples `[..., C, H, W]`."""
    rows = x.reshape(-1, *x.shape[-3:]).astype(np.float32)
    session = graph(name, rows.shape[1:], standardised)
    found = [session.run(["features"], {"x": rows[i : i + 256]})[0] for i in range(0, len(rows), 256)]
    return np.concatenate(found).reshape(*x.shape[:-3], -1)


def unit_norm(x: np.ndarray, tests: list[np.ndarray], *, named: bool) -> list[np.ndarray]:
    """Returns features of training samples `[..., C, H, W]`, and of the tests.

    :param named: whether the task names mean and deviation of each channel.
    """
    axes = tuple(axis for axis in range(x.ndim) if axis != x.ndim - 3)
    mean, std = (x.mean(axes), x.std(axes)) if named else (np.zeros(x.shape[-3]), np.ones(x.shape[-3]))
    scaled = ((each - mean[:, None, None]) / std[:, None, None] for each in (x, *tests))
    return [featured("unit-norm", each, standardised=named) for each in scaled]


@cache
def digits() -> tuple[np.ndarray, ...]:
    """Returns 1,200 images `[n, 1, 8, 8]` in [0, 1] and their labels, and 597 others."""
    parts = load("digits")
    x, y = (np.concatenate([getattr(parts.train, name), getattr(parts.test, name)]) for name in ("images", "labels"))
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order] / np.float32(255), y[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


@cache
def digits_with(features: str) -> Images:
    x, y, test_x, test_y = digits()
    if features == "filters":
        return Images(featured("filters", x), y, featured("filters", test_x), test_y)
    train, test = unit_norm(x, [test_x], named=True)
    return Images(train, y, test, test_y)


@cache
def pictures(name: str, features: str, data_dir: Path) -> Images:
    parts = load(name, data_dir=data_dir)
    train, test = parts.train.take(slice(0, 8000)), parts.test.take(slice(0, 2000))
    x, test_x = (each.images / np.float32(255) for each in (train, test))
    if features == "unit-norm":
        x, test_x = unit_norm(x, [test_x], named=True)
    else:
        x, test_x = featured(features, x), featured(features, test_x)
    return Images(x, train.labels, test_x, test.labels)


@cache
def tumours(*, named: bool) -> Images:
    """Returns measures of tumours in thirty units: the public data set of breast cancer, two classes."""
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order, :, None, None], y[order].astype(np.int64)
    train, test = unit_norm(x[:400], [x[400:]], named=named)
    return Images(train, y[:400], test, y[400:])


def dealt_out(
    images: Callable[[], Images],
    devices: int,
    each: int,
    seed: int,
    *,
    alpha: float | None = None,
    have_order: bool = False,
) -> DealtFleet:
    """Divides a data set among devices, all of which have its test part."""
    of = images()
    tests = [(of.test_x, of.test_y)] * min(JUDGED, devices)
    return DealtFleet(deal(of, devices=devices, each=each, seed=seed, alpha=alpha), tests, have_order)


def embeddings(rng: np.random.Generator, *, apart: float = 0.0) -> tuple[int, Callable[[], Draw]]:
    """:param apart: how far devices move and mix what lies below the numbers, relative to the classes' distance."""
    inner, outer, classes = 40, 192, 12
    spread, centres = rng.standard_normal((inner, outer)) / inner**0.5, 0.55 * rng.standard_normal((classes, inner))
    scale, mean = np.exp(0.5 * rng.standard_normal(outer)), 3 * rng.standard_normal(outer)

    def device() -> Draw:
        mixed = np.eye(inner) + 0.6 * apart * rng.standard_normal((inner, inner)) / inner**0.5
        moved = 0.55 * apart * rng.standard_normal(inner)

        def draw(labels: np.ndarray) -> np.ndarray:
            below = (centres[labels] + 0.8 * rng.standard_normal((len(labels), inner))) @ mixed + moved
            noise = 0.3 * rng.standard_normal((len(labels), outer))
            return ((below @ spread + noise) * scale + mean)[:, :, None, None]

        return draw

    return classes, device


def sensors(rng: np.random.Generator) -> tuple[int, Callable[[], Draw]]:
    centres, noise = 1.2 * rng.standard_normal((5, 4)), rng.uniform(0.4, 1, 4)
    return 5, lambda: lambda labels: (centres[labels] + noise * rng.standard_normal((len(labels), 4)))[:, :, None, None]


def series(rng: np.random.Generator, *, apart: float = 0.0) -> tuple[int, Callable[[], Draw]]:
    """:param apart: how far machines differ from each other."""
    classes, channels, steps = 6, 3, 40
    time, means = np.arange(steps) / steps, np.array([0.0, 3.0, 9.8])[:, None]
    strengths, phases = rng.standard_normal((4, classes, channels, 1)), rng.random((4, classes, channels, 1))
    shapes = sum(strengths[f] * np.sin(2 * np.pi * ((f + 1) * time + phases[f])) for f in range(4))

    def device() -> Draw:
        gain, mean = (
            np.exp(0.4 * apart * rng.standard_normal((channels, 1))),
            apart * rng.standard_normal((channels, 1)),
        )
        mixed = np.eye(channels) + 0.3 * apart * rng.standard_normal((channels, channels))
        own = 0.7 * apart * rng.standard_normal(shapes.shape).cumsum(-1) / steps**0.5
        seen = np.roll(mixed @ (shapes + own), round(apart * rng.integers(-4, 5)), -1) * gain

        def draw(labels: np.ndarray) -> np.ndarray:
            size = np.exp(0.2 * rng.standard_normal((len(labels), 1, 1)))
            noise = 2 * rng.standard_normal((len(labels), channels, steps))
            return (size * seen[labels] + means + mean + noise)[:, :, None]

        return draw

    return classes, device


def made_up(
    world: World, devices: int, each: int, seed: int, *, alpha: float | None = None, named: bool = True
) -> DealtFleet:
    """Makes the samples of all devices, and other samples of the judged ones, all classes alike."""
    rng = np.random.default_rng([seed, 3])
    classes, device = world(rng)
    mixes = np.full((devices, classes), 1 / classes)
    if alpha is not None:
        mixes = rng.dirichlet(np.full(classes, alpha), devices)
    x, y, tests = [], [], []
    for number, mix in enumerate(mixes):
        draw, labels = device(), rng.choice(classes, each, p=mix)
        x.append(draw(labels))
        y.append(labels)
        if number < JUDGED:
            shown = rng.permutation(np.arange(TESTED) % classes)
            tests.append((draw(shown), shown))
    features, *seen = unit_norm(np.stack(x), [test for test, _ in tests], named=named)
    pairs = [(found, labels) for found, (_, labels) in zip(seen, tests, strict=True)]
    return DealtFleet(Dealt(features, np.stack(y), mixes), pairs, have_order=False)


def activity(devices: int, each: int, seed: int) -> DealtFleet:
    """Makes the windows of people, and other windows of the judged ones, with the same classes."""
    rng = np.random.default_rng([seed, 5])
    people = [person(rng, each + (TESTED if number < JUDGED else 0)) for number in range(devices)]
    train = np.stack([x[:each, :, None] for x, _ in people])
    features, *seen = unit_norm(train, [x[each:, :, None] for x, _ in people[:JUDGED]], named=True)
    mixes = np.stack([np.bincount(y, minlength=5) / len(y) for _, y in people])
    tests = [(found, y[each:]) for found, (_, y) in zip(seen, people, strict=False)]
    return DealtFleet(Dealt(features, np.stack([y[:each] for _, y in people]), mixes), tests, have_order=False)


def speakers(devices: int, each: int, seed: int) -> DealtFleet:
    """Divides the digits among devices, each of which sees them in its own way."""
    x, y, test_x, test_y = digits()
    rng = np.random.default_rng([seed, 4])
    chosen = rng.permutation(len(y))[: devices * each].reshape(devices, each)
    found, tests = [], []
    for number, mine in enumerate(chosen):
        see = own_view(rng)
        found.append(featured("filters", see(x[mine])))
        if number < JUDGED:
            tests.append((featured("filters", see(test_x)), test_y))
    return DealtFleet(Dealt(np.stack(found), y[chosen], np.full((devices, 10), 0.1)), tests, have_order=True)


def own_view(rng: np.random.Generator) -> Draw:
    """Returns a function of images `[n, 1, 8, 8]`."""
    angle, size, light = rng.uniform(-0.6, 0.6), np.exp(rng.uniform(-0.2, 0.2)), np.exp(rng.uniform(-0.5, 0.3))
    middle, moved, noise = np.full(2, 3.5), rng.uniform(-0.64, 0.64, 2), rng.uniform(0, 0.15)
    turned = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]) / size
    offset = middle - turned @ (middle + moved)

    def see(images: np.ndarray) -> np.ndarray:
        seen = np.stack([affine_transform(image[0], turned, offset, order=1) for image in images])
        changed: np.ndarray = (light * seen + noise * rng.standard_normal(seen.shape)).clip(0, 1)[:, None]
        return changed

    return see


class DataKind(NamedTuple):
    """A row of the table for each size and epsilon.

    :param make: makes a fleet of a number of devices with a number of samples, by a seed.
    :param sizes: devices and samples per device; the first one is that of --quick.
    """

    group: str
    name: str
    make: Callable[[int, int, int], DealtFleet]
    sizes: tuple[tuple[int, int], ...]


def kinds(data_dir: Path | None) -> Iterator[DataKind]:
    filters = partial(dealt_out, partial(digits_with, "filters"), have_order=True)
    yield DataKind("images", "digits, filters", filters, ((30, 20), (12, 20), (100, 12)))
    plain = partial(dealt_out, partial(digits_with, "unit-norm"))
    yield DataKind("images", "digits, no features", plain, ((30, 20), (12, 20), (100, 12)))
    yield DataKind("vectors", "embeddings", partial(made_up, embeddings), ((60, 20), (15, 20), (180, 20)))
    yield DataKind("vectors", "embeddings, values unchanged", partial(made_up, embeddings, named=False), ((60, 20),))
    yield DataKind("vectors", "tumours", partial(dealt_out, partial(tumours, named=True)), ((30, 12), (12, 20)))
    raw = partial(dealt_out, partial(tumours, named=False))
    yield DataKind("vectors", "tumours, values unchanged", raw, ((30, 12), (12, 20)))
    yield DataKind("vectors", "sensors", partial(made_up, sensors), ((100, 20), (20, 20)))
    yield DataKind("series", "series", partial(made_up, series), ((60, 20), (20, 20), (150, 40)))
    yield DataKind("series", "series, values unchanged", partial(made_up, series, named=False), ((60, 20), (20, 20)))
    for alpha in (0.5, 0.1):
        some = partial(filters, alpha=alpha)
        yield DataKind("label shift", f"digits, filters, alpha {alpha}", some, ((30, 20), (12, 20), (100, 12)))
        some = partial(made_up, embeddings, alpha=alpha)
        yield DataKind("label shift", f"embeddings, alpha {alpha}", some, ((60, 20), (15, 20), (180, 20)))
    yield DataKind("label shift", "series, alpha 0.5", partial(made_up, series, alpha=0.5), ((60, 20), (20, 20)))
    yield DataKind("speaker shift", "digits, filters", speakers, ((40, 30), (20, 20), (100, 12)))
    for apart in (0.5, 1.0, 2.0):
        some = partial(made_up, partial(embeddings, apart=apart))
        yield DataKind("speaker shift", f"embeddings, {apart:g} apart", some, ((60, 20), (15, 20), (180, 20)))
    for apart in (0.5, 1.0):
        some = partial(made_up, partial(series, apart=apart))
        yield DataKind("speaker shift", f"series, {apart:g} apart", some, ((60, 20), (20, 20), (150, 40)))
    yield DataKind("speaker shift", "activity", activity, ((24, 40), (60, 20)))
    if data_dir is not None:
        of = partial(dealt_out, partial(pictures, "fashion-mnist", "scattering", data_dir), have_order=True)
        yield DataKind("images", "Fashion-MNIST, scattering", of, ((30, 20), (100, 20)))
        yield DataKind(
            "label shift", "Fashion-MNIST, scattering, alpha 0.5", partial(of, alpha=0.5), ((30, 20), (100, 20))
        )
        of = partial(dealt_out, partial(pictures, "mnist", "unit-norm", data_dir))
        yield DataKind("images", "MNIST, no features", of, ((14, 20), (50, 20), (200, 20)))
        some = partial(of, alpha=0.5)
        yield DataKind("label shift", "MNIST, no features, alpha 0.5", some, ((14, 20), (50, 20), (200, 20)))


def rows(kind: DataKind, size: tuple[int, int]) -> Iterator[Figures]:
    """Yields the row of each epsilon."""
    by_seed = [list(measure(kind.make(*size, seed), seed)) for seed in SEEDS]
    for epsilon, found in zip(EPSILONS, zip(*by_seed, strict=True), strict=True):
        ways = np.array([each.alone for each in found])
        alone, linear = (some[:, some.mean(0).argmax()] for some in (ways, ways[:, : len(PENALTIES)]))
        shared, own = (np.array([getattr(each, name) for each in found]) for name in ("shared", "own"))
        gain = own - (shared if shared.mean() > alone.mean() else alone)
        yield {
            "kind": kind.group,
            "data": kind.name,
            "fleet": f"{size[0]} x {size[1]}",
            "epsilon": epsilon,
            "shared": round(float(shared.mean()), 1),
            "alone": round(float(alone.mean()), 1),
            "linear": round(float(linear.mean()), 1),
            "own": round(float(own.mean()), 1),
            "to the better": round(float(gain.mean()), 1),
            "error": round(float(gain.std(ddof=1) / math.sqrt(len(gain))), 1),
            "goal": "pass" if gain.mean() >= GOAL else "miss",
        }


def main(words: list[str] | None = None) -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--data-dir", type=Path, help="where the files of Fashion-MNIST are")
    parser.add_argument("--quick", action="store_true", help="one fleet of each kind of data")
    options = parser.parse_args(words)
    found = [
        row
        for kind in kinds(options.data_dir)
        for size in kind.sizes[: 1 if options.quick else None]
        for row in rows(kind, size)
    ]
    decimals = ({key: f"{each:.1f}" if isinstance(each, float) else each for key, each in row.items()} for row in found)
    table(f"own heads, means of {len(SEEDS)} seeds: accuracy in per cent", decimals)
    write(options, {"rows": found})


if __name__ == "__main__":
    main()
