"""The question that a task asks its devices: an evaluation in addition to training, or a statistic of their data."""

from __future__ import annotations

import math
from dataclasses import replace

from hushfleet.aggregator.config.task import Task
from hushfleet.schema import to_plain
from hushfleet.wire.format.question import QuestionSpec


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
    return math.sqrt((1 - share) / share * task.evaluations / task.round.rounds)


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
