"""The walks through a float32 vector that an update costs on a processor: compiled where that can be, or NumPy.

Both give the same bits. A value times a scale is exact in float64 (24 bits times at most 23) and rounded half to even.
A square is exact too, and squares are added in an order that is the same for both.
Nothing here imports PyTorch unless a compiled form is asked for.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Protocol

import numpy as np

from hushfleet.blocks import BLOCK, blocks
from hushfleet.errors import HushfleetError

SMALL = 2.0**51
"""Scaled values below this are rounded by adding `_SHIFT`, whose double has the nearest whole number in its low bits:
an addition is what every processor does quickest, and a conversion to int64 is what few do on vectors."""
LANES = 256
_SHIFT = 1.5 * 2.0**52
_SHIFT_BITS = int(np.float64(_SHIFT).view(np.int64))


class Addition(Protocol):
    """What `ExactSum` needs; arrays are contiguous and not checked again.

    :param sums: int64 `[d]`, changed; :param counts: int32 `[d]`, changed.
    :param values: float32 `[k]`; `add` wants all `[d]`, `add_shared` those where `shared` (bool `[d]`) is True.
    :param scale: positive, a multiple of 2^20 below 2^43.
    :param is_small: no value times `scale` reaches 2^51; otherwise none reaches 2^63.
    """

    def largest(self, values: np.ndarray) -> float:
        """The largest magnitude; NaN if one is NaN."""
        ...

    def measure(self, values: np.ndarray) -> tuple[float, float]:
        """`largest`, and the sum of the squares: value i is in running sum i modulo `LANES`, which are added exactly.

        Where a value is not finite, the sum means nothing.
        """
        ...

    def add(self, sums: np.ndarray, values: np.ndarray, *, scale: float, is_small: bool) -> None: ...

    def add_shared(
        self,
        sums: np.ndarray,
        counts: np.ndarray,
        values: np.ndarray,
        shared: np.ndarray,
        *,
        scale: float,
        is_small: bool,
    ) -> None: ...


@cache
def find_addition() -> Addition:
    """The compiled one if this machine has a C compiler."""
    from hushfleet.models.native.sums import NativeAddition

    try:
        return NativeAddition()
    except HushfleetError:
        return BlockAddition()


class BlockAddition:
    """NumPy, over pieces that stay in the cache."""

    def largest(self, values: np.ndarray) -> float:
        least = most = np.float32(0.0)
        for part in blocks(values):
            # NaN is the minimum and the maximum of whatever it is among
            least, most = np.minimum(least, values[part].min()), np.maximum(most, values[part].max())
        return float(np.maximum(-least, most))

    def measure(self, values: np.ndarray) -> tuple[float, float]:
        # The running sums are the first row, and NumPy adds rows one after the other.
        rows = np.zeros((1 + BLOCK // LANES, LANES))
        largest = np.float64(0.0)
        for part in blocks(values):
            flat = rows[1:].reshape(-1)
            size = part.stop - part.start
            with np.errstate(invalid="ignore"):  # a signalling NaN; `largest` tells of it
                flat[:size], flat[size:] = values[part], 0.0
            largest = np.maximum(largest, self.largest(values[part]))  # keeps a NaN
            flat *= flat
            rows[0] = rows.sum(axis=0)
        return float(largest), math.fsum(rows[0]) if np.isfinite(largest) else math.nan

    def add(self, sums: np.ndarray, values: np.ndarray, *, scale: float, is_small: bool) -> None:
        for part in blocks(sums):
            _add(sums[part], values[part], scale, is_small)

    def add_shared(
        self,
        sums: np.ndarray,
        counts: np.ndarray,
        values: np.ndarray,
        shared: np.ndarray,
        *,
        scale: float,
        is_small: bool,
    ) -> None:
        taken = 0
        for part in blocks(sums):
            mask = shared[part]
            here = int(np.count_nonzero(mask))
            dense = np.zeros(mask.size, np.float32)
            dense[mask] = values[taken : taken + here]
            taken += here
            _add(sums[part], dense, scale, is_small)
            counts[part] += mask


def _add(sums: np.ndarray, values: np.ndarray, scale: float, is_small: bool) -> None:
    scaled = values.astype(np.float64)
    scaled *= scale
    if is_small:
        scaled += _SHIFT
        sums += scaled.view(np.int64)
        sums -= _SHIFT_BITS
    else:
        sums += np.rint(scaled, out=scaled).astype(np.int64)
