"""Channels first or last: what a shape says, and what has to be asked."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hushfleet as hf
from hushfleet.data import layout
from hushfleet.data.form import SampleForm
from hushfleet.data.layout import channels_first
from hushfleet.errors import BadInput

LAST = "channels-last"
SIDES = st.integers(2, 12)


def last(x: np.ndarray) -> np.ndarray:
    """The same samples with the channels last, by loops."""
    out = np.empty((len(x), *x.shape[2:], x.shape[1]), x.dtype)
    for channel in range(x.shape[1]):
        out[..., channel] = x[:, channel]
    return out


def numbered(*shape: int) -> np.ndarray:
    return np.arange(2 * np.prod(shape)).reshape(2, *shape)


@given(st.integers(1, 16), SIDES, SIDES)
def test_no_images_are_taken_in_silence_in_both_orders(channels: int, height: int, width: int) -> None:
    x = numbered(channels, height, width)
    assert (channels_first(last(x), "x", layout=LAST) == x).all()
    assert (channels_first(x, "x", layout="channels-first") == x).all()
    ways = [layout._way_of_images(*each.shape[1:]) for each in (x, last(x))]
    assert ways != ["", ""]
    if channels in (1, 3) and min(height, width) > 4:
        assert ways == ["", "channels last"]
        assert (channels_first(last(x), "x") == x).all()


@given(st.integers(1, 16), st.integers(2, 40), st.sampled_from([np.uint8, np.int64, np.float32]))
def test_no_series_are_taken_in_silence_in_both_orders(channels: int, steps: int, dtype: type) -> None:
    x = numbered(channels, steps).astype(dtype)
    assert (channels_first(last(x), "x", layout=LAST) == x[:, :, None]).all()
    ways = [layout._way_of_series(*each.shape[1:], dtype is np.uint8) for each in (x, last(x))]
    assert ways != ["", ""]
    if channels <= 4 < steps:
        assert ways == ["", "channels last"]


@given(st.integers(1, 16), SIDES, SIDES)
def test_the_shape_of_the_task_says_the_order(channels: int, height: int, width: int) -> None:
    x, shape = numbered(channels, height, width), (channels, height, width)
    for given_x in (x, last(x)):
        try:
            found = channels_first(given_x, "x", shape=shape)
        except BadInput:  # it asks
            continue
        assert (found == x).all() or given_x.shape[1:] == shape, "read as the task has it"


@pytest.mark.parametrize(
    ("x", "shape", "told"),
    [
        (numbered(28, 28).astype(np.uint8), (1, 28, 28), "grey images"),
        (numbered(28, 28, 1), (1, 28, 28), "channels last"),
        (numbered(128, 3), (3, 1, 128), "channels last"),
        (numbered(3, 128), (3, 1, 128), ""),
        (numbered(60, 1, 1), (60, 1, 1), ""),
        (numbered(5), (5, 1, 1), ""),
    ],
)
def test_what_the_shape_decides_is_told_in_one_line(x: np.ndarray, shape: tuple, told: str, caplog) -> None:
    assert channels_first(x, "x", are_pixels=x.dtype == np.uint8).shape[1:] == shape
    assert [told in record.getMessage() for record in caplog.records] == [True] * bool(told)


@pytest.mark.parametrize("shape", [(28, 28), (128, 9), (64, 64, 13), (3, 8, 3), (9, 9, 9), (60, 1, 3)])
def test_what_may_be_both_is_asked(shape: tuple) -> None:
    with pytest.raises(BadInput, match=r"may be first or last: say data.layout"):
        channels_first(numbered(*shape), "x")


def test_an_input_shape_in_the_order_of_the_arrays_is_asked_about() -> None:
    with pytest.raises(BadInput, match="may be first or last"):
        channels_first(numbered(32, 32, 3), "x", shape=(32, 32, 3))


def test_every_door_has_the_same_rule(tmp_path, caplog) -> None:
    images, y = np.random.default_rng(0).integers(0, 256, (20, 3, 8, 8)).astype(np.uint8), np.arange(20) % 2
    caplog.set_level(logging.WARNING)
    made = {
        "first": hf.Data(images, y).dataset("d"),
        "by shape": hf.Data(last(images), y).dataset("d"),
        "by the task": hf.Data(last(images), y).dataset("d", form=SampleForm(layout=LAST)),
        "by argument": hf.as_data((last(images), y), layout=LAST).dataset("d"),
        "of 3 pixels": hf.as_data((last(images[..., :3]), y), layout=LAST).dataset("d"),
    }
    for name, each in made.items():
        assert each.input_shape == ((3, 8, 3) if "3" in name else (3, 8, 8)), name
        assert (each.test.images == made["first"].test.images[..., : each.input_shape[2]]).all(), name
    assert len(caplog.records) == 1
    hf.as_data((last(images[..., :3]), y), layout=LAST).save(tmp_path / "d.npz")
    from hushfleet.data.arrays import load_arrays

    assert load_arrays(tmp_path / "d.npz").dataset("d").input_shape == (3, 8, 3)
