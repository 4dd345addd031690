"""Draws the noise of simulations in compiled C: the same bits as `SeededNoise` in less than half of the time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np

from hushfleet.errors import HushfleetError
from hushfleet.models.native.build import kernels, load_library, pointer
from hushfleet.privacy.noise import SeededNoise

FLAGS = ("-ffp-contract=off",)
_TRIAL = 1 << 14  # values; about two hundred of them are from the edges of their layers or the tail


class NativeNoise(SeededNoise):
    """The same as `hushfleet.privacy.noise.SeededNoise`, bit for bit. Like it, FOR SIMULATION ONLY.

    :raises HushfleetError: there is no compiler, or it refuses, or this NumPy draws other values.
    """

    def __init__(self, seed: int, device_index: int, round: int) -> None:
        super().__init__(seed, device_index, round)
        self._stream = _begun(_library(), self.generator)

    def normal(self, size: int) -> np.ndarray:
        return _drawn(_library().draw_normal, self._stream, np.empty(size, np.float64))

    def words(self, count: int) -> np.ndarray:
        return _drawn(_library().draw_raw, self._stream, np.empty(count, np.uint64))


@cache
def _library() -> ctypes.CDLL:
    library = load_library(kernels("ziggurat.h", "noise.c"), flags=FLAGS)
    library.stream_bytes.restype = ctypes.c_size_t
    # NumPy may change its streams (NEP 19), and its C library's logarithm may differ from ours.
    generator = np.random.Generator(np.random.Philox(_TRIAL))
    stream = _begun(library, generator)
    if not np.array_equal(_drawn(library.draw_normal, stream, np.empty(_TRIAL)), generator.standard_normal(_TRIAL)):
        raise HushfleetError(f"NumPy {np.__version__} draws other normal values than the compiled noise")
    return library


def _begun(library: ctypes.CDLL, generator: np.random.Generator) -> np.ndarray:
    """Returns a stream with the generator's key, at its start."""
    key = generator.bit_generator.state["state"]["key"]
    stream = np.zeros(library.stream_bytes() // 8, np.uint64)
    library.begin(pointer(stream), pointer(key))
    return stream


def _drawn(draw: Callable[..., None], stream: np.ndarray, out: np.ndarray) -> np.ndarray:
    draw(pointer(stream), pointer(out), ctypes.c_size_t(out.size))
    return out
