"""Brings samples to the form (C, H, W); it asks where neither task nor shape says which axis the channels are."""

from __future__ import annotations

import logging

import numpy as np

from hushfleet.errors import BadInput

_FEW = 4  # channels of an image, and pixels of a side that no image has
_SAY = (
    'say data.layout = "channels-first" ([n, C, H, W], series [n, C, T]) or "channels-last" ([n, H, W, C], [n, T, C])'
)
_log = logging.getLogger(__name__)


def channels_first(
    x: np.ndarray, where: str, *, layout: str = "", shape: tuple[int, ...] | None = None, are_pixels: bool = False
) -> np.ndarray:
    """Returns the samples as `[n, C, H, W]`, a view.

    :param x: `[n, F]`; images `[n, C, H, W]`, `[n, H, W, C]` or, grey, `[n, H, W]`; series `[n, C, T]` or `[n, T, C]`.
    :param layout: `channels-first` or `channels-last`; empty: the shape decides, and a line says so.
    :param shape: (C, H, W), which the task takes; None: any.
    :param are_pixels: whether the values are bytes.
    :raises BadInput: no such shape, or it may be read in two ways.
    """
    if not 2 <= x.ndim <= 4 or 0 in x.shape[1:]:
        raise BadInput(f"{where} has shape {list(x.shape)}; it must be [n, C, H, W], [n, C, T] of series, or [n, F]")
    if x.ndim == 2:
        return x[:, :, None, None]
    first = x if x.ndim == 4 else x[:, :, None, :]
    last = np.moveaxis(x, -1, 1) if x.ndim == 4 else x.swapaxes(1, 2)[:, :, None, :]
    if layout:
        return last if layout == "channels-last" else first
    ways = {"": first, "channels last": last} | ({"grey images": x[:, None]} if x.ndim == 3 else {})
    sample = x.shape[1:]
    if shape is None:
        found = _way_of_images(*sample) if x.ndim == 4 else _way_of_series(sample[0], sample[1], are_pixels)
    else:
        found = next((way for way, made in ways.items() if made.shape[1:] == tuple(shape)), "")
        if not found and x.ndim == 4 and sample[2] < _FEW < min(sample[:2]) and first.shape[1:] == tuple(shape):
            found = None  # input_shape may be written in the order of these arrays
    if found is None:
        grey = "; grey images without an axis of channels: give x[:, None]" * (x.ndim == 3)
        raise BadInput(
            f"{where} has samples of shape {list(sample)}, in which the channels may be first or last: {_SAY}{grey}"
        )
    if found:
        told = " x ".join(map(str, ways[found].shape[1:]))
        _log.warning("%s: samples of shape %s are read as %s, %s in (C, H, W)", where, list(sample), found, told)
    return ways[found]


def _way_of_images(a: int, b: int, c: int) -> str | None:
    """Returns how samples of this shape are read: "", channels first; None if it is not clear."""
    if b == 1:  # a series (C, 1, T), or a vector
        return "" if c == 1 or a <= c else None
    if a == 1 or a <= _FEW < min(b, c):
        return ""
    if c <= _FEW < min(a, b):
        return "channels last"
    if b == c != a:
        return ""
    return "channels last" if a == b != c and c <= _FEW else None


def _way_of_series(a: int, b: int, are_pixels: bool) -> str | None:
    """Returns how samples of this shape are read, as `_way_of_images`."""
    if are_pixels and min(a, b) > _FEW:
        return "grey images" if a == b else None
    if a < b or a == b == 1:
        return ""
    return "channels last" if b <= _FEW < a else None
