"""Computes a device's answer to a question from its own samples: a short vector with a norm of at most 1.

Nothing here adds noise; the stages of the round do (`hushfleet.methods.question`). An evaluation has five values. Each
is clipped to a public bound and scaled so that all together have a norm of at most 1. The gain over training alone is
the most important value, so it has the largest share of the norm, and the least error. M is the largest gain that
counts.

| value | within | share of the squared norm |
|---|---|---:|
| the personalized head's accuracy, minus 1/2 | 1/2 | 0.1 |
| the personalized head's gain over the head trained alone | M | 0.7 |
| the shared model's gain over the head trained alone | M | 0.1 |
| 1/2 for a gain, -1/2 for a loss, 0 for neither | 1/2 | 0.05 |
| the square of the gain, minus M^2/2 | M^2/2 | 0.05 |

A device without held-out samples, or without training samples, has a gain of 0 and an accuracy of 1/2.
"""

from __future__ import annotations

import math

import numpy as np

from hushfleet.data.samples import LabelledSamples, Samples
from hushfleet.learning.personalized_head import (
    features_of,
    inputs_of_own,
    local_only_head_of,
    own_logits,
    personalized_head_of,
)
from hushfleet.methods.answer_scale import scale_of
from hushfleet.wire.format.question import EVALUATED, QuestionSpec
from hushfleet.wire.format.spec import TaskSpec


def evaluation_answer(
    spec: TaskSpec, params: np.ndarray, training: LabelledSamples, held_out: LabelledSamples
) -> np.ndarray:
    """Compares the three heads on samples that none of them has seen; float32 `[5]`.

    :param spec: of the task that trains.
    :param params: float32 `[d]`, the global model.
    """
    question = spec.question
    assert question is not None
    right = right_answers(spec, params, training, held_out)
    own, alone, shared = (0.5, 0.5, 0.5) if right is None else right.mean(axis=1)
    gain, gain_shared = np.clip((own - alone, shared - alone), -question.most_gain, question.most_gain)
    scale = scale_of(question, EVALUATED)
    numbers = np.array((own, gain, gain_shared, (np.sign(gain) + 1) / 2, gain**2))
    answer: np.ndarray = ((numbers - scale.middle) * scale.unit).astype(np.float32)
    return answer


def right_answers(
    spec: TaskSpec, params: np.ndarray, training: LabelledSamples, held_out: LabelledSamples
) -> np.ndarray | None:
    """Returns whether the personalized head, the head trained alone and the shared model are right, bool `[3, n]`; None
    without training samples or held-out samples."""
    if not len(training) or not len(held_out):
        return None
    layout, classes = spec.model.layout, len(spec.model.class_names)
    own = personalized_head_of(params, layout, training, spec.signal).params
    alone = local_only_head_of(training, classes)
    inputs = [(own, inputs_of_own(held_out).x), (alone, features_of(held_out)), (params, held_out.x)]
    logits = (own_logits(head, x).astype(np.float64) for head, x in inputs)
    return np.stack([held_out.targets.right(each, held_out.labels) for each in logits])


def statistic_answer(
    question: QuestionSpec, samples: Samples, class_names: tuple[str, ...], left_out: int
) -> np.ndarray:
    """Answers a question about the samples themselves; float32 `[k]`, with a norm of at most 1 except for counts.

    :param left_out: number of samples that could not be read.
    """
    if question.kind == "counts":
        classes = len(class_names)
        held = (
            np.bincount(samples.labels, minlength=classes) if samples.targets.are_classes else [len(samples)] * classes
        )
        return (np.array([*held, left_out]) / question.most).astype(np.float32)
    values = _column(question, samples, class_names)
    values = np.clip(values[np.isfinite(values)], question.low, question.high)
    width = question.high - question.low
    if question.kind == "mean":
        middle = question.low + width / 2
        return np.array([2 * (values.mean() - middle) / width if len(values) else 0.0], np.float32)
    counts, _ = np.histogram(values, bins=question.bins, range=(question.low, question.high))
    return (counts / max(1, len(values))).astype(np.float32)


def drift_answer(worse: bool | None) -> np.ndarray:
    """Answers whether the device's personalized head has become worse; float32 `[2]`: whether it reports, whether it is
    worse.

    :param worse: None if the owner does not allow the report, or nothing was tested.
    """
    return np.array((worse is not None, bool(worse)), np.float32) / np.float32(math.sqrt(2))


def _column(question: QuestionSpec, samples: Samples, class_names: tuple[str, ...]) -> np.ndarray:
    """Returns the question's column, float64 `[n]`; empty if the samples have no such column."""
    name = question.column
    if not samples.targets.are_classes and name in class_names:
        return samples.labels[:, class_names.index(name)].astype(np.float64)
    rows = samples.images.reshape(len(samples), math.prod(samples.images.shape[1:]))  # there may be none
    if not name.isdecimal() or int(name) >= rows.shape[1]:
        return np.empty(0)
    return rows[:, int(name)].astype(np.float64)
