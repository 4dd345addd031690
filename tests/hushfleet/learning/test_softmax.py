"""Small softmax regressions against SciPy's optimizer, and features in the basis of their own moments."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from hushfleet.learning.softmax import fit, log_softmax, rotated


def loss(pull: np.ndarray, x: np.ndarray, y: np.ndarray, offset: np.ndarray, penalty: float) -> float:
    return float(-log_softmax(offset + pull @ x.T)[y, np.arange(len(y))].mean() + penalty / 2 * (pull * pull).sum())


@given(
    images=st.integers(1, 40),
    width=st.integers(1, 30),
    classes=st.integers(2, 5),
    penalties=st.lists(st.sampled_from([1.0, 0.1, 0.01, 0.001]), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_fits_end_where_a_general_optimizer_ends(images, width, classes, penalties, seed) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(images, width))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    y = rng.integers(0, classes, images)
    offsets = rng.normal(0, 3, (len(penalties), classes, images)).astype(np.float32)
    basis = rotated(x)
    found = fit(basis.z, basis.moments, y, offsets, np.array(penalties)) @ basis.axes
    for pull, offset, penalty in zip(found, offsets.astype(np.float64), penalties, strict=True):

        def objective(flat: np.ndarray, offset=offset, penalty=penalty) -> tuple[float, np.ndarray]:
            at = flat.reshape(classes, width)
            shares = np.exp(log_softmax(offset + at @ x.T))
            slope = (shares - (np.arange(classes)[:, None] == y)) @ x / images + penalty * at
            return loss(at, x, y, offset, penalty), slope.ravel()

        best = minimize(objective, np.zeros(classes * width), jac=True, method="L-BFGS-B")
        assert objective(pull.astype(np.float64).ravel())[0] <= best.fun + 5e-3 * max(1, best.fun)


@given(images=st.integers(1, 12), width=st.integers(1, 12), rank=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
def test_a_basis_gives_the_features_again(images: int, width: int, rank: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(images, rank)) @ rng.normal(size=(rank, width))).astype(np.float32)
    basis = rotated(x)
    assert basis.z.shape[1] <= min(images, width, rank)
    np.testing.assert_allclose(basis.z @ basis.axes, x, atol=1e-3 * np.abs(x).max())
    np.testing.assert_allclose(basis.axes @ basis.axes.T, np.eye(len(basis.axes)), atol=1e-3)
    np.testing.assert_allclose((basis.z**2).sum(0), basis.moments, rtol=1e-2)


def test_nothing_to_learn_from_features_of_zero() -> None:
    basis = rotated(np.zeros((3, 4), np.float32))
    found = fit(basis.z, basis.moments, np.array([0, 1, 1]), np.zeros((1, 2, 3), np.float32), np.array([0.1]))
    assert (found @ basis.axes == 0).all()
