"""Flip and crop against a loop that pads, cuts and mirrors one image after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.augment import PADDING, apply_flip_crop, draw_flip_crop, flip_crop
from hushfleet.data.samples import Samples


def one_by_one(x: np.ndarray, rng: np.random.Generator, fill: list[float]) -> np.ndarray:
    """As torchvision does it: pad, crop, then mirror what was cropped."""
    offsets = rng.integers(0, 9, (len(x), 2))
    flips = [rng.random() < 0.5 for _ in x]
    results = []
    for image, (row, column), flip in zip(x, offsets, flips, strict=True):
        padded = np.stack([np.pad(c, 4, constant_values=value) for c, value in zip(image, fill, strict=True)])
        crop = padded[:, row : row + image.shape[1], column : column + image.shape[2]]
        results.append(np.flip(crop, 2) if flip else crop)
    return np.stack(results)


@settings(max_examples=60)
@given(
    batch=st.integers(1, 9),
    channels=st.integers(1, 3),
    height=st.integers(1, 14),
    width=st.integers(1, 14),
    seed=st.integers(0, 1 << 30),
)
def test_a_batch_is_what_one_image_after_the_other_is(batch, channels, height, width, seed):
    x = np.random.default_rng(seed).standard_normal((batch, channels, height, width), np.float32)
    kept = x.copy()
    fill = np.arange(-1, channels - 1, dtype=np.float32)
    rng, same = np.random.default_rng(seed), np.random.default_rng(seed)
    out = flip_crop(x, rng, fill=fill)
    np.testing.assert_array_equal(out, one_by_one(x, same, fill.tolist()))
    np.testing.assert_array_equal(x, kept)
    assert out.dtype == np.float32
    assert not np.may_share_memory(out, x)
    assert rng.random() == same.random()


def test_by_hand_on_a_row_of_pixels():
    x = np.array([1, 2, 3], np.float32).reshape(1, 1, 1, 3)
    turned = [[[9, 1, 2], [2, 1, 9]], [[1, 2, 3], [3, 2, 1]], [[2, 3, 9], [9, 3, 2]]]
    for column, expected in zip((PADDING - 1, PADDING, PADDING + 1), turned, strict=True):
        for flip in (False, True):
            offsets = np.array([[PADDING, column]])
            out = apply_flip_crop(x, offsets, np.array([flip]), fill=9.0)
            assert out.ravel().tolist() == expected[flip]


def test_all_shifts_and_both_directions_come_up_alike():
    offsets, flips = draw_flip_crop(9000, np.random.default_rng(0))
    for axis in (0, 1):
        counts = np.bincount(offsets[:, axis], minlength=2 * PADDING + 1)
        assert len(counts) == 2 * PADDING + 1
        assert abs(counts - 1000).max() < 150
    assert abs(flips.sum() - 4500) < 250


def test_padding_is_what_normalisation_makes_of_black():
    mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
    samples = Samples(np.zeros((1, 3, 2, 2), np.uint8), np.zeros(1, np.int64), mean, std)
    np.testing.assert_array_equal(-samples.shift, samples.x[0, :, 0, 0])


def test_a_fill_for_another_number_of_channels_is_refused():
    with pytest.raises(ValueError, match="broadcast"):
        flip_crop(np.zeros((1, 3, 8, 8), np.float32), np.random.default_rng(0), fill=np.zeros(2, np.float32))
