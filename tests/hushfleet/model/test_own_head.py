"""The head that a device keeps: never chosen by luck, never worse than alone where alone is better."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.data.samples import Samples
from hushfleet.model.own_head import LEAST_IMAGES, MARGIN, SHARED, HeadChoice, choose_own_head, is_linear, own_head_of
from hushfleet.model.params import ParamLayout

CLASSES, WIDTH = 4, 20


def images(count: int, *, noise: float = 0.3, seed: int = 0, kept: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    """Features around one centre a class, of unit length; `kept` classes only."""
    centres = np.random.default_rng(99).normal(size=(CLASSES, WIDTH))
    rng = np.random.default_rng(seed)
    y = np.arange(count) % kept
    x = centres[y] / np.linalg.norm(centres[y], axis=1, keepdims=True) + rng.normal(0, noise, (count, WIDTH))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), y.astype(np.int64)


def accuracy(head, x: np.ndarray, y: np.ndarray) -> float:
    return float(((x @ head.weight.T + head.prior).argmax(1) == y).mean())


GOOD = (8 * np.random.default_rng(99).normal(size=(CLASSES, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32)
NOISE = np.random.default_rng(1).normal(0, 10, (CLASSES, WIDTH)).astype(np.float32)
BIAS = np.zeros(CLASSES, np.float32)


def test_too_few_images_choose_nothing() -> None:
    x, y = images(LEAST_IMAGES - 1)
    head = choose_own_head(x, y, NOISE, BIAS)
    assert head.choice == HeadChoice("shared", SHARED, LEAST_IMAGES - 1)
    np.testing.assert_array_equal(head.weight, NOISE)
    assert choose_own_head(x[:0], y[:0], GOOD, BIAS).choice.images == 0


def test_a_good_shared_head_stays_as_it_is() -> None:
    x, y = images(12)
    head = choose_own_head(x, y, GOOD, BIAS)
    assert (head.choice.kind, head.choice.errors, head.choice.errors_shared) == ("shared", 0, 0)
    np.testing.assert_array_equal(head.weight, GOOD)
    np.testing.assert_array_equal(head.prior, 0)


def test_noise_in_place_of_a_head_costs_nothing() -> None:
    x, y = images(60)
    head = choose_own_head(x, y, NOISE, BIAS)
    assert head.choice.errors < head.choice.errors_shared - MARGIN * 60
    assert head.choice.errors <= head.choice.errors_alone
    assert accuracy(head, *images(400, seed=5)) > 0.85


def test_a_head_that_knows_half_of_the_classes_is_completed() -> None:
    half = GOOD * (np.arange(CLASSES) < 2)[:, None]
    x, y = images(24, noise=0.5)
    head = choose_own_head(x, y, half, BIAS)
    assert head.choice.errors < head.choice.errors_shared
    test = images(400, noise=0.5, seed=5)
    assert accuracy(head, *test) > accuracy(choose_own_head(x[:0], y[:0], half, BIAS), *test) + 0.1


def test_who_has_one_class_only_expects_that_class() -> None:
    x, y = images(12, kept=1)
    assert accuracy(choose_own_head(x, y, NOISE, BIAS), *images(50, kept=1, seed=5)) == 1


@pytest.mark.parametrize("shared", [GOOD, NOISE, np.zeros_like(GOOD)])
def test_a_choice_is_repeatable_and_finite(shared: np.ndarray) -> None:
    x, y = images(31, noise=0.6)
    one, two = (choose_own_head(x, y, shared, BIAS) for _ in range(2))
    assert one.choice == two.choice
    np.testing.assert_array_equal(one.weight, two.weight)
    assert np.isfinite(one.weight).all()
    assert one.weight.dtype == one.prior.dtype == np.float32


def test_the_shared_heads_errors_are_those_of_predicting_with_it() -> None:
    x, y = images(40, noise=0.9)
    assert choose_own_head(x, y, GOOD, BIAS).choice.errors_shared == int(((x @ GOOD.T).argmax(1) != y).sum())


def test_a_shared_bias_is_part_of_the_shared_head() -> None:
    x, y = images(40, kept=2)
    bias = np.array([0, 0, -50, -50], np.float32)
    head = choose_own_head(x, y, NOISE, bias)
    assert head.choice.errors_shared == int(((x @ NOISE.T + bias).argmax(1) != y).sum())
    assert accuracy(head, *images(100, kept=2, seed=5)) > 0.85


def test_of_a_linear_models_flat_vector() -> None:
    layout = ParamLayout(("head.weight", "prior"), (GOOD.shape, (CLASSES,)))
    rng = np.random.default_rng(0)
    samples = Samples(rng.integers(0, 256, (20, 1, WIDTH, 1), np.uint8), rng.integers(0, CLASSES, 20), (0.0,), (1.0,))
    params = np.concatenate([GOOD.ravel(), BIAS])
    head = own_head_of(params, layout, samples)
    assert is_linear(layout)
    assert head.params.shape == params.shape
    again = choose_own_head(samples.x.reshape(20, WIDTH), samples.y, GOOD, BIAS)
    np.testing.assert_array_equal(head.params, again.params)
    assert own_head_of(params, layout, samples.take(slice(0, 0))).choice.images == 0
    assert not is_linear(ParamLayout(("head.weight", "head.bias"), ((2, 3), (2,))))


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (HeadChoice("shared", SHARED, 5), "5 own images are too few to choose by"),
        (HeadChoice("shared", SHARED, 36, 3, 3, 7), "cross-validated: 3 of 36; trained alone 7)"),
        (HeadChoice("alone", "a head", 36, 3, 9, 3), "a head (own images wrong, cross-validated: 3 of 36; the shared"),
        (HeadChoice("mean", "the mean", 36, 3, 9, 4), "3 of 36; trained alone 4; the shared head as it is 9)"),
    ],
)
def test_a_choice_in_words(choice: HeadChoice, told: str) -> None:
    assert told in choice.words
