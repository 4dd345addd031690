"""Targets that are no classes: what is right, what a constant reaches, and both losses against PyTorch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score
from torch.nn import functional as F

from hushfleet.data.samples import Samples
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.errors import Malformed
from hushfleet.learning.evaluation import evaluate
from hushfleet.losses import loss_and_cotangent, loss_of
from hushfleet.models.losses import losses_of, mean_loss
from hushfleet.objectives import Objective
from hushfleet.schema import from_plain, to_plain

BINARY, SQUARED = Targets("binary"), Targets("squared", tolerance=0.5)
TORCHS: dict[Any, Any] = {
    "binary": F.binary_cross_entropy_with_logits, "squared": F.mse_loss, "huber": F.huber_loss
}  # fmt: skip
sizes = st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**32 - 1))


@pytest.mark.parametrize("kind", TORCHS)
@given(sizes)
def test_losses_and_slopes_are_those_of_pytorch(kind: Any, size: tuple[int, int, int]) -> None:
    batch, outputs, seed = size
    rng, objective = np.random.default_rng(seed), Objective(kind)
    z = torch.tensor(rng.standard_normal((batch, outputs)) * 8, requires_grad=True)
    y = loss_of(objective).random(batch, outputs, rng)
    expected = TORCHS[kind](z, torch.from_numpy(y).double(), reduction="none").mean(1)
    (slopes,) = torch.autograd.grad(expected.sum(), z)
    losses, ours = loss_and_cotangent(objective, z.detach().numpy(), y)
    np.testing.assert_allclose(losses, expected.detach(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours, slopes, rtol=1e-9, atol=1e-12)
    by_torch = losses_of(objective, z, torch.from_numpy(y).double())
    np.testing.assert_allclose(by_torch.detach(), expected.detach(), rtol=1e-9, atol=1e-12)
    (slopes,) = torch.autograd.grad(mean_loss(objective, z, torch.from_numpy(y).double()), z)
    np.testing.assert_allclose(batch * slopes, ours, rtol=1e-9, atol=1e-12)


def test_outputs_that_are_sure_stay_finite_and_the_slope_at_zero_is_right() -> None:
    z, y = np.array([[1e4, -1e4, 0.0]]), np.array([[0.0, 1.0, 1.0]])
    losses, slopes = loss_and_cotangent(Objective("binary"), z, y)
    np.testing.assert_allclose(losses, (2e4 + np.log(2)) / 3)
    np.testing.assert_allclose(slopes, [[1 / 3, -1 / 3, -0.5 / 3]])
    tensor = torch.tensor(z, requires_grad=True)
    losses_of(Objective("binary"), tensor, torch.from_numpy(y)).sum().backward()
    np.testing.assert_allclose(tensor.grad, slopes, atol=1e-12)


@given(sizes)
def test_right_is_subset_accuracy_or_within_the_tolerance_in_the_targets_unit(size: tuple[int, int, int]) -> None:
    count, outputs, seed = size
    rng = np.random.default_rng(seed)
    z, asked = rng.standard_normal((count, outputs), np.float32), rng.integers(0, 2, (count, outputs))
    assert BINARY.right(z, asked).mean() == pytest.approx(accuracy_score(asked, (z > 0).astype(int)))
    scaled = Targets("squared", 0.5, tuple(range(outputs)), tuple(1.0 + n for n in range(outputs)))
    numbers = (rng.standard_normal((count, outputs)) * 2).astype(np.float32)
    answers = z * np.array(scaled.std) + np.array(scaled.mean)
    assert scaled.right(z, numbers).tolist() == [
        bool((abs(a - y) <= 0.5).all()) for a, y in zip(answers, numbers, strict=True)
    ]
    np.testing.assert_allclose(scaled.predicted(scaled.learned(numbers, z)), numbers, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(-40, 40), min_size=1, max_size=12))
@example([-4, 6, 6])  # float32 makes the distance of these larger than two tolerances
def test_the_best_constant_is_the_best(tenths: list[int]) -> None:
    """Of one output: no constant on a fine grid is better. Tenths, so that ends of the tolerance are met."""
    y = np.array(tenths, np.float32)[:, None] / 10
    grid = np.arange(-50, 51) / 10
    best = max(float(SQUARED.right(np.full_like(y, each), y).mean()) for each in grid)
    assert SQUARED.constant_right(y) == pytest.approx(best)


def test_constants_of_several_outputs() -> None:
    y = np.array([[0, 0], [0, 9], [0.1, 9], [5, 9.2], [5, 0]], np.float32)
    assert SQUARED.constant_right(y) == 0.4  # (0, 9); 5 of 9 would take the first output alone
    assert BINARY.constant_right(np.array([[0, 1], [1, 1], [0, 1], [1, 0]], np.float32)) == 0.5


def test_evaluation_scales_for_the_loss_and_not_for_the_score() -> None:
    targets = Targets("squared", 1.0, (100.0,), (10.0,))
    samples = Samples(np.zeros((3, 1, 1, 1), np.uint8), np.float32([[90], [100], [111.5]]), (0.0,), (1.0,), targets)
    tested = evaluate(lambda params, x: np.float32([[-1.05], [0], [1.04]]), np.zeros(1), samples)
    assert tested.accuracy == pytest.approx(2 / 3)  # 89.5, 100 and 110.4
    assert tested.loss == pytest.approx((0.05**2 + (1.04 - 1.15) ** 2) / 3, rel=1e-4)


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        ({"loss": "squared"}, "tolerance = None: must be given"),
        ({"loss": "huber"}, "tolerance = None: must be given"),
        ({"loss": "squared", "tolerance": 0.0}, "tolerance"),
        ({"loss": "binary", "tolerance": 0.5}, "tolerance"),
        ({"loss": "binary", "mean": [0.0], "std": [1.0]}, "mean, std"),
        ({"loss": "squared", "tolerance": 1.0, "mean": [0.0]}, "mean, std = 1: must be one of each"),
        ({"loss": "squared", "tolerance": 1.0, "mean": [0.0], "std": [0.0]}, "std"),
        ({"loss": "hinge"}, "loss"),
    ],
)
def test_what_makes_no_targets_is_refused(plain: dict[str, Any], said: str) -> None:
    with pytest.raises(Malformed, match=said):
        from_plain(Targets, plain)


def test_a_task_of_classes_has_the_bytes_that_it_had() -> None:
    assert to_plain(CLASSES) == {"loss": "cross-entropy", "tolerance": None, "mean": (), "std": ()}
    assert from_plain(Targets, to_plain(SQUARED)) == SQUARED


def test_an_outlier_moves_a_fit_by_huber_less_than_one_by_squares() -> None:
    """Gradient descent on one constant: the mean of the targets, and Huber's estimate near their bulk."""
    y = np.array([[0.0], [0.1], [-0.1], [0.2], [50.0]])
    found = {}
    for kind in ("squared", "huber"):
        z = np.zeros((1, 1))
        for _ in range(200):
            z = z - 0.3 * loss_and_cotangent(Objective(kind), np.repeat(z, 5, 0), y)[1].mean()
        found[kind] = float(z[0, 0])
    assert found["squared"] == pytest.approx(10.04)
    assert found["huber"] == pytest.approx(0.3)  # (0 + 0.1 - 0.1 + 0.2 + 1) / 4
