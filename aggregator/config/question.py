"""The question that a task asks its devices: an evaluation in addition to training, or a statistic of their data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from hushfleet.aggregator.config import rules
from hushfleet.schema import AtLeast1, Checked, Finite, Share, to_plain
from hushfleet.wire.format.question import Bins, HeldOut, Most, QuestionSpec

if TYPE_CHECKING:
    from hushfleet.aggregator.config.task import Task

StatisticKind = Literal["counts", "mean", "histogram", "drift"]


@dataclass(frozen=True)
class EvaluationSection(Checked):
    """`[evaluation]`: rounds in which boards do not train, but answer whether the model is useful to them.

    After the last training round, and after each `every` training rounds, each board tests its own head, a head trained
    alone and the shared model on samples that are never trained on, and answers with a few noised numbers. They are
    summed like updates, and have a privacy cost of their own.

    :param share: of the privacy budget, counted in inverse squared noise multipliers, which add up. Training has the
        rest, so that both together cost the task's epsilon.
    :param every: training rounds between two evaluations; left out, only at the end.
    :param held_out: the share of a board's samples that all training leaves out for the evaluation.
    :param most_gain: a board's gain counts as this much at most, and the error is proportional to that: with 0.5 it is
        half as large, and the result is still right if boards have so many samples that none gains more.
    """

    share: Annotated[float, Meta(ge=1e-6, le=0.5)] = 0.05
    every: AtLeast1 | None = None
    held_out: HeldOut = 0.2
    most_gain: Share = 1.0

    rules = rules.EVALUATION


@dataclass(frozen=True)
class StatisticSection(Checked):
    """`[statistic]`: the task has one round, in which boards do not train, but answer a question about their data.
    `hushfleet fleet ask` writes this section.

    :param kind: `counts` counts the samples in each class, and those that could not be read. `mean` and `histogram` are
        those of a `column`; each board has the same weight, no matter how many samples it has. `drift` counts the
        boards whose own model has become worse on samples that are never trained on, among the boards whose owners have
        set `limits.tell_drift`.
    :param column: for `mean` and `histogram`: the index of a value in a sample, from 0, or the name of a target.
    :param low: public limit of the column: values below it count as the limit.
    :param high: its upper limit.
    :param bins: of a `histogram`.
    :param most: for `counts`: a board whose counts have a norm above it scales them down to that norm.
    """

    kind: StatisticKind
    column: str = ""
    low: Finite = 0.0
    high: Finite = 1.0
    bins: Bins = 10
    most: Most = 50

    rules = rules.STATISTIC

    def check_column(self, values: int | None, targets: Sequence[str] | None) -> None:
        """Raises `ValueError` for a column that no sample has, because boards would answer as if they had no samples.

        :param values: number of values of a sample; None: not known.
        :param targets: names of targets; empty for classes. None: not known.
        """
        if self.kind not in ("mean", "histogram") or (targets is not None and self.column in targets):
            return
        if self.column.isdecimal():
            if values is not None and int(self.column) >= values:
                raise ValueError(f"column = {self.column!r}: a sample has {values} values, numbered from 0")
        elif targets is not None:
            known = f", or one of {', '.join(targets)}" if targets else ""
            raise ValueError(f"column = {self.column!r}: must be the number of a value, from 0{known}")


def evaluations(task: Task) -> int:
    """Counts the rounds that evaluate."""
    section, rounds = task.evaluation, task.round.rounds
    return 0 if section is None else -(-rounds // (section.every or rounds))


def noise_factor(task: Task) -> float:
    """Returns the factor by which an evaluation increases the noise of training."""
    return 1.0 if task.evaluation is None else 1 / math.sqrt(1 - task.evaluation.share)


def noise_by_round(task: Task) -> list[float]:
    """Returns the noise of each round, over that of a training round: evaluations have less, or more, of it."""
    every, total = _every(task), task.total_rounds
    asks = [task.evaluation is not None and (number % every == 0 or number == total) for number in range(1, total + 1)]
    return [_noise_of_evaluation(task) if each else 1.0 for each in asks]


def _every(task: Task) -> int:
    rounds = task.round.rounds
    return 1 + min((task.evaluation and task.evaluation.every) or rounds, rounds)


def _noise_of_evaluation(task: Task) -> float:
    assert task.evaluation is not None
    share = task.evaluation.share
    return math.sqrt((1 - share) / share * evaluations(task) / task.round.rounds)


def question_of(task: Task, *, noise_multiplier: float, classes: int) -> QuestionSpec | None:
    """Makes the specification for devices; returns None for a task without a question.

    :param noise_multiplier: the noise multiplier of an update, or of the one round of a statistic.
    """
    if (section := task.evaluation) is not None:
        every = _every(task)
        noise_multiplier *= _noise_of_evaluation(task)
        held_out, most_gain = section.held_out, section.most_gain
        question = QuestionSpec("evaluation", every, noise_multiplier, held_out=held_out, most_gain=most_gain)
    elif task.statistic is not None:
        question = QuestionSpec(every=1, noise_multiplier=noise_multiplier, **to_plain(task.statistic))
    else:
        return None
    secure = task.secure_spec(noise_multiplier=noise_multiplier, size=question.size(classes))
    return question if secure is None else replace(question, bits=secure.bits)
