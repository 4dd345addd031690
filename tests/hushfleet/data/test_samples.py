"""Samples: normalisation, and what they refuse to be made of."""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.data.arrays import Data
from hushfleet.data.samples import DataSet, Samples
from hushfleet.errors import BadInput


def colours() -> Samples:
    images = np.zeros((3, 3, 2, 2), dtype=np.uint8)
    images[:, 0], images[:, 1], images[:, 2] = 255, 51, 0
    return Samples(images, np.array([2, 0, 1], dtype=np.int64), (0.5, 0.2, 0.1), (0.25, 0.5, 0.2))


def test_x_is_scaled_by_channel() -> None:
    x = colours().x
    assert x.dtype == np.float32
    assert x.shape == (3, 3, 2, 2)
    # (1 - 0.5) / 0.25, (0.2 - 0.2) / 0.5, (0 - 0.1) / 0.2
    np.testing.assert_allclose(x[1, :, 0, 1], [2.0, 0.0, -0.5], atol=1e-6)


def test_take_keeps_the_order_asked_for() -> None:
    part = colours().take(np.array([2, 0]))
    assert part.y.tolist() == [1, 2]
    assert len(part) == 2
    assert part.images.dtype == np.uint8
    assert part.mean == (0.5, 0.2, 0.1)


def test_a_data_set_answers_from_its_training_part() -> None:
    data = DataSet("tiny", colours(), colours().take(slice(0, 1)), ("a", "b", "c"))
    assert (data.classes, data.input_shape) == (3, (3, 2, 2))
    assert (data.mean, data.std) == ((0.5, 0.2, 0.1), (0.25, 0.5, 0.2))


@pytest.mark.parametrize(
    ("images", "labels", "mean", "std", "reason"),
    [
        (np.zeros((1, 1, 2, 2), np.float64), np.zeros(1, np.int64), (0.0,), (1.0,), "uint8 or float32"),
        (np.zeros((1, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,), r"\[n, C, H, W\]"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,), "one for each image"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int32), (0.0,), (1.0,), "int64"),
        (np.zeros((1, 3, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (1.0,), "3 channels"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.zeros(1, np.int64), (0.0,), (0.0,), "positive"),
    ],
)
def test_refuses_arrays_that_do_not_fit(images, labels, mean, std, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        Samples(images, labels, mean, std)


def test_parts_of_two_types_are_refused() -> None:
    """uint8 is divided by 255, and other numbers are not: both would be normalised by the training part's mean."""
    pixels, labels = np.random.default_rng(0).integers(0, 256, (20, 1, 4, 4)), np.arange(20) % 2
    mixed = Data(pixels.astype(np.uint8), labels, pixels, labels)
    with pytest.raises(BadInput, match="the data: train_x is uint8, test_x is int64. uint8 is read as pixels"):
        mixed.dataset("mine")
    wide = Data(pixels, labels, pixels.astype(np.float64), labels).dataset("mine")
    np.testing.assert_array_equal(wide.train.images, pixels.astype(np.float32))  # nothing is cut to bytes
