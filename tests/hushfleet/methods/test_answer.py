"""Answers to questions about samples: of boards without any, at the borders of bins, and within a norm of 1."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.methods.answer import evaluation_answer, statistic_answer
from hushfleet.params import PRIOR, WEIGHT, ParamLayout
from hushfleet.wire.format.question import QuestionSpec
from hushfleet.wire.format.spec import BlobRef, ModelSpec, PrivacySpec, TaskSpec, WireSpec

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


@pytest.fixture
def evaluating() -> TaskSpec:
    """A task that evaluates a linear model of two classes; a gain above 0.5 counts as 0.5."""
    layout, graph = ParamLayout((WEIGHT, PRIOR), ((2, 2), (2,))), BlobRef(bytes(32), 1)
    model = ModelSpec("linear", layout, (2, 1, 1), ("a", "b"), (0.0, 0.0), (1.0, 1.0), (), graph, graph)
    question = QuestionSpec("evaluation", 2, 1.0, held_out=0.5, most_gain=0.5)
    privacy = PrivacySpec("device", "strict", clip_norm=1.0, noise_multiplier=1.0, delta=1e-5)
    return TaskSpec("t-1", 2, "dp-fedavg", {}, privacy, WireSpec(), model, memory_mib=1, question=question)


def test_a_gain_counts_up_to_its_bound_and_the_answer_stays_within_one(
    evaluating: TaskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping as a whole would shrink the other values, and with them what the fleet reads."""
    for own, alone, shared in itertools.product((0.0, 0.5, 1.0), repeat=3):
        right = np.array([[own, own], [alone, alone], [shared, shared]])
        monkeypatch.setattr("hushfleet.methods.answer.right_answers", lambda *_, right=right: right)
        answer = evaluation_answer(evaluating, np.zeros(6, np.float32), samples([1.0]), samples([1.0]))
        gain, gain_shared = np.clip((own - alone, shared - alone), -0.5, 0.5)
        units = np.sqrt((0.1, 0.7, 0.1, 0.05, 0.05))
        parts = (2 * own - 1, gain / 0.5, gain_shared / 0.5, np.sign(gain), (gain**2 - 0.125) / 0.125)
        assert answer == pytest.approx(units * parts, abs=1e-6)
        assert np.linalg.norm(answer) <= 1 + 1e-6


@pytest.mark.parametrize(("training", "held_out"), [([], [1.0]), ([1.0], []), ([], [])])
def test_a_board_that_cannot_test_gains_nothing_and_is_right_on_half(
    evaluating: TaskSpec, training: list[float], held_out: list[float]
) -> None:
    answer = evaluation_answer(evaluating, np.zeros(6, np.float32), samples(training), samples(held_out))
    assert answer == pytest.approx([0, 0, 0, 0, -math.sqrt(0.05)])
