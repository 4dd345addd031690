"""Clips, noises, quantises and measures a simulated update in one compiled pass, with the same bits as NumPy's path.

That path is `privatize.clip_and_noise`, the round trip of the codec and `decoding.measure`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from hushfleet.array_api import BLOCK
from hushfleet.models.native.build import pointer
from hushfleet.models.native.noise import NativeNoise, library
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import factors_of, norms_of, scale_factors
from hushfleet.wire.format.update_values import LayerMagnitudes, SentValues

_TINY = np.finfo(np.float32).tiny
_LAYER = np.dtype([("stop", "<u8"), ("deviation", "<f8"), ("factor", "<f4"), ("step", "<f4")])


def released(
    values: np.ndarray,
    layout: ParamLayout,
    noise: NativeNoise,
    *,
    mask: np.ndarray | None,
    bounds: np.ndarray | None,
    stds: np.ndarray,
    steps: Sequence[float],
    dither_key: bytes,
    stride: int,
    scales: bool = False,
) -> SentValues | None:
    """Clips, noises, quantises and measures an update. Returns None if a clip factor is no normal float32, too coarse.

    :param values: float32 `[d]`, zero where `mask` is True.
    :param mask: bool `[d]`, True for values that are not sent; None: all are.
    :param bounds: clip norms of the whole vector, or of its layers.
    :param scales: whether the vector is scaled to its clip norm, as `clipping.scale` does.
    :param steps: `[L]` of the quantisation; empty: values are sent as they are.

    Raises `PrivacyError` for values that are not finite. The caller makes sure that no value becomes too large for its
    step.
    """
    layers = _layers(layout, tuple(stds.tolist()), tuple(steps)).copy()
    if bounds is not None and scales:
        values = values / np.float32(norms_of(_squares_of(values, layout, bounds))[0] or 1)
        layers["factor"] = scale_factors(np.sqrt(_squares_of(values, layout, bounds)), float(bounds[0]))
    else:
        layers["factor"] = 1 if bounds is None else factors_of(_squares_of(values, layout, bounds), bounds)
    if (layers["factor"] < _TINY).any():
        return None
    counts = [span.size for span in layout.layers]
    if mask is not None:
        counts = [span.size - int(np.count_nonzero(mask[span.start : span.stop])) for span in layout.layers]
    units = [-(-count // BLOCK) for count in counts]
    kept = sum(count // BLOCK * -(-BLOCK // stride) + -(-(count % BLOCK) // stride) for count in counts)
    levels = np.empty(kept if steps else 0, np.float32)
    sent, squares = np.empty(sum(counts) + 1, np.float32)[:-1], np.empty(sum(units))
    peaks = np.empty(len(counts), np.float32)
    library().release(
        pointer(noise.stream),
        pointer(np.frombuffer(dither_key, "<u8")),
        pointer(values),
        None if mask is None else pointer(mask),
        pointer(layers),
        ctypes.c_size_t(len(layers)),
        pointer(sent),
        ctypes.c_size_t(stride),
        pointer(levels),
        pointer(squares),
        pointer(peaks),
    )
    ends = accumulate(units)
    in_layers = (squares[end - count : end] for end, count in zip(ends, units, strict=True))
    return SentValues(sent, LayerMagnitudes(tuple(map(float, peaks)), tuple(map(math.fsum, in_layers))), levels)


@lru_cache(maxsize=16)
def _layers(layout: ParamLayout, stds: tuple[float, ...], steps: tuple[float, ...]) -> np.ndarray:
    """Returns the facts of the layers but their factors: most devices have the same."""
    layers = np.zeros(len(layout.layers), _LAYER)
    layers["stop"] = [span.stop for span in layout.layers]
    layers["deviation"], layers["step"] = stds, steps or 0
    return layers


def _squares_of(values: np.ndarray, layout: ParamLayout, bounds: np.ndarray) -> np.ndarray:
    """Returns the sum of squares of the vector, or of each layer, float64 of the shape of `bounds`."""
    spans = [(0, layout.size)] if len(bounds) == 1 else [(span.start, span.stop) for span in layout.layers]
    compiled = library().squares_of
    return np.array([compiled(pointer(values[start:]), stop - start) for start, stop in spans])


def add_scaled(sums: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Adds values times `scale`, rounded half to even; none reaches 2^51.

    :param sums: int64 `[d]`, changed.
    :param values: float32 `[d]`.
    """
    library().add_scaled(pointer(sums), pointer(values), ctypes.c_double(scale), ctypes.c_size_t(values.size))
