"""Answers to questions about samples: of boards without any, at the borders of bins, and within a norm of 1."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.config.question import QuestionSpec
from hushfleet.data.samples import Samples
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.training.answer import statistic_answer

MEAN = QuestionSpec("mean", 1, 1.0, column="1", low=-2.0, high=2.0)
HISTOGRAM = QuestionSpec("histogram", 1, 1.0, column="1", low=-2.0, high=2.0, bins=4)


def samples(values: list[float], targets: Targets = CLASSES) -> Samples:
    """Each has two values, of which the second is given."""
    images = np.array([[0.0, value] for value in values], np.float32).reshape(-1, 2, 1, 1)
    labels = targets.blank(len(values), 1)
    return Samples(images, labels, (0.0, 0.0), (1.0, 1.0), targets)


@pytest.mark.parametrize("question", [MEAN, HISTOGRAM])
def test_a_board_without_samples_answers_zero_like_one_without_the_column(question: QuestionSpec) -> None:
    """An error in its place would say on the board that training has failed, and decline where no noise is added."""
    nothing = np.zeros(question.size(2), np.float32)
    assert np.array_equal(statistic_answer(question, samples([]), ("a", "b"), 0), nothing)
    of_another = QuestionSpec(question.kind, 1, 1.0, column="7", low=-2.0, high=2.0, bins=question.bins)
    assert np.array_equal(statistic_answer(of_another, samples([1.0]), ("a", "b"), 0), nothing)
    by_name = QuestionSpec(question.kind, 1, 1.0, column="power", low=-2.0, high=2.0, bins=question.bins)
    numbers = Targets("squared", tolerance=1.0)
    assert np.array_equal(statistic_answer(by_name, samples([], numbers), ("power",), 0), nothing)


@pytest.mark.parametrize(
    ("values", "mean", "shares"),
    [
        ([-2.0, 2.0], 0.0, [0.5, 0, 0, 0.5]),  # the limits themselves
        ([-9.0, 9.0, 9.0, 9.0], 0.5, [0.25, 0, 0, 0.75]),  # beyond them
        ([-1.0, 0.0, 1.0], 0.0, [0, 1 / 3, 1 / 3, 1 / 3]),  # a border belongs to the bin above it
        ([np.nan, np.inf, 1.5], 0.75, [0, 0, 0, 1]),  # no measurements
    ],
)
def test_values_at_and_beyond_the_limits(values: list[float], mean: float, shares: list[float]) -> None:
    assert statistic_answer(MEAN, samples(values), ("a", "b"), 0) == pytest.approx([mean])
    found = statistic_answer(HISTOGRAM, samples(values), ("a", "b"), 0)
    assert found == pytest.approx(shares)
    assert np.linalg.norm(found) <= 1
