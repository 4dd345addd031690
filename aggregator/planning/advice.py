"""Estimates from measurements what a fleet's devices gain by a private shared head over learning alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np

from hushfleet.aggregator.config.secure_aggregation import LEAST_SHARE
from hushfleet.aggregator.planning.gain_errors import Answer, Intervals, Way, gain_errors
from hushfleet.aggregator.planning.gain_table import Estimate, GainTable, gain_table, table_name
from hushfleet.data.form import SAMPLE_RATE, SEGMENT_S, may_be_images
from hushfleet.durations import describe_duration
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.methods.hush_rule import signal
from hushfleet.secure.committee import least_honest
from hushfleet.wire.format.spec import SOUND

DAY_S = 86400.0
YEAR_S, MONTH_S = 365 * DAY_S, 365 * DAY_S / 12
ImagesBy = Literal["assumed", "told by noised counts", ""]
"""Who says how many images a device has; empty: they were counted, in a simulation."""
_MOST_DEVICES = 100_000
_DEVICES = sorted({*range(2, 64), *map(int, np.geomspace(64, _MOST_DEVICES, 200))})
_EPSILONS = [float(f"{epsilon:.2g}") for epsilon in np.geomspace(0.1, 32, 120)]
_VERBS: dict[Answer, str] = {"yes": "pays", "no": "does not pay", "perhaps": "may pay"}


@dataclass(frozen=True)
class Question:
    """A planned fleet.

    :param images: training images per device.
    :param shape: channels, height and width of an image; None: grey images of the usual size.
    :param alpha: parameter of the Dirichlet distribution by which the devices' labels differ; None: they are alike.
    :param local: whether each device adds the whole noise and trusts nobody; else sums are secure.
    """

    devices: int
    images: int
    classes: int
    epsilon: float
    delta: float = 1e-5
    features: str = "scattering"
    honest_fraction: float = 0.9
    alpha: float | None = None
    local: bool = False
    shape: tuple[int, int, int] | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        if self.features.startswith(SOUND):
            return self.shape or (1, 1, round(SEGMENT_S * SAMPLE_RATE))
        side = 8 if self.features == "filters" else 28
        return self.shape or (1, side, side)

    @property
    def measured_as(self) -> str:
        """The name of its features in a table."""
        return table_name(self.features, colour=self.input_shape[0] == 3)

    @cached_property
    def have_order(self) -> bool:
        """Whether the features are ordered by importance, so that a shared head takes only the first ones."""
        if not self.features.endswith(".onnx"):
            return True
        from hushfleet.models.features.backbone import has_classifier  # with onnx

        return has_classifier(Path(self.features.removeprefix(SOUND)))

    @property
    def least_devices(self) -> int:
        """The smallest number of devices in a sum that is opened."""
        return max(2, math.ceil(LEAST_SHARE * self.devices - 1e-9))

    @property
    def honest_devices(self) -> int:
        """The number of devices whose noise a sum relies on. Raises `BadInput` if there are none."""
        honest = least_honest(
            self.least_devices, devices=self.devices, honest_fraction=self.honest_fraction, drawn=self.devices
        )
        if honest == 0:
            raise BadInput(
                f"a sum of {self.least_devices} of {self.devices} devices, of which "
                f"{self.honest_fraction:g} is honest, may have no honest one: more devices are needed, or more trust"
            )
        return honest

    @property
    def counted(self) -> float:
        """The size of a fleet of honest devices, all of them present, whose mean has the same noise."""
        return math.sqrt(self.devices * (1 if self.local else self.honest_devices))

    def estimate(self, table: GainTable, *, counted: float | None = None) -> Estimate:
        """Returns the table's answer. Raises `BadInput` or `PrivacyError` for impossible fleets or epsilons.

        :param counted: replaces the question's own if a task says among how many devices it divides the noise.
        """
        r = signal(devices=counted or self.counted, epsilon=self.epsilon, delta=self.delta)
        found = table.estimate(
            features=self.measured_as, signal=r, images=self.images, classes=self.classes, alpha=self.alpha
        )
        beyond = table.beyond(devices=self.devices, epsilon=self.epsilon)
        return found._replace(outside=(*beyond, *found.outside))


@dataclass(frozen=True)
class Advice:
    """The predicted answer, and the answers for fleets of other sizes and for other epsilons.

    :param data: name of the public data set that the devices have; empty: images that nobody measured.
    :param lasts_s: how long the fleet learns, until a lifetime limit is spent; None: there is no limit.
    """

    question: Question
    estimate: Estimate
    table: GainTable
    images_by: ImagesBy = "assumed"
    data: str = ""
    lasts_s: float | None = None

    @classmethod
    def on(cls, question: Question, table: GainTable | None = None) -> Advice:
        """:param table: by default the table that comes with the package."""
        table = table or gain_table()
        return cls(question, question.estimate(table), table)

    @property
    def way(self) -> Way:
        """How the gain was predicted, which decides how far it may be off."""
        if self.table.measured_on:
            return "simulated"
        return "same data" if self.estimate.data == (self.data,) else "other data"

    @cached_property
    def intervals(self) -> Intervals:
        return gain_errors().intervals(self.way, self.estimate)

    @property
    def answer(self) -> Answer:
        """Yes or no if each gain in the interval says so, and if such fleets were measured."""
        return "perhaps" if self.estimate.outside else self.intervals.own.answer

    @property
    def in_words(self) -> str:
        """One sentence, without a full stop."""
        asked = self.question
        alike = "classes alike" if asked.alpha is None else f"alpha {asked.alpha:g}"
        by = f" ({self.images_by})" if self.images_by else ""
        fleet = f"{asked.devices} devices with {asked.images} samples each{by}, {alike}, at epsilon {asked.epsilon:g}"
        gain = f"{self.intervals.own} over staying alone"
        if self.estimate.outside:
            return f"Not measured: {fleet}: {self.estimate.outside[0]}. The nearest that was: {gain}; {self._measure}"
        return verdict(self.answer, f"{fleet}: {gain}", self.lasts_s) + (
            f"; {self._measure}" if self.answer == "perhaps" and self.way == "other data" else ""
        )

    @property
    def _measure(self) -> str:
        asked = self.question
        if asked.features.startswith(SOUND):
            return f"measure it with clips like yours: hushfleet plan --data FOLDER --features {asked.features}"
        if not may_be_images(asked.shape):
            return "measure it with data like yours: hushfleet simulate"
        return "measure it with images like yours: hushfleet plan --data FOLDER, or hushfleet simulate"

    @cached_property
    def sizes(self) -> list[Advice]:
        """The advice on fleets of other sizes at this epsilon, as far as such fleets were measured."""
        own = () if self.table.measured_on else self.table.sizes
        sizes = sorted({*_DEVICES, *own, self.question.devices})
        return list(self._measured(replace(self.question, devices=size) for size in sizes))

    @cached_property
    def epsilons(self) -> list[Advice]:
        """The advice on this fleet at other epsilons, as far as they were measured."""
        epsilons = sorted({*_EPSILONS, *self.table.epsilons, self.question.epsilon})
        return list(self._measured(replace(self.question, epsilon=epsilon) for epsilon in epsilons))

    @property
    def sizes_in_words(self) -> str:
        return _in_words([(each.answer, f"{each.question.devices:,}") for each in self.sizes])

    @property
    def epsilons_in_words(self) -> str:
        return _in_words([(each.answer, f"{each.question.epsilon:g}") for each in self.epsilons])

    def _measured(self, questions: Iterable[Question]) -> Iterator[Advice]:
        for question in questions:
            try:
                estimate = question.estimate(self.table)
            except (BadInput, PrivacyError):  # too few devices for secure aggregation
                continue
            if not estimate.outside:
                yield replace(self, question=question, estimate=estimate)


def verdict(answer: Answer, why: str, lasts_s: float | None = None) -> str:
    """Returns the sentence of an answer.

    :param lasts_s: how long the fleet learns; None: without an end.
    """
    if answer == "no":
        return f"It does not pay: {why}; keep the samples on the boards and train there"
    return f"It {_VERBS[answer]}{'' if lasts_s is None else f', for {_in_months(lasts_s)}'}: {why}"


def _in_months(seconds: float) -> str:
    """Describes a duration in months or years, or, if it is short, in the largest unit in which it is at least 1."""
    months = round(seconds / MONTH_S)
    if seconds < 2 * MONTH_S:
        return describe_duration(seconds)
    return f"{months} months" if months < 24 else f"{seconds / YEAR_S:.1f} years"


def _in_words(measured: Sequence[tuple[Answer, str]]) -> str:
    """Returns the answers in their order, such as `may pay 8 to 60, pays 61 to 1,000; not measured above 1,000`.

    :param measured: answers, each with its number in words.
    """
    runs = [(answer, [number for _, number in run]) for answer, run in groupby(measured, key=lambda each: each[0])]
    said = [f"{_VERBS[answer]} {' to '.join(dict.fromkeys((run[0], run[-1])))}" for answer, run in runs]
    return ", ".join(said) + f"; not measured above {measured[-1][1]}" if measured else "not measured"
