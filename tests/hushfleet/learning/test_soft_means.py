"""Soft means of labelled and unlabelled images: against plain arithmetic, and what they add to few labels."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.learning.head_choice import HeadChoice, takes_unlabelled
from hushfleet.learning.personalized_head import Mixture, mixture, with_unlabelled
from hushfleet.learning.soft_means import soft_means
from hushfleet.learning.softmax import log_softmax

CLASSES, WIDTH = 4, 30


def images(counts: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of unit length around one centre a class."""
    centres = np.random.default_rng(99).normal(size=(CLASSES, WIDTH))
    y = np.repeat(np.arange(CLASSES), counts)
    x = centres[y] / np.sqrt(WIDTH) + np.random.default_rng(seed).normal(0, 0.25, (len(y), WIDTH))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), y


def likely(logits: np.ndarray) -> np.ndarray:
    return np.maximum(np.exp(log_softmax(logits)), 1e-6)


@pytest.mark.parametrize("unlike", [0.0, 0.7])
def test_three_passes_by_hand(unlike: float) -> None:
    (x, y), (shown, _) = images((2, 1, 0, 3), 0), images((3, 3, 3, 3), 1)
    logits = np.random.default_rng(2).normal(size=(CLASSES, len(shown)))
    weight, bias = soft_means(x, y, shown, logits, unlike)
    for _ in range(3):
        parts = likely(logits)
        mass = np.array([2 * (y == c).sum() + parts[c].sum() for c in range(CLASSES)])
        means = np.stack([(2 * x[y == c].sum(0) + parts[c] @ shown) / mass[c] for c in range(CLASSES)])
        distances = ((shown[None] - means[:, None]) ** 2).sum(-1)
        logits = -8 * distances + unlike * np.log(mass / mass.sum())[:, None]
    found = weight @ shown.T + bias[:, None]
    np.testing.assert_allclose(log_softmax(found), log_softmax(logits), atol=1e-5)


def test_few_labels_and_many_images_without_are_better_than_few_labels() -> None:
    (x, y), (shown, _), (test, truth) = images((2, 1, 1, 1), 0), images((50,) * CLASSES, 1), images((200,) * CLASSES, 2)
    shared = np.random.default_rng(1).normal(0, 10, (CLASSES, WIDTH)).astype(np.float32)  # noise alone

    def reached(head: Mixture) -> float:
        logits = head.scale * shared @ test.T + head.pull @ test.T + head.prior[:, None]
        return float((logits.argmax(0) == truth).mean())

    alone = mixture(x, y, shared @ x.T, 5.0)
    helped = with_unlabelled(alone, x, y, shown, shared @ shown.T)
    assert reached(helped) > reached(alone) + 0.05
    assert helped.choice.unlabelled == 200
    assert helped.pull.dtype == np.float32


def test_a_class_that_nobody_has_seen_has_a_mean() -> None:
    (x, y), (shown, _) = images((2, 2, 0, 0), 0), images((9, 9, 0, 0), 1)
    logits = np.array([[50.0], [50.0], [-900.0], [-900.0]]) * np.ones(len(shown))
    weight, bias = soft_means(x, y, shown, logits, 1.0)
    assert np.isfinite(weight).all()
    assert (weight @ shown.T + bias[:, None]).argmax(0).max() < 2


def test_where_they_are_wanted() -> None:
    assert [takes_unlabelled(r, 10) for r in (None, 1.0, 19.9, 20.0)] == [False, True, True, False]
    assert takes_unlabelled(50.0, 26)
    assert "samples without labels" not in HeadChoice(20).plain
    assert HeadChoice(20, 1.0, unlabelled=7).plain == (
        "100 % the fleet's model, 0 % the fleet's model fitted to own samples, 0 % trained alone; and 7 samples "
        "without labels"
    )
