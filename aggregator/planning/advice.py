"""Estimates from measurements what a fleet's devices gain by a private shared head over learning alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from hushfleet.aggregator.config.secure_sums import LEAST_SHARE
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.planning.gain_errors import Answer, Intervals, Way, gain_errors
from hushfleet.aggregator.planning.gain_table import Estimate, GainTable, gain_table, table_name
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.methods.hush_rule import rule, signal
from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.secure.committee import least_honest

USUAL_IMAGES = 20  # per device, if the number is not known
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
        from hushfleet.models.features import have_order  # with PyTorch

        return have_order(self.features)

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
    """The answer, and the answers for fleets of other sizes and for other epsilons.

    Every place that says whether a fleet pays takes its words from here.

    :param assumes_images: whether the number of images per device is not known, and `USUAL_IMAGES` are assumed.
    :param data: name of the public data set that the devices have; empty: images that nobody measured.
    """

    question: Question
    estimate: Estimate
    table: GainTable
    assumes_images: bool = False
    data: str = ""

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
        fleet = f"{asked.devices} devices with {asked.images} images each ({alike}) at epsilon {asked.epsilon:g}"
        gain = f"{self.intervals.own} over staying alone"
        own = "measure it with images like yours: hushfleet plan --data FOLDER, or hushfleet simulate"
        if self.estimate.outside:
            return f"Not measured: {fleet}: {self.estimate.outside[0]}. The nearest that was: {gain}; {own}"
        if self.answer == "yes":
            return f"It pays: {fleet}: {gain}"
        if self.answer == "no":
            return f"It does not pay: {fleet}: {gain}; keep the images on the boards and train there"
        return f"It may pay: {fleet}: {gain}" + (f"; {own}" if self.way == "other data" else "")

    @property
    def warning(self) -> str | None:
        """One line for the user who starts such a run; None if it pays."""
        if self.answer == "yes":
            return None
        assumed = " (how many images a device has is not known here)" if self.assumes_images else ""
        return f"{self.in_words}{assumed}. See: hushfleet plan --help"

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

    def least_devices(self) -> int | None:
        """Returns the fleet size from which on all fleets that were measured pay; None: there is none."""
        first = _first_of_last(self.sizes)
        return None if first is None else first.question.devices

    def least_epsilon(self) -> float | None:
        """Returns the epsilon from which on this fleet pays at each that was measured; None: there is none."""
        first = _first_of_last(self.epsilons)
        return None if first is None else first.question.epsilon

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
            except (BadInput, PrivacyError):  # too few devices for a secure sum
                continue
            if not estimate.outside:
                yield replace(self, question=question, estimate=estimate)


def _first_of_last(measured: Sequence[Advice]) -> Advice | None:
    """Returns the first of those that pay up to the end; None if the last one does not pay."""
    first = None
    for each in reversed(measured):
        if each.answer != "yes":
            break
        first = each
    return first


def _in_words(measured: Sequence[tuple[Answer, str]]) -> str:
    """Returns the answers in their order, such as `may pay 8 to 60, pays 61 to 1,000; not measured above 1,000`.

    :param measured: answers, each with its number in words.
    """
    runs = [(answer, [number for _, number in run]) for answer, run in groupby(measured, key=lambda each: each[0])]
    said = [f"{_VERBS[answer]} {' to '.join(dict.fromkeys((run[0], run[-1])))}" for answer, run in runs]
    return ", ".join(said) + f"; not measured above {measured[-1][1]}" if measured else "not measured"


def worth_it(
    task: Task, *, classes: int, images: int | None = None, shape: tuple[int, int, int] | None = None
) -> Advice | None:
    """Returns the advice on a task of method `hush`; None for other methods and for tasks without noise, which were not
    measured.

    :param images: training images per device; None: not known, and 20 are assumed.
    :param shape: shape of an image, as `Question.shape`.
    """
    privacy = task.privacy
    if task.method.name != "hush" or privacy.unit != "device" or not task.noises_updates:
        return None
    spent = [Step(task.privacy_spec().noise_multiplier, 1.0, task.round.rounds)]
    asked = Question(
        devices=task.cohort_size,
        images=images or USUAL_IMAGES,
        classes=classes,
        epsilon=privacy.epsilon or epsilon(spent, delta=task.delta),
        delta=task.delta,
        features=task.model.features or f"of {task.model.name}",
        alpha=task.data.alpha if task.data.partition.startswith("dirichlet") else None,
        shape=shape,
    )
    table, counted = gain_table(), math.sqrt(task.cohort_size * task.noise_split)
    found = asked.estimate(table, counted=counted)
    found = found._replace(outside=(*found.outside, *_unlike_the_table(task, asked, counted)))
    return Advice(asked, found, table, assumes_images=not images, data=task.data.name)


def _unlike_the_table(task: Task, asked: Question, counted: float) -> Iterator[str]:
    """Says in which respects a task differs from each fleet of the table."""
    partition, usual = task.data.partition, rule(devices=counted, epsilon=asked.epsilon, delta=asked.delta)
    if partition not in ("iid", "dirichlet-device"):
        yield f"the partition {partition} was not measured"
    if (task.round.rounds, task.privacy.clip_norm) != (usual.rounds, usual.clip_norm):
        yield (
            f"{task.round.rounds} rounds with a clip norm of {task.privacy.clip_norm:g} were not measured, but "
            f"{usual.rounds} with {usual.clip_norm:g}"
        )
