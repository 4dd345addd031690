"""The additions of `sum_kernels`, compiled: an update is added as fast as memory brings it."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from importlib import resources

import numpy as np

from hushfleet.models.native.build import load_library

LANES = 256
"""Of the kernel."""


@cache
def _library() -> ctypes.CDLL:
    source = resources.files("hushfleet.models.native") / "kernels" / "sums.c"
    library = load_library(source.read_text("utf-8"))
    pointer, size, scale, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double, ctypes.c_int
    library.largest_bits.argtypes = [pointer, size]
    library.largest_bits.restype = ctypes.c_uint32
    library.measure.argtypes = [pointer, pointer, size]
    library.measure.restype = ctypes.c_uint32
    library.add_scaled.argtypes = [pointer, pointer, size, scale, flag]
    library.add_scaled_shared.argtypes = [pointer, pointer, pointer, size, pointer, size, scale, flag]
    library.add_scaled.restype = library.add_scaled_shared.restype = None
    return library


class NativeAddition:
    """As `BlockAddition`, bit for bit; contiguous arrays only, of any alignment.

    :raises HushfleetError: there is no compiler, or it refuses.
    """

    def __init__(self) -> None:
        self._library = _library()

    def largest(self, values: np.ndarray) -> float:
        bits = self._library.largest_bits(values.ctypes.data, values.size)
        return _as_float(bits)

    def measure(self, values: np.ndarray) -> tuple[float, float]:
        lanes = np.zeros(LANES)
        bits = self._library.measure(lanes.ctypes.data, values.ctypes.data, values.size)
        largest = _as_float(bits)
        return largest, math.fsum(lanes) if math.isfinite(largest) else math.nan

    def add(self, sums: np.ndarray, values: np.ndarray, *, scale: float, is_small: bool) -> None:
        self._library.add_scaled(sums.ctypes.data, values.ctypes.data, values.size, scale, is_small)

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
        addresses = [array.ctypes.data for array in (sums, counts, values)]
        self._library.add_scaled_shared(*addresses, values.size, shared.ctypes.data, shared.size, scale, is_small)


def _as_float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))
