"""Predicts the error of a task's `[evaluation]` before any board is asked, and what makes it small enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hushfleet.aggregator.config.question import question_of
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.results.answers import USEFUL_BELOW
from hushfleet.config.question import EVALUATED, QuestionSpec
from hushfleet.training.answer import scale_of

DISAGREEMENT = 0.3
"""The share of held-out samples on which exactly one of the two heads is right; it decides how much a gain varies."""
_MOST_DEVICES, _MOST_SHARE = 100_000, 0.5


@dataclass(frozen=True)
class EvaluationError:
    """The predicted error of the mean gain over training alone; shares of 1.

    :param devices: number of devices that answer.
    :param noise_of_one: standard deviation of the noise in the gain that one device would report alone.
    :param split: number of devices among which the noise is divided; 1: each adds all of it.
    :param planned: number of devices for which the task chose `split`.
    :param held_out: number of samples with which a device tests.
    :param share: `evaluation.share`.
    """

    devices: int
    noise_of_one: float
    split: float
    planned: int
    held_out: float
    share: float

    @classmethod
    def of(
        cls, question: QuestionSpec, *, devices: int, split: float, planned: int, images: int, share: float
    ) -> EvaluationError:
        """:param images: images per device."""
        noise = question.noise_multiplier / float(scale_of(question, EVALUATED).unit[1])
        return cls(devices, noise, split, planned, max(1.0, question.held_out * images), share)

    @property
    def noise(self) -> float:
        """The standard deviation of the noise in the mean gain."""
        return self.noise_of_one / math.sqrt(self.devices * self.split)

    @property
    def standard_error(self) -> float:
        return math.sqrt(self.noise**2 + self._sampling)

    @property
    def is_useful(self) -> bool:
        return self.standard_error < USEFUL_BELOW

    @property
    def _sampling(self) -> float:
        """The variance of the mean gain because each device tests with few samples."""
        return DISAGREEMENT / self.held_out / self.devices

    def least_devices(self) -> int | None:
        """Returns for how many devices such a task is useful; None: for more than a task may have."""
        for devices in range(self.devices, _MOST_DEVICES + 1):
            split = self.split * devices / self.planned if self.split > 1 else 1.0
            if replace(self, devices=devices, split=split).is_useful:
                return devices
        return None

    def least_share(self) -> float | None:
        """Returns the share of the budget from which on the evaluation is useful; None: more than a task may take."""
        left = USEFUL_BELOW**2 - self._sampling
        share = math.inf if left <= 0 else math.ceil(100 * self.share * self.noise**2 / left + 1e-6) / 100
        return share if share <= _MOST_SHARE else None

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
        return f"{found}, which says nothing: it needs {', or '.join(ways) or 'a larger epsilon'}"


def useless_evaluation(task: Task, *, devices: int, images: int) -> str | None:
    """Says why a task's evaluation would tell nothing; None if it would tell something, or the task has none."""
    found = evaluation_error(task, devices=devices, images=images)
    return None if found is None or found.is_useful else f"{task.name}: {found.in_words}; or leave [evaluation] out"


def evaluation_error(task: Task, *, devices: int, images: int) -> EvaluationError | None:
    """Predicts the error of a task's evaluation; None for a task without one, or without noise.

    :param devices: number of devices that answer.
    :param images: images per device.
    """
    section, multiplier = task.evaluation, task.privacy_spec().noise_multiplier
    if section is None or not multiplier:
        return None
    question = question_of(task, noise_multiplier=multiplier, classes=2)
    assert question is not None
    return EvaluationError.of(
        question,
        devices=devices,
        split=task.noise_split,
        planned=task.cohort_size,
        images=images,
        share=section.share,
    )
