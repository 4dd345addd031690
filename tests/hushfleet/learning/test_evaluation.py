"""Accuracy and cross-entropy against one sample at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.samples import Samples
from hushfleet.learning.evaluation import (
    EVALUATION_BATCH,
    accuracies_on_parts,
    evaluate,
    evaluate_each,
    evaluate_models,
)

CLASSES = 5


def samples_of(count: int, seed: int = 0) -> Samples:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, 1, 2, 3), dtype=np.uint8)
    return Samples(images, rng.integers(0, CLASSES, count), (0.5,), (0.25,))


def linear(params: np.ndarray, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1) @ params.reshape(6, CLASSES)


def slowly(params: np.ndarray, samples: Samples) -> tuple[float, float]:
    correct, loss = 0, 0.0
    for x, y in zip(samples.x, samples.y, strict=True):
        logits = [float(sum(a * b for a, b in zip(x.reshape(-1), params[k::CLASSES], strict=True))) for k in range(5)]
        correct += logits.index(max(logits)) == y
        loss += math.log(sum(math.exp(value) for value in logits)) - logits[y]
    return correct / len(samples), loss / len(samples)


@pytest.mark.parametrize("count", [1, EVALUATION_BATCH - 1, EVALUATION_BATCH, EVALUATION_BATCH + 1, 600])
def test_batches_give_what_single_samples_give(count: int) -> None:
    samples = samples_of(count)
    params = np.random.default_rng(1).standard_normal(6 * CLASSES).astype(np.float32)
    batches = []

    def logits_of(given: np.ndarray, x: np.ndarray) -> np.ndarray:
        assert given is params
        batches.append(len(x))
        return linear(given, x)

    accuracy, loss, _ = evaluate(logits_of, params, samples)
    expected_accuracy, expected_loss = slowly(params, samples)
    assert accuracy == expected_accuracy
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert sum(batches) == count
    assert max(batches) <= EVALUATION_BATCH


def test_models_at_once_have_the_accuracies_that_each_has_alone() -> None:
    samples, rng = samples_of(600), np.random.default_rng(2)
    models = list(rng.standard_normal((4, 6 * CLASSES)).astype(np.float32))
    sizes = (600, 300, 1, 0)
    parts = [np.sort(rng.permutation(600)[:size]) for size in sizes]

    def at_once(given: Sequence[np.ndarray], x: np.ndarray) -> np.ndarray:
        assert len(x) <= EVALUATION_BATCH
        return np.stack([linear(params, x) for params in given])

    expected = [
        evaluate(linear, params, samples.take(part)).accuracy for params, part in zip(models, parts, strict=True)
    ]
    np.testing.assert_array_equal(accuracies_on_parts(at_once, models, samples, parts), expected)
    assert len(set(expected[:3])) == 3
    assert math.isnan(expected[3])


@given(count=st.integers(0, 600), models=st.integers(0, 4), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_results_of_several_models_are_those_of_each(count: int, models: int, seed: int) -> None:
    samples, rng = samples_of(count), np.random.default_rng(seed)
    params = list(rng.standard_normal((models, 6 * CLASSES)).astype(np.float32))
    found = evaluate_models(lambda given, x: np.stack([linear(each, x) for each in given]), params, samples)
    assert len(found) == models
    for each, one in zip(params, found, strict=True):
        alone = evaluate_each(linear, each, samples)
        np.testing.assert_array_equal(one.correct, alone.correct)
        np.testing.assert_array_equal(one.losses, alone.losses)


def test_by_hand() -> None:
    # Logits (ln 3, 0): probabilities 3/4 and 1/4; labels 0 and 1.
    samples = Samples(np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 1]), (0.0,), (1.0,))
    logits = np.tile(np.array([math.log(3), 0.0], np.float32), (2, 1))
    accuracy, loss, _ = evaluate(lambda params, x: logits, np.zeros(1, np.float32), samples)
    assert accuracy == 0.5
    assert loss == pytest.approx((math.log(4 / 3) + math.log(4)) / 2, rel=1e-6)


def test_huge_logits_do_not_overflow() -> None:
    samples = Samples(np.zeros((2, 1, 1, 1), np.uint8), np.array([0, 1]), (0.0,), (1.0,))
    logits = np.tile(np.array([30_000.0, -30_000.0], np.float32), (2, 1))
    accuracy, loss, _ = evaluate(lambda params, x: logits, np.zeros(1, np.float32), samples)
    assert (accuracy, loss) == (0.5, 30_000.0)


def test_no_samples_have_no_accuracy() -> None:
    called = []
    result = evaluate(lambda params, x: called.append(x), np.zeros(1, np.float32), samples_of(0))
    assert math.isnan(result.accuracy)
    assert math.isnan(result.loss)
    assert called == []
