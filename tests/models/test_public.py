"""Directions from public samples: against eigenvectors of the covariance, and what a board computes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import scipy.linalg
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput
from hushfleet.learning.graph_session import open_session
from hushfleet.models.features import get_features
from hushfleet.models.features.public import PublicDirections
from hushfleet.models.features.whitening import BIAS


def samples_of(images: np.ndarray, classes: int = 1) -> Samples:
    channels = images.shape[1]
    return Samples(images, np.arange(len(images)) % classes, (0.0,) * channels, (1.0,) * channels)


def run(graph: bytes, x: np.ndarray) -> np.ndarray:
    features: np.ndarray = open_session(graph).run(["features"], {"x": x})[0]
    return features


def oracle(u: np.ndarray, kept: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the directions by the whole covariance, float64 `[F]` and `[F, kept]`."""
    return u.mean(0), np.linalg.eigh(np.cov(u.T))[1][:, ::-1][:, :kept]


@settings(max_examples=25, deadline=None)
@given(count=st.integers(8, 40), values=st.integers(3, 30), seed=st.integers(0, 999))
def test_directions_are_those_of_the_covariance(count: int, values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scales = 0.7 ** np.arange(values)  # so that no two directions are alike
    u = rng.standard_normal((count, values)) * scales + 1
    kept = min(count - 1, values, 4)
    made = PublicDirections.of(u)
    white, (mean, directions) = made.projection(kept), oracle(u, kept)
    found = white.matrix * white.scale.astype(np.float64)
    signs = np.sign((found[:-1] * directions).sum(0))
    np.testing.assert_allclose(found[:-1] * signs, directions, atol=0.01)  # rounded to bytes
    np.testing.assert_allclose(made.mean, mean, atol=1e-6)
    assert not found[-1].any()
    assert not white.offset.any()


@settings(max_examples=25, deadline=None)
@given(classes=st.integers(2, 6), values=st.integers(3, 12), seed=st.integers(0, 999))
def test_directions_of_classes_are_the_discriminants(classes: int, values: int, seed: int) -> None:
    """The oracle is the generalised eigenproblem of both covariances, with the ridge."""
    rng = np.random.default_rng(seed)
    y = np.concatenate([np.arange(classes), rng.integers(0, classes, 5 * classes)])
    u = (rng.standard_normal((classes, values)) * 0.8 ** np.arange(values))[y] + rng.standard_normal((len(y), values))
    means = np.stack([u[y == label].mean(0) for label in y])
    between, within = ((each.T @ each) for each in (means - u.mean(0), u - means))
    ridge = 0.2 * np.square(u - u.mean(0)).sum() / values * np.eye(values)
    shares = scipy.linalg.eigh(between, within + ridge, eigvals_only=True)[::-1]
    made = PublicDirections.of(u, 10 * y)
    kept = len(made.axes)
    np.testing.assert_allclose(shares[kept:], 0, atol=1e-8)
    assert made.within is not None
    axes = made.axes @ (made.within.matrix * made.within.scale.astype(np.float64)).T
    np.testing.assert_allclose(np.linalg.norm(made.own(u)[:, :-1], axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(axes @ (within + ridge) @ axes.T, np.eye(kept), atol=0.03)
    rounding = 0.03 * max(1, shares[0])  # to bytes, of each column
    np.testing.assert_allclose(axes @ between @ axes.T, np.diag(shares[:kept]), atol=rounding)
    alike = PublicDirections.of(u, np.full(len(y), 7))
    np.testing.assert_array_equal(alike.axes, PublicDirections.of(u).axes)


def test_there_are_no_more_directions_than_samples_show() -> None:
    u = np.random.default_rng(0).standard_normal((10, 30))
    assert len(PublicDirections.of(u).projection(None).scale) == len(PublicDirections.of(u).projection(64).scale) == 9


@pytest.mark.parametrize(("name", "shape"), [("filters", (1, 8, 8)), ("unit-norm", (40, 1, 1))])
def test_the_graph_of_a_board_computes_them_before_all_others(
    name: str, shape: tuple[int, int, int], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    given = samples_of((rng.random((60, *shape)) ** 3).astype(np.float32))
    whole = get_features(name, shape, cache_dir=tmp_path)
    made = get_features(name, shape, directions=16, public=given, cache_dir=tmp_path)
    assert (made.shared, made.count) == (17, 17 + whole.count + 1)
    x = rng.random((5, *shape), np.float32)

    every, found = run(whole.graph, x), run(made.graph, x)
    mean, directions = oracle(run(whole.graph, given.x), 16)
    own = (every - mean) / np.linalg.norm(every - mean, axis=1, keepdims=True)
    np.testing.assert_allclose(found[:, 17:-1], own, atol=1e-5)
    np.testing.assert_allclose(PublicDirections.of(run(whole.graph, given.x)).own(every), found[:, 17:], atol=1e-5)
    rows = (every - mean) @ directions
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    signs = np.sign((rows * found[:, :16]).sum(0))
    np.testing.assert_allclose(found[:, :16] * signs, rows, atol=0.03)  # the matrix is rounded to bytes
    np.testing.assert_allclose(found[:, [16, -1]], BIAS)
    known = {node.op_type for node in onnx.load_from_string(get_features("filters", (1, 6, 6)).graph).graph.node}
    assert {node.op_type for node in onnx.load_from_string(made.graph).graph.node} <= known  # of 0.3


def test_with_classes_the_graph_of_a_board_whitens_its_own_features(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    given = samples_of((rng.random((60, 40, 1, 1)) ** 3).astype(np.float32), classes=3)
    made = get_features("unit-norm", (40, 1, 1), public=given, cache_dir=tmp_path)
    whole, x = get_features("unit-norm", (40, 1, 1), cache_dir=tmp_path), rng.random((5, 40, 1, 1), np.float32)
    u, every, shared = run(whole.graph, given.x), run(whole.graph, x), 3  # two directions tell three classes apart
    apart = u - np.stack([u[given.labels == label].mean(0) for label in given.labels])
    ridge = 0.2 * np.square(u - u.mean(0)).sum() / u.shape[1]
    rows = (every - u.mean(0)) @ np.linalg.inv(scipy.linalg.sqrtm(apart.T @ apart + ridge * np.eye(u.shape[1])))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert made.shared == shared
    for found in (run(made.graph, x)[:, shared:], PublicDirections.of(u, given.labels).own(every)):
        np.testing.assert_allclose(found[:, :-1], rows, atol=0.01)  # the matrix is rounded to bytes


def test_features_that_keep_the_form_of_a_sample_have_no_directions() -> None:
    public = samples_of(np.zeros((20, 1, 1, 8000), np.float32))
    with pytest.raises(BadInput, match=r"keeps the form of a sample: leave model\.public out"):
        get_features("sound:log-mel", (1, 1, 8000), public=public)
