"""Predicts the error of a task's `[evaluation]` before any board is asked, and what makes it small enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hushfleet.aggregator.config.question import question_of
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.answers import USEFUL_BELOW
from hushfleet.methods.answer_scale import scale_of
from hushfleet.wire.format.question import EVALUATED, QuestionSpec

DISAGREEMENT = 0.3
"""The share of held-out samples on which exactly one of the two heads is right; it decides how much a gain varies."""
_MOST_DEVICES = 100_000


@dataclass(frozen=True)
class EvaluationError:
    """The error that an evaluation will state for the mean gain over training alone (`EvaluationRow`); shares of 1.

    :param devices: number of devices that answer, each with so many `images`.
    :param split: number of devices among which the noise is divided; 1: each adds all of it.
    :param planned: number of devices for which the task chose `split`.
    :param share: `evaluation.share`.
    """

    question: QuestionSpec
    devices: int
    images: int
    split: float
    planned: int
    share: float

    @property
    def standard_error(self) -> float:
        unit, held_out = scale_of(self.question, EVALUATED).unit, max(1.0, self.question.held_out * self.images)
        noise = self.question.noise_multiplier / math.sqrt(self.devices * self.split)
        # a device tests with few samples, and the spread of gains that is told for this reason has noise as well
        spread = min(1.0, DISAGREEMENT / held_out + noise / unit[4])
        return math.sqrt((noise / unit[1]) ** 2 + spread / self.devices)

    @property
    def is_useful(self) -> bool:
        return self.standard_error < USEFUL_BELOW

    def least_devices(self) -> int | None:
        """Returns for how many devices such a task is useful; None: for more than a task may have."""
        for devices in range(self.devices, _MOST_DEVICES + 1):
            split = self.split * devices / self.planned if self.split > 1 else 1.0
            if replace(self, devices=devices, split=split).is_useful:
                return devices
        return None

    def least_share(self) -> float | None:
        """Returns the share of the budget from which on the evaluation is useful; None: more than a task may take."""
        for share in (number / 100 for number in range(math.ceil(100 * self.share), 51)):
            multiplier = self.question.noise_multiplier * math.sqrt(self.share / share)
            if replace(self, question=replace(self.question, noise_multiplier=multiplier), share=share).is_useful:
                return share
        return None

    @property
    def in_words(self) -> str:
        """Describes the error, and what it needs; without a full stop."""
        found = f"[evaluation] with share = {self.share:g} tells the gain of {self.devices} devices to "
        found += f"± {100 * self.standard_error:.1f} points (one standard error, predicted)"
        if self.is_useful:
            return found
        devices, share = self.least_devices(), self.least_share()
        ways = [f"{devices:,} devices (data.devices)"] if devices is not None else []
        ways += [f"share = {share:g}"] if share is not None else []
        return f"{found}, too much to say whether the fleet pays: it needs {', or '.join(ways) or 'a larger epsilon'}"


def useless_evaluation(task: Task, *, devices: int, images: int) -> str | None:
    """Says why a task's evaluation would tell nothing; None if it would tell something, or the task has none."""
    found = evaluation_error(task, devices=devices, images=images)
    return None if found is None or found.is_useful else f"{task.name}: {found.in_words}; or leave [evaluation] out"


def evaluation_error(task: Task, *, devices: int, images: int) -> EvaluationError | None:
    """Predicts the error of a task's evaluation; None for a task without one, or without noise.

    :param devices: number of devices that answer.
    :param images: images per device.
    """
    section = task.evaluation
    if section is None or not (multiplier := task.privacy_spec().noise_multiplier):
        return None
    question = question_of(task, noise_multiplier=multiplier, classes=2)
    assert question is not None
    return EvaluationError(question, devices, images, task.noise_split, task.cohort_size, section.share)
