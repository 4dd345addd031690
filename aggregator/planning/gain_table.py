"""Reads the figures that `benchmarks/private_gain.py` measured, and interpolates between them.

With noise, the gain depends on one number, r = n / z_1 (`hushfleet.methods.hush_rule.signal`), on the number of images
per device, and on the number of classes. Between measured cells accuracies are interpolated in the logarithms of these;
outside of them the accuracies of the nearest cell are used, and the estimate says so.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hushfleet.aggregator.config.sections import PlanSection
from hushfleet.methods.hush_rule import signal

_Key = tuple[str, float | None, int, int]
"""Features, alpha, classes, images per device."""
_OF_COLOUR = " of colour"
ALIKE_FROM = 2.0
"""A Dirichlet distribution of this alpha or more is closer to devices that are alike than to the measured alpha."""


@dataclass(frozen=True)
class Accuracies:
    """Accuracies of one fleet, means over its devices; shares of 1.

    :param alone: the best way to learn alone, chosen in hindsight, on a device's own mix of labels.
    :param chosen: the head that a device chooses by its own images, on the same mix.
    :param alone_common: learning alone, on a test set that is common to all devices.
    :param shared: the shared head, on the common test set.
    :param spread: standard deviation of `chosen - alone` over seeds.
    """

    alone: float
    chosen: float
    alone_common: float
    shared: float
    spread: float

    @property
    def gain(self) -> float:
        return self.chosen - self.alone

    @property
    def gain_common(self) -> float:
        return self.shared - self.alone_common


class PublicGain(NamedTuple):
    """The use of public samples of the same kind, by a simulation on own images; accuracies of personalized heads.

    :param samples: their number.
    :param labelled: the accuracy of a head that is trained on them with labels, without a fleet.
    """

    samples: int
    without: float
    given: float
    labelled: float

    @property
    def in_words(self) -> str:
        """One sentence or two, with full stops."""
        use = (
            f"{self.samples} such samples that are public, without labels (model.public): personalized heads reach "
            f"{100 * self.given:.1f} % in place of {100 * self.without:.1f} %."
        )
        best = max(self.given, self.without)
        if self.labelled <= best:
            return f"{use} A head trained on them with labels: {100 * self.labelled:.1f} %."
        return (
            f"{use} If they have labels, a head trained on them alone reaches {100 * self.labelled:.1f} %, more than "
            "the fleet: then train on them, and put nobody's privacy at risk."
        )


class Estimate(NamedTuple):
    """The table's answer for a fleet.

    :param signal: the fleet's r.
    :param near: the measured cells that it was interpolated between, in words.
    :param outside: in which respects the fleet lies outside of the table, in words; empty if in none.
    :param alpha: Dirichlet parameter of the measured cells; None: their devices are alike.
    :param data: the data sets on which these cells were measured.
    :param colour: whether they are of colour images.
    """

    signal: float
    accuracies: Accuracies
    near: tuple[str, ...]
    outside: tuple[str, ...]
    alpha: float | None = None
    data: tuple[str, ...] = ()
    colour: bool = False


@dataclass(frozen=True)
class _Curve:
    """Cells of one data set and one number of images: signals in rising order, and values `[cells, 5]` in the order of
    `Accuracies`.

    :param data: names of the data sets, one as a rule.
    """

    name: str
    data: tuple[str, ...]
    signals: np.ndarray
    values: np.ndarray

    def at(self, signal: float) -> np.ndarray:
        where = np.log(self.signals)
        found: np.ndarray = np.array([np.interp(math.log(signal), where, column) for column in self.values.T])
        return found


class GainTable:
    """The measured cells.

    :param plain: the cells as the script writes them.
    :param measured_on: the user's own images on which they were measured; empty: other images were used.
    :param notes: further remarks that apply to all cells.
    :param public: the use of public samples; None if it was not measured.

    `sizes` and `epsilons` are the measured numbers of devices and epsilons, in rising order.
    """

    def __init__(
        self,
        plain: Mapping[str, Any],
        *,
        measured_on: str = "",
        notes: tuple[str, ...] = (),
        public: PublicGain | None = None,
    ) -> None:
        self.measured_on, self.notes, self.public = measured_on, notes, public
        self.seeds, self.date, self.made_by = plain["seeds"], plain["date"], plain["made_by"]
        self.fleets = plain["fleets"]
        self.least_seeds = min((fleet["seeds"] for fleet in plain["fleets"]), default=0)  # some fleets have fewer
        self.features: Mapping[str, Mapping[str, float]] = plain["features"]
        self.sizes = sorted({fleet["devices"] for fleet in plain["fleets"]})
        self.epsilons = sorted({point["epsilon"] for fleet in plain["fleets"] for point in fleet["points"]})
        cells: dict[_Key, list[tuple[float, list[float]]]] = defaultdict(list)
        data: dict[_Key, set[str]] = defaultdict(set)
        for fleet in plain["fleets"]:
            if fleet["honest"] < 1:
                continue
            key = fleet["features"], fleet["alpha"], fleet["classes"], fleet["images"]
            data[key] |= {fleet["data"]} if "data" in fleet else set()
            for point in fleet["points"]:
                r = signal(devices=fleet["devices"], epsilon=point["epsilon"], delta=plain["delta"])
                alone = fleet["alone"]
                values = [alone["own"], point["chosen"]["own"], alone["common"], point["shared"]["common"]]
                cells[key].append((r, [*values, point["gain_std"]]))
        self._curves = {key: _curve(key, found, tuple(sorted(data[key]))) for key, found in cells.items()}

    @classmethod
    def of_plan(cls, plan: PlanSection, *, features: str, classes: int, delta: float) -> GainTable:
        """Returns the table of a task's `[plan]` that has a simulation; `hushfleet plan --data --out` writes it."""
        points = [
            {"epsilon": epsilon, "chosen": {"own": own}, "shared": {"common": common}, "gain_std": std}
            for epsilon, own, common, std in plan.points
        ]
        alone = dict(zip(("own", "common"), plan.alone, strict=True))
        fleet = {"features": features, "classes": classes, "devices": plan.devices, "images": plan.images}
        fleet |= {"alpha": plan.alpha, "honest": 1.0, "seeds": 1, "alone": alone, "points": points}
        plain = {"made_by": "hushfleet plan --data", "date": "", "seeds": (), "delta": delta, "features": {}}
        return cls(plain | {"fleets": [fleet]}, measured_on=plan.measured_on)

    def estimate(self, *, features: str, signal: float, images: int, classes: int, alpha: float | None) -> Estimate:
        """:param signal: r. :param alpha: of the Dirichlet distribution of labels; None: devices are alike.

        Features that were not measured are treated as scattering.
        """
        outside: list[str] = []
        if features not in {key[0] for key in self._curves}:
            outside.append(f"features {features!r} were not measured; these are scattering's figures")
            features = "scattering"
        known = [key for key in self._curves if key[0] == features]
        shown = _nearest(alpha, [key[1] for key in known])
        if shown is not None and not _within(classes, [key[2] for key in known if key[1] == shown]):
            outside.append(f"devices that differ were not measured with {classes} classes, so alike ones are shown")
            shown = None
        elif alpha is not None and shown != alpha:
            figures = "devices that are alike" if shown is None else f"alpha {shown:g}"
            outside.append(f"alpha {alpha:g} was not measured; these are the figures of {figures}")
        known = [key for key in known if key[1] == shown]
        total, near, data = np.zeros(5), list[str](), list[str]()
        for of_classes, share in _between(classes, [key[2] for key in known]):
            seen = [key[3] for key in known if key[2] == of_classes]
            if not _within(images, seen):
                outside.append(f"samples a device {images} outside of {min(seen)} to {max(seen)}")
            for of_images, part in _between(images, seen):
                curve = self._curves[features, shown, of_classes, of_images]
                total += share * part * curve.at(signal)
                near.append(curve.name)
                data += curve.data
                if not curve.signals[0] * 0.999 <= signal <= curve.signals[-1] * 1.001:
                    outside.append(
                        f"the signal {signal:.3g} is outside of {curve.signals[0]:.3g} to {curve.signals[-1]:.3g}"
                    )
        if not _within(classes, seen := [key[2] for key in known]):
            outside.append(f"classes {classes} outside of {min(seen)} to {max(seen)}")
        found, once = Accuracies(*map(float, total)), dict.fromkeys
        colour = features.endswith(_OF_COLOUR)
        return Estimate(signal, found, tuple(near), tuple(once(outside)), shown, tuple(once(data)), colour)

    def beyond(self, *, devices: int, epsilon: float) -> tuple[str, ...]:
        """Says in words whether no fleet of about so many devices, or no such epsilon, was measured.

        A simulation on own images stands for all fleets with its signals, whatever their number of devices is.
        """
        said = []
        if not self.measured_on and not _within(devices, self.sizes):
            said.append(f"{devices:,} devices are outside of {self.sizes[0]:,} to {self.sizes[-1]:,}")
        if not self.epsilons[0] * 0.999 <= epsilon <= self.epsilons[-1] * 1.001:
            said.append(f"epsilon {epsilon:g} is outside of {self.epsilons[0]:g} to {self.epsilons[-1]:g}")
        return tuple(said)


def table_name(features: str, *, colour: bool) -> str:
    """Returns the name of features in a table: features of colour images have a name of their own."""
    return features + _OF_COLOUR if colour else features


@cache
def gain_table() -> GainTable:
    """Returns the table that comes with the package."""
    text = resources.files("hushfleet.aggregator.planning").joinpath("private_gain.json").read_text(encoding="utf-8")
    return GainTable(json.loads(text))


def _curve(key: _Key, cells: list[tuple[float, list[float]]], data: tuple[str, ...]) -> _Curve:
    """Makes a curve. Cells with similar signals become one cell, their mean, so that the curve has no random steps."""
    cells.sort(key=lambda cell: cell[0])
    groups: list[list[tuple[float, list[float]]]] = []
    for cell in cells:
        if groups and cell[0] < 1.25 * groups[-1][0][0]:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    features, alpha, classes, images = key
    name = f"{features}, {classes} classes, {images} samples a device" + ("" if alpha is None else f", alpha {alpha:g}")
    return _Curve(
        name,
        data,
        np.array([math.exp(np.mean([math.log(r) for r, _ in group])) for group in groups]),
        np.array([np.mean([values for _, values in group], axis=0) for group in groups]),
    )


def _nearest(alpha: float | None, measured: Sequence[float | None]) -> float | None:
    """Returns the measured alpha that is nearest in its logarithm; None for devices that are about alike."""
    differ = {each for each in measured if each is not None}
    if alpha is None or alpha >= ALIKE_FROM or not differ:
        return None
    return min(differ, key=lambda each: abs(math.log(each / alpha)))


def _between(value: float, known: Sequence[int]) -> list[tuple[int, float]]:
    """Returns the measured neighbours of `value`, each with its weight; the nearest one for values outside of them."""
    seen = sorted(set(known))
    value = min(max(value, seen[0]), seen[-1])
    for low, high in pairwise(seen):
        if low < value < high:
            share = math.log(value / low) / math.log(high / low)
            return [(low, 1 - share), (high, share)]
    return [(int(value), 1.0)]


def _within(value: float, known: Sequence[int]) -> bool:
    return min(known) <= value <= max(known)
