"""Scales the values of an answer to a question: each is clipped to a public bound, and all have a norm of at most 1."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hushfleet.wire.format.question import QuestionSpec

_SHARES = np.array((0.1, 0.7, 0.1, 0.05, 0.05))


class AnswerScale(NamedTuple):
    """Each value of an answer is `(number - middle) * unit`; float64 `[k]` each."""

    unit: np.ndarray
    middle: np.ndarray


def scale_of(question: QuestionSpec, size: int) -> AnswerScale:
    """Returns the scale of a question's `size` values; 1 for a statistic, which `statistic_answer` scales already."""
    if question.kind != "evaluation":
        return AnswerScale(np.ones(size), np.zeros(size))
    most = question.most_gain
    bounds = np.array((0.5, most, most, 0.5, most**2 / 2))
    return AnswerScale(np.sqrt(_SHARES) / bounds, np.array((0.5, 0.0, 0.0, 0.5, most**2 / 2)))
