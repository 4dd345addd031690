"""Runs all steps of a local training in one call of compiled code, with the bits of one step at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from hushfleet.learning.batch import Descent
from hushfleet.learning.entries import Entries
from hushfleet.learning.graph_session import check_array
from hushfleet.models.native.build import kernels, load_library, pointer
from hushfleet.models.native.optimizers import ADAM, FLAGS, adam_corrections

INT, POINTER = ctypes.c_int64, ctypes.c_void_p


class _Samples(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("values", "labels", "scale", "shift")),
        *((name, INT) for name in ("are_bytes", "channels", "pixels")),
    )


class _Part(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("start", "stop", "from_layer", "until_layer", "steps")),
        *((name, POINTER) for name in ("mask", "mean", "square")),
    )


class Descender:
    """Trains vectors of one network. Its memory stays from one to the next, because new memory pages take time.

    :param program: the network's, with a compiled `gradient`.
    :param layers: returns the numbers of the layers of some entries: the first, and the last plus one.
    """

    def __init__(self, program: ctypes.CDLL, size: int, layers: Callable[[slice], tuple[int, int]]) -> None:
        self._function, self._layers = ctypes.cast(program.gradient, POINTER), layers
        self._gradient = np.empty(size, np.float32)
        self._buffers: tuple[ctypes.c_void_p, ...] = ()
        self._x, self._y = np.empty(0, np.float32), np.empty(0, np.int64)

    def __call__(self, descent: Descent, params: np.ndarray, scratch: ctypes.c_void_p) -> tuple[float, int]:
        """Moves `params` by all steps; returns the sum of the losses, and -1 or the first sample without a class."""
        samples, (name, rate, momentum) = descent.samples, descent.optimizer
        values, labels = np.ascontiguousarray(samples.kept), np.ascontiguousarray(samples.labels)
        scale, shift, size = samples.scale, samples.shift, values[0].size
        places, lengths = np.concatenate(descent.batches, dtype=np.int64), [len(each) for each in descent.batches]
        numbered = zip(lengths, descent.active, strict=True)
        steps = np.array([(n, part, part == parts[0]) for n, parts in numbered for part in parts], np.int32)
        self._hold(max(lengths), size)
        settings = np.array(ADAM if name == "adam" else (rate, momentum), np.float32)
        corrections = _corrections(rate, len(steps)) if name == "adam" else settings
        pulls, loss_sum = np.array(descent.pulls, np.float32), ctypes.c_double()
        moments = 2 if name == "adam" else int(momentum != 0)
        memory = [np.zeros((moments, len(params[each.span])), np.float32) for each in descent.parts]
        at = map(pointer, (values, labels, scale, shift))
        wrong: int = _library().descend(
            self._function,
            scratch,
            pointer(params),
            _Samples(*at, values.dtype == np.uint8, len(scale), size // len(scale)),
            pointer(steps),
            len(steps),
            pointer(places),
            (_Part * len(memory))(*map(self._part, descent.parts, memory)),
            pointer(pulls),
            len(pulls),
            *map(pointer, (descent.center, settings, corrections)),
            *self._buffers,
            loss_sum,
        )
        return loss_sum.value, wrong

    def _hold(self, batch: int, size: int) -> None:
        """Makes room for so many samples of `size` values."""
        if batch > len(self._y):
            self._x, self._y = np.empty(batch * size, np.float32), np.empty(batch, np.int64)
            self._buffers = tuple(map(pointer, (self._x, self._y, self._gradient)))

    def _part(self, entries: Entries, memory: np.ndarray) -> _Part:
        start, stop, _ = entries.span.indices(len(self._gradient))
        mask = None
        if not entries.fills and entries.mask is not None:
            check_array("mask", entries.mask, np.dtype(bool), self._gradient.shape)
            mask = pointer(entries.mask)
        return _Part(start, stop, *self._layers(entries.span), 0, mask, *map(pointer, [*memory]))


@cache
def _library() -> ctypes.CDLL:
    library = load_library(kernels("optimizers.c", "descent.c"), flags=FLAGS)
    at, count = POINTER, ctypes.c_int
    structures = [ctypes.POINTER(each) for each in (_Samples, _Part, ctypes.c_double)]
    library.descend.argtypes = [at, at, at, structures[0], at, count, at, structures[1], at, count]
    library.descend.argtypes += [at] * 6 + [structures[2]]
    library.descend.restype = INT
    return library


@lru_cache(maxsize=8)
def _corrections(learning_rate: float, steps: int) -> np.ndarray:
    """Returns what `adam_corrections` gives for each of the first steps, float32 `[steps, 2]`."""
    return np.array([adam_corrections(learning_rate, step) for step in range(1, steps + 1)], np.float32)
