"""Clipping against NumPy's own norms, in NumPy and PyTorch alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy import clipping
from hushfleet.privacy.adversaries import snr_db
from hushfleet.privacy.clipping import clip, clip_layers, layer_norms, scale

LAYOUT = ParamLayout(("conv.weight", "conv.bias", "fc.weight"), ((2, 2), (1,), (3,)))  # 5 + 3 entries
KINDS = pytest.mark.parametrize("make", [np.asarray, torch.asarray], ids=["numpy", "torch"])


def random_values(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


@KINDS
def test_layer_norms_by_hand(make):
    x = make(np.array([[3, 4, 0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0]], dtype=np.float32))
    norms = layer_norms(x, LAYOUT)
    assert np.asarray(norms).dtype == np.float64
    assert norms.tolist() == [[5.0, 3.0], [0.0, 0.0]]


@KINDS
def test_norms_are_taken_in_float64(make):
    # squares of 1e30 overflow float32, squares of 1e-30 vanish in it
    x = np.zeros(8, dtype=np.float32)
    x[0], x[5] = 1e30, 1e-30
    assert np.asarray(layer_norms(make(x), LAYOUT)) == pytest.approx([1e30, 1e-30], rel=1e-6)


@KINDS
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    lead=st.sampled_from([(), (1,), (4,), (2, 3), (0,)]),
    size=st.integers(1, 40),
    scale=st.sampled_from([1e-3, 1.0, 1e6]),
    clip_norm=st.floats(1e-4, 1e4),
)
def test_clip_against_the_obvious(make, seed, lead, size, scale, clip_norm):
    x = random_values(seed, *lead, size, scale=scale)
    clipped = np.asarray(clip(make(x), clip_norm))
    assert clipped.dtype == np.float32
    assert clipped.shape == x.shape
    for got, row in zip(clipped.reshape(-1, size), x.reshape(-1, size), strict=True):
        norm = np.linalg.norm(row.astype(np.float64))
        assert np.linalg.norm(got.astype(np.float64)) <= clip_norm
        if norm <= clip_norm:
            np.testing.assert_array_equal(got, row)
        else:
            np.testing.assert_allclose(got, row * (clip_norm / norm), rtol=1e-6)


@KINDS
def test_clip_layers_against_clip_of_each_part(make):
    x = random_values(1, 3, 8, scale=5.0)
    bounds = np.array([[1.0, 2.0], [0.5, 100.0], [1e-3, 3.0]])
    got = np.asarray(clip_layers(make(x), LAYOUT, make(bounds)))
    for row in range(3):
        np.testing.assert_array_equal(got[row, :5], clip(x[row, :5], bounds[row, 0]))
        np.testing.assert_array_equal(got[row, 5:], clip(x[row, 5:], bounds[row, 1]))
    assert np.any(got[:, :5] != x[:, :5])


def test_clip_layers_takes_one_list_for_all_clients():
    x = random_values(2, 4, 8, scale=5.0)
    np.testing.assert_array_equal(
        clip_layers(x, LAYOUT, [1.0, 2.0]), clip_layers(x, LAYOUT, np.tile([1.0, 2.0], (4, 1)))
    )


def test_numpy_and_torch_agree_bit_by_bit():
    x = random_values(3, 6, 8, scale=3.0)
    np.testing.assert_array_equal(clip(x, 0.7), clip(torch.asarray(x), 0.7).numpy())


@KINDS
def test_the_input_is_not_changed(make):
    x = make(random_values(4, 8, scale=100.0))
    before = np.asarray(x).copy()
    clip(x, 1.0)
    clip_layers(x, LAYOUT, [1.0, 1.0])
    np.testing.assert_array_equal(np.asarray(x), before)


def test_rounding_never_leads_above_the_bound():
    # an equal vector of this length rounds upwards without a margin
    for seed in range(200):
        x = random_values(seed, 1000, scale=10.0)
        clipped = clip(x, 1.0)
        assert 1 - 1e-6 < np.linalg.norm(clipped.astype(np.float64)) <= 1.0


def test_long_vectors_are_measured_in_blocks(monkeypatch):
    x = random_values(5, 3, 1000)
    whole = clip(x, 0.5)
    monkeypatch.setattr(clipping, "_BLOCK_ENTRIES", 64)
    np.testing.assert_allclose(clip(x, 0.5), whole, rtol=3e-7)


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(make, bad):
    x = random_values(6, 2, 8)
    x[1, 3] = bad
    with pytest.raises(PrivacyError, match="not finite"):
        clip(make(x), 1.0)
    with pytest.raises(PrivacyError, match="not finite"):
        clip_layers(make(x), LAYOUT, [1.0, 1.0])
    with pytest.raises(PrivacyError, match="not finite"):
        layer_norms(make(x), LAYOUT)


@KINDS
def test_a_bound_of_inf_clips_nothing_but_still_refuses_nan(make):
    x = random_values(7, 8, scale=1e6)
    np.testing.assert_array_equal(np.asarray(clip(make(x), math.inf)), x)
    np.testing.assert_array_equal(np.asarray(clip_layers(make(x), LAYOUT, [math.inf, math.inf])), x)
    x[0] = math.nan
    with pytest.raises(PrivacyError, match="not finite"):
        clip(make(x), math.inf)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_bounds_must_be_above_zero(bad):
    with pytest.raises(PrivacyError, match="above zero"):
        clip(np.ones(8, np.float32), bad)
    with pytest.raises(PrivacyError, match="above zero"):
        clip_layers(np.ones(8, np.float32), LAYOUT, [1.0, bad])


def test_shapes_and_types_that_do_not_fit_are_refused():
    with pytest.raises(PrivacyError, match="7 entries does not fit a layout of 8"):
        layer_norms(np.ones(7, np.float32), LAYOUT)
    with pytest.raises(PrivacyError, match="2 layers need as many"):
        clip_layers(np.ones(8, np.float32), LAYOUT, [1.0, 1.0, 1.0])
    with pytest.raises(PrivacyError, match="floating"):
        clip(np.ones(8, np.int64), 1.0)


def test_a_result_above_its_bound_is_refused(monkeypatch):
    monkeypatch.setattr(clipping, "_ROUNDING_MARGIN", 1.001)
    with pytest.raises(PrivacyError, match="times its bound"):
        clip(random_values(8, 100), 0.5)


def test_snr_by_hand():
    # noise of 0.1 on 10,000 entries has the norm 10: a signal of 1 is 20 dB below it
    assert snr_db(1.0, 0.1, 10_000) == pytest.approx(-20.0)
    assert snr_db(1.0, 0.0, 100) == math.inf
    assert snr_db(0.0, 1.0, 100) == -math.inf
    # the figure in the module's head
    assert snr_db(1.0, 1.0, 1_600_000) == pytest.approx(-62.0, abs=0.05)
    for bad in [(math.nan, 1.0, 1), (1.0, -1.0, 1), (1.0, 1.0, -1), (math.inf, 1.0, 1)]:
        with pytest.raises(PrivacyError, match="finite"):
            snr_db(*bad)


@pytest.mark.parametrize("size", [0, 1, 7, 1000, 32_767, 32_769, 65_544, 100_003, (1 << 20) + 9, 2_345_678])
def test_a_long_vectors_norm_has_the_bits_of_an_array_of_squares(size):
    """Results that were committed depend on them; the array itself would not fit on a board."""
    x = random_values(size, size)
    total = np.float64(0)
    for left in range(0, size, 1 << 20):
        total += np.sum(x[left : left + (1 << 20)].astype(np.float64) ** 2)
    layout = ParamLayout(("all.weight",), ((size,),))
    assert layer_norms(x, layout)[0] == np.sqrt(total)


@KINDS
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    lead=st.sampled_from([(), (1,), (4,), (2, 3), (0,)]),
    size=st.integers(1, 40),
    magnitude=st.integers(-44, 36),
    norm=st.floats(1e-4, 1e4),
)
def test_scale_against_the_obvious(make, seed, lead, size, magnitude, norm):
    x = random_values(seed, *lead, size) * np.float32(10.0**magnitude)
    scaled = np.asarray(scale(make(x), norm))
    assert scaled.dtype == np.float32
    assert scaled.shape == x.shape
    for got, row in zip(scaled.reshape(-1, size).astype(float), x.reshape(-1, size).astype(float), strict=True):
        before = np.linalg.norm(row)
        assert np.linalg.norm(got) == pytest.approx(norm if before else 0, rel=1e-6)
        assert np.linalg.norm(got) <= norm
        # the smallest float32 are coarse, and dividing them by their norm rounds that
        np.testing.assert_allclose(got, norm * row / max(before, 1e-300), rtol=1e-6 + 1e-44 / max(before, 1e-44))


@KINDS
def test_scale_refuses_what_clip_refuses(make):
    x = np.ones(3, np.float32)
    for norm in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyError, match="above zero and finite"):
            scale(make(x), norm)
    for value in (math.nan, math.inf):
        with pytest.raises(PrivacyError, match="not finite"):
            scale(make(x * np.float32(value)), 1.0)
