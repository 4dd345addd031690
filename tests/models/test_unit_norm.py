"""Samples of norm 1 in place of features: against their formula, at all sizes, and what a board of 0.3 can run."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import BadInput
from hushfleet.learning.graph_session import open_session
from hushfleet.models.features import get_features
from hushfleet.models.features.whitening import BIAS

SHAPE = (3, 1, 4)
VALUES = math.prod(SHAPE)


def found(x: np.ndarray, *, standardised: bool) -> np.ndarray:
    made = get_features("unit-norm", x.shape[1:], standardised=standardised)
    assert made.count == made.shared == math.prod(x.shape[1:]) + 1
    features: np.ndarray = open_session(made.graph).run(["features"], {"x": x.astype(np.float32)})[0]
    return features


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), power=st.integers(-6, 6))
def test_a_sample_is_divided_by_its_norm(seed: int, power: int) -> None:
    """With its bias, if the task has brought all values to a size of about 1."""
    x = 10.0**power * np.random.default_rng(seed).standard_normal((5, *SHAPE))
    rows = x.reshape(5, VALUES)
    with_bias = np.concatenate([rows, np.full((5, 1), 0.3 * VALUES**0.5)], 1)
    by_norm = [each / math.sqrt(sum(value**2 for value in each)) for each in with_bias]
    np.testing.assert_allclose(found(x, standardised=True), by_norm, rtol=1e-5, atol=1e-7)
    by_norm = [[*(each / math.sqrt(sum(value**2 for value in each))), 0.3] for each in rows]
    np.testing.assert_allclose(found(x, standardised=False), by_norm, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("standardised", [False, True])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-18, 1e15, 1e30])
def test_a_sample_of_any_size_stays_finite(size: float, standardised: bool) -> None:
    features = found(np.full((2, *SHAPE), size), standardised=standardised)
    assert np.isfinite(features).all()
    assert np.linalg.norm(features, axis=1).max() <= math.sqrt(1 + BIAS**2) + 1e-6


def test_standardised_samples_keep_every_linear_decision() -> None:
    """Also one by their size: without the bias in the norm, small and large samples of one direction are the same."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((400, *SHAPE)) * rng.uniform(0.2, 4, (400, 1, 1, 1))
    weight, bias = rng.standard_normal((4, VALUES)), 2 * rng.standard_normal(4)
    decided = (x.reshape(400, VALUES) @ weight.T + bias).argmax(1)
    head = np.concatenate([weight, bias[:, None] / (BIAS * math.sqrt(VALUES))], 1)
    np.testing.assert_array_equal((found(x, standardised=True) @ head.T).argmax(1), decided)
    assert len(set(decided)) == 4


def test_a_board_of_version_0_3_knows_its_operators() -> None:
    """They are those of the features that it has."""
    filters = {node.op_type for node in onnx.load_from_string(get_features("filters", (1, 6, 6)).graph).graph.node}
    for standardised in (False, True):
        made = onnx.load_from_string(get_features("unit-norm", SHAPE, standardised=standardised).graph)
        assert {node.op_type for node in made.graph.node} <= filters


def test_a_sample_of_too_many_values_is_refused() -> None:
    assert get_features("unit-norm", (4095, 1, 1)).count == 4096
    with pytest.raises(BadInput, match="at most 4095 values, and 3 x 64 x 64 are 12288; for images take 'scattering'"):
        get_features("unit-norm", (3, 64, 64))
    with pytest.raises(BadInput, match=r"13 outputs|no order"):
        get_features("unit-norm", SHAPE, directions=3)
