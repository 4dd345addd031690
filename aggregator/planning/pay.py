"""Says in one sentence whether a fleet pays. Every place that tells it takes the sentence from here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hushfleet.aggregator.config.sections import PlanSection
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.report.readable import evaluated
from hushfleet.aggregator.results.answers import EvaluationRow
from hushfleet.at_need import at_need
from hushfleet.data.form import OWN_DATA, SOUND_SETS
from hushfleet.privacy.accountant import Step, epsilon

if TYPE_CHECKING:
    from hushfleet.aggregator.planning import advice, gain_errors, gain_table
    from hushfleet.aggregator.planning.advice import Advice, ImagesBy, Question
    from hushfleet.aggregator.planning.gain_errors import Answer, Interval
    from hushfleet.methods import hush_rule
else:  # for tasks that are like the measured ones
    advice = at_need("hushfleet.aggregator.planning.advice")
    gain_errors = at_need("hushfleet.aggregator.planning.gain_errors")
    gain_table = at_need("hushfleet.aggregator.planning.gain_table")
    hush_rule = at_need("hushfleet.methods.hush_rule")

USUAL_IMAGES = 20  # per device, if neither the plan nor the boards say a number
_LEAST_ROUNDS = 8  # the distance in all rounds decides; with 8 rounds instead of 20 gains differed by half a point
_NEAR = (0.5, 1.5)  # times the rule's distance: gains differed by less than a point


@dataclass(frozen=True)
class MeasuredGain:
    """The answer by the task's own evaluation; `lasts_s` as in `Advice`."""

    row: EvaluationRow
    lasts_s: float | None = None

    @property
    def answer(self) -> Answer:
        return self._interval.answer

    @property
    def in_words(self) -> str:
        return advice.verdict(self.answer, f"{self._interval} over staying alone, {evaluated(self.row)}", self.lasts_s)

    @property
    def _interval(self) -> Interval:
        gain = self.row.gain
        return gain_errors.Interval(gain.value - gain.error, gain.value + gain.error)


if TYPE_CHECKING:
    PayAnswer = Advice | MeasuredGain
else:
    PayAnswer = Any


def pay(
    task: Task,
    *,
    devices: int | None = None,
    images: int | None = None,
    images_by: ImagesBy = "assumed",
    described: tuple[int, tuple[int, int, int] | None] | None = None,
    evaluation: EvaluationRow | None = None,
    lasts_s: float | None = None,
) -> PayAnswer | None:
    """Answers whether a fleet gains by a task; None if nothing like it was measured: with another method than `hush`,
    or without noise.

    :param devices: number of devices that exist; None: as many as the task says.
    :param images: training images per device; None: the plan's guess, or else `USUAL_IMAGES`.
    :param described: number of classes, and shape of an image; None: as the task says.
    :param evaluation: the newest one. If it is exact enough, it is the answer, and nothing is predicted.
    :param lasts_s: as `Advice.lasts_s`.
    """
    if evaluation is not None and evaluation.is_useful:
        return MeasuredGain(evaluation, lasts_s)
    privacy, plan, described = task.privacy, task.plan or PlanSection(), described or _described(task)
    if task.method.name != "hush" or privacy.unit != "device" or not task.noises_updates or described is None:
        return None
    spent = [Step(task.privacy_spec().noise_multiplier / task.noise_factor, 1.0, task.round.rounds)]
    in_a_round = min(task.round.cohort_size or math.inf, devices or task.data.devices)
    asked = advice.Question(
        devices=int(in_a_round),
        images=images or images_of(task),
        classes=described[0],
        epsilon=privacy.epsilon or epsilon(spent, delta=task.delta),
        delta=task.delta,
        features=task.model.features or f"of {task.model.name}",
        alpha=task.data.alpha if task.data.partition.startswith("dirichlet") else plan.alpha,
        shape=described[1],
    )
    table = gain_table.gain_table()
    if plan.measured_on and plan.images == asked.images:
        table = gain_table.GainTable.of_plan(plan, features=asked.measured_as, classes=asked.classes, delta=task.delta)
    # an evaluation takes its share of the budget, so that training has as much more noise
    counted = math.sqrt(asked.devices * task.noise_split) / task.noise_factor
    found = asked.estimate(table, counted=counted)
    found = found._replace(outside=(*found.outside, *_unlike_the_table(task, asked, counted)))
    return advice.Advice(asked, found, table, images_by=images_by, data=task.data.name, lasts_s=lasts_s)


def images_of(task: Task) -> int:
    """Returns the number of images per device that is assumed as long as nobody has told it."""
    return (task.plan and task.plan.images) or USUAL_IMAGES


def _described(task: Task) -> tuple[int, tuple[int, int, int] | None] | None:
    """Returns the number of classes and the shape of images; None if only the data say them."""
    if task.data.name in (*OWN_DATA, *SOUND_SETS):
        return (len(task.class_names), task.data.shape) if task.class_names else None
    from hushfleet.data.sets import SOURCES

    source = SOURCES[task.data.name]
    return len(source.class_names), (3, 32, 32) if len(source.mean) == 3 else None


def _unlike_the_table(task: Task, asked: Question, counted: float) -> Iterator[str]:
    """Says in which respects a task differs from each fleet of the table."""
    partition, usual = task.data.partition, hush_rule.rule(devices=counted, epsilon=asked.epsilon, delta=asked.delta)
    if partition not in ("iid", "dirichlet-device"):
        yield f"the partition {partition} was not measured"
    rounds, clip_norm = task.round.rounds, task.privacy.clip_norm
    low, high = _NEAR
    if rounds < _LEAST_ROUNDS or not low <= rounds * clip_norm / (usual.rounds * usual.clip_norm) <= high:
        yield (
            f"{rounds} rounds with a clip norm of {clip_norm:g} were not measured, but {usual.rounds} with "
            f"{usual.clip_norm:g}"
        )
