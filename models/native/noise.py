"""Draws the noise of simulations in compiled C: the same bits as `SeededNoise` in a fraction of the time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from hushfleet.errors import HushfleetError
from hushfleet.models.native.build import kernels, load_library, pointer
from hushfleet.privacy.noise import SeededNoise, stream_seed

FLAGS = ("-ffp-contract=off",)
_TRIAL = 1 << 10


class NativeNoise(SeededNoise):
    """The same as `hushfleet.privacy.noise.SeededNoise`, bit for bit. Like it, FOR SIMULATION ONLY.

    :raises HushfleetError: there is no compiler, or it refuses, or its code draws other values.
    """

    def __init__(self, seed: int, device_index: int, round: int) -> None:
        self.key = stream_seed(seed, device_index, round).generate_state(2, np.uint64)
        self.stream = begun(library(), self.key)

    def normal(self, size: int) -> np.ndarray:
        return _drawn(library().draw_normal, self.stream, np.empty(size, np.float64))

    def words(self, count: int) -> np.ndarray:
        return _drawn(library().draw_raw, self.stream, np.empty(count, np.uint64))


@cache
def library() -> ctypes.CDLL:
    """Returns the compiled noise and release. Raises `HushfleetError` as `NativeNoise` does."""
    loaded = load_library(kernels("noise.h", "release.h"), flags=FLAGS)
    loaded.stream_bytes.restype = ctypes.c_size_t
    plain = SeededNoise(_TRIAL, 0, 0)
    stream = begun(loaded, plain.key)
    if not np.array_equal(_drawn(loaded.draw_normal, stream, np.empty(_TRIAL)), plain.normal(_TRIAL)):
        raise HushfleetError(f"NumPy {np.__version__} draws other normal values than the compiled noise")
    return loaded


def begun(library: ctypes.CDLL, keys: np.ndarray) -> np.ndarray:
    """Returns streams, one after the other, with the keys of Philox generators, uint64 `[..., 2]`, at their start."""
    streams = np.zeros(keys.size // 2 * library.stream_bytes() // 8, np.uint64)
    library.begin(pointer(streams), pointer(keys), ctypes.c_size_t(keys.size // 2))
    return streams


def _drawn(draw: Callable[..., None], stream: np.ndarray, out: np.ndarray) -> np.ndarray:
    draw(pointer(stream), pointer(out), ctypes.c_size_t(out.size))
    return out
