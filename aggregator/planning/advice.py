"""Estimates from measurements what a fleet's devices gain by a private shared head over learning alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from hushfleet.aggregator.config.secure_sums import LEAST_SHARE
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.planning.gain_table import Estimate, GainTable, gain_table, table_name
from hushfleet.errors import BadInput, PrivacyError
from hushfleet.methods.hush_rule import signal
from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.secure.committee import least_honest

WORTH = 0.01
"""The smallest gain that is worth an epsilon: one percentage point."""
BETWEEN_DATA = 0.1
"""How much the gains of two data sets may differ with the same r, images and classes."""
LEAST_SIGNAL = 12.0
"""The r below which no gain is promised on images that were not measured."""
USUAL_IMAGES = 20  # per device, if the number is not known
_MOST_DEVICES = 100_000
_EPSILONS = np.geomspace(0.1, 32, 120)

Answer = Literal["yes", "no", "perhaps"]


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
        return table.estimate(
            features=self.measured_as, signal=r, images=self.images, classes=self.classes, alpha=self.alpha
        )


@dataclass(frozen=True)
class Advice:
    """The answer, and the fleet size and epsilon at which it would change.

    :param assumes_images: whether the number of images per device is not known, and `USUAL_IMAGES` are assumed.
    """

    question: Question
    estimate: Estimate
    table: GainTable
    assumes_images: bool = False

    @classmethod
    def on(cls, question: Question, table: GainTable | None = None) -> Advice:
        """:param table: by default the table that comes with the package."""
        table = table or gain_table()
        return cls(question, question.estimate(table), table)

    @property
    def unsure(self) -> float:
        """How much the gain of the user's own fleet may differ from the measured gain."""
        return 2 * self.estimate.accuracies.spread if self.table.measured_on else BETWEEN_DATA

    @property
    def too_small(self) -> bool:
        return not self.table.measured_on and self.estimate.signal < LEAST_SIGNAL

    @property
    def answer(self) -> Answer:
        """Yes: it pays with any data; perhaps: only with data like the measured data; no: with neither."""
        gain = self.estimate.accuracies.gain
        if gain < WORTH or self.too_small:
            return "no"
        return "perhaps" if gain < self.unsure else "yes"

    @property
    def in_words(self) -> str:
        """One sentence, without a full stop."""
        asked, found = self.question, self.estimate.accuracies
        fleet = f"{asked.devices} devices with {asked.images} images each at epsilon {asked.epsilon:g}"
        gain = f"{100 * found.gain:+.1f} points over staying alone ({100 * found.alone:.0f} %)"
        if self.answer == "yes":
            return f"It pays: {fleet}: about {gain}"
        if self.answer == "no":
            why = (
                f" (the noise hides what so few devices have in common: r is {self.estimate.signal:.1f}, and "
                f"{LEAST_SIGNAL:g} are needed)"
            )
            return (
                f"It does not pay: {fleet}: about {gain}{why if self.too_small else ''}; keep the images on the boards "
                "and train there"
            )
        if self.table.measured_on:
            return f"Perhaps: {fleet}: about {gain}, give or take {100 * self.unsure:.1f} from one seed to another"
        return (
            f"Perhaps: {fleet}: about {gain}, give or take {100 * self.unsure:.0f} from one data set to another; "
            "measure it with images like yours: hushfleet plan --data FOLDER, or hushfleet simulate"
        )

    @property
    def warning(self) -> str | None:
        """One line for the user who starts such a run; None if it pays."""
        if self.answer == "yes":
            return None
        assumed = " (how many images a device has is not known here)" if self.assumes_images else ""
        return f"{self.in_words}{assumed}. See: hushfleet plan --help"

    def least_devices(self) -> int | None:
        """Returns the fleet size from which on the answer is yes at this epsilon; None if none up to 100,000 exists."""
        sizes = sorted({*range(2, 64), *map(int, np.geomspace(64, _MOST_DEVICES, 200))})
        place = self._first([replace(self.question, devices=size) for size in sizes])
        return None if place is None else sizes[place]

    def least_epsilon(self) -> float | None:
        """Returns the epsilon from which on the answer is yes for this fleet; None if none up to 32 exists."""
        place = self._first([replace(self.question, epsilon=float(epsilon)) for epsilon in _EPSILONS])
        return None if place is None else float(_EPSILONS[place])

    def _first(self, questions: list[Question]) -> int | None:
        first = None
        for place in reversed(range(len(questions))):
            try:
                if Advice.on(questions[place], self.table).answer != "yes":
                    break
            except (BadInput, PrivacyError):  # too few devices for a secure sum
                break
            first = place
        return first


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
        features=task.model.features or ("scattering" if task.model.share == "all" else f"of {task.model.name}"),
        alpha=task.data.alpha if task.data.partition.startswith("dirichlet") else None,
        shape=shape,
    )
    table, counted = gain_table(), math.sqrt(task.cohort_size * task.noise_split)
    return Advice(asked, asked.estimate(table, counted=counted), table, assumes_images=not images)
