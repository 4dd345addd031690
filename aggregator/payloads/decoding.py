"""Decodes an update's bytes into values and measures them: the slowest part of accepting an update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.array_api import blocks
from hushfleet.errors import WireError
from hushfleet.wire.format.update_values import SIGNED, LayerMagnitudes, UpdateFormat

MAX_MAGNITUDE = 2.0**20
"""No value may be larger, because the exact sums depend on this limit."""


def decode(update: CheckedUpdate, *, update_format: UpdateFormat = SIGNED) -> None:
    """Fills in values, peaks and squares of an authenticated update. Raises `Refusal`.

    :param update: has `shared` and `counts`, which give the expected number of values in each layer.
    """
    try:
        update.summed = update_format.summed(update.data)
        if update.summed is None:
            values = update_format.values(update.header, update.data, counts=update.counts)
            update.values, measured = spread(values, update.shared), measure(values, update.counts)
        else:
            measured = update.summed.measured
    except WireError as error:
        raise Refusal("malformed", str(error)) from error
    update.peaks, update.squares = measured
    if not all(map(math.isfinite, update.peaks)):
        raise Refusal("non-finite", "some of the update's values are not finite")
    if max(update.peaks) > MAX_MAGNITUDE:
        raise Refusal("out-of-bounds", f"a value of {max(update.peaks):g} is above the limit of {MAX_MAGNITUDE:g}")


def measure(values: np.ndarray, counts: Sequence[int]) -> LayerMagnitudes:
    """Returns the largest magnitude and the sum of squares in each layer of `values`, float32 `[k]`.

    :param counts: number of values in each layer.
    """
    ends = np.cumsum(counts).tolist()
    layers = [values[end - k : end] for k, end in zip(counts, ends, strict=True)]
    # if one value is NaN, the minimum and the maximum are NaN
    peaks = tuple(float(np.maximum(-layer.min(initial=0.0), layer.max(initial=0.0))) for layer in layers)
    return LayerMagnitudes(peaks, tuple(map(_square, layers)))


def spread(values: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Puts float32 `[k]` where `shared`, bool `[d]`, is True; the other entries of the `[d]` result are zero.

    With k = d the result is `values` itself, which may be read-only.
    """
    if values.size == shared.size:
        return values
    whole = np.zeros(shared.size, np.float32)
    whole[shared] = values
    return whole


def _square(values: np.ndarray) -> float:
    return math.fsum(float(np.square(values[part], dtype=np.float64).sum()) for part in blocks(values))
