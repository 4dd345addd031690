"""Clips, noises, quantises and measures simulated updates in one compiled pass, with the same bits as NumPy's path.

That path is `privatize.clip_and_noise`, the round trip of the codec and `decoding.measure`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hushfleet.array_api import BLOCK
from hushfleet.models.native.build import pointer
from hushfleet.models.native.noise import library
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import factors_of, norms_of, scale_factors
from hushfleet.wire.format.update_values import LayerMagnitudes, SentValues

_TINY = np.finfo(np.float32).tiny
_LAYER = np.dtype([("stop", "<u8"), ("deviation", "<f8"), ("factor", "<f4"), ("step", "<f4")])


class Released(NamedTuple):
    """The updates of n clients as the aggregator will see them.

    :param values: float32 `[n, k]`.
    :param levels: float32 `[n, ...]`: a sample of the quantised values; empty if the codec does not quantise by a step.
    :param measured: of each client.
    """

    values: np.ndarray
    levels: np.ndarray
    measured: list[LayerMagnitudes]

    def of(self, row: int) -> SentValues:
        return SentValues(self.values[row], self.measured[row], self.levels[row])


def released(
    values: np.ndarray,
    layout: ParamLayout,
    streams: np.ndarray,
    *,
    mask: np.ndarray | None,
    bounds: np.ndarray | None,
    stds: np.ndarray,
    steps: Sequence[float],
    dither_keys: bytes,
    stride: int,
    scales: bool = False,
) -> Released | None:
    """Clips, noises, quantises and measures updates. Returns None if a clip factor is no normal float32, too coarse.

    :param values: float32 `[n, d]`, zero where `mask` is True.
    :param streams: of the clients' noise, one after the other.
    :param mask: bool `[d]`, True for values that are not sent; None: all are.
    :param bounds: clip norms of the whole vector, or of its layers.
    :param scales: whether the vector is scaled to its clip norm, as `clipping.scale` does.
    :param steps: `[L]` of the quantisation; empty: values are sent as they are.
    :param dither_keys: of the clients, 16 bytes each.

    Raises `PrivacyError` for values that are not finite. The caller makes sure that no value becomes too large for its
    step.
    """
    clients = len(values)
    layers = np.tile(_layers(layout, tuple(stds.tolist()), tuple(steps)), (clients, 1))
    if bounds is not None and scales:
        norms = norms_of(_squares_of(values, layout, bounds))
        values = values / np.where(norms > 0, norms, 1).astype(np.float32)
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
    levels, sent = np.empty((clients, kept if steps else 0), np.float32), sum(counts)
    seen, squares = np.empty(clients * sent + 1, np.float32), np.empty((clients, sum(units)))
    peaks, size = np.empty((clients, len(counts)), np.float32), ctypes.c_size_t
    library().release(
        pointer(streams),
        pointer(np.frombuffer(dither_keys, "<u8")),
        pointer(values),
        size(layout.size),
        size(clients),
        None if mask is None else pointer(mask),
        pointer(layers),
        size(len(counts)),
        pointer(seen),
        size(sent),
        size(stride),
        pointer(levels),
        size(levels.shape[1]),
        pointer(squares),
        size(sum(units)),
        pointer(peaks),
    )
    spans = [slice(*ends) for ends in pairwise(accumulate(units, initial=0))]
    measured = [
        LayerMagnitudes(tuple(most), tuple(math.fsum(each[span]) for span in spans))
        for most, each in zip(peaks.tolist(), squares.tolist(), strict=True)
    ]
    return Released(seen[:-1].reshape(clients, sent), levels, measured)


@lru_cache(maxsize=16)
def _layers(layout: ParamLayout, stds: tuple[float, ...], steps: tuple[float, ...]) -> np.ndarray:
    """Returns the facts of the layers but their factors: most devices have the same."""
    layers = np.zeros(len(layout.layers), _LAYER)
    layers["stop"] = [span.stop for span in layout.layers]
    layers["deviation"], layers["step"] = stds, steps or 0
    return layers


def _squares_of(values: np.ndarray, layout: ParamLayout, bounds: np.ndarray) -> np.ndarray:
    """Returns the sums of squares of the vectors, or of their layers, float64 `[n, 1]` or `[n, L]`."""
    stops = np.array([layout.size] if len(bounds) == 1 else [span.stop for span in layout.layers], np.uint64)
    sums, size = np.empty((len(values), len(stops))), ctypes.c_size_t
    sizes = size(layout.size), size(len(values))
    library().squares_of(pointer(values), *sizes, pointer(stops), size(len(stops)), pointer(sums))
    return sums


def add_scaled(sums: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Adds values times `scale`, rounded half to even; none reaches 2^51.

    :param sums: int64 `[d]`, changed.
    :param values: float32 `[d]`, or rows of them.
    """
    sizes = ctypes.c_size_t(sums.size), ctypes.c_size_t(values.size // sums.size if sums.size else 0)
    library().add_scaled(pointer(sums), pointer(values), ctypes.c_double(scale), *sizes)
