"""Runs all steps of the local trainings of some clients in one call of compiled code, with the bits of one step at a
time."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate

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

    def __call__(
        self, descents: Sequence[Descent], params: np.ndarray, scratch: ctypes.c_void_p
    ) -> tuple[np.ndarray, int]:
        """Moves each row of `params` by all steps of a client; returns the sums of the losses, float64 `[n]`, and -1 or
        the number of the first trained sample without a class.

        :param descents: of the clients, which differ in samples and batches alone.
        """
        first, (name, rate, momentum) = descents[0], descents[0].optimizer
        values, labels = joined([each.samples.kept for each in descents]), joined([d.samples.labels for d in descents])
        scale, shift, size = first.samples.scale, first.samples.shift, math.prod(values.shape[1:])
        starts = accumulate((len(each.samples) for each in descents), initial=0)
        places = joined([part + start for d, start in zip(descents, starts, strict=False) for part in d.batches])
        listed = [_steps(tuple(map(len, each.batches)), tuple(map(tuple, each.active))) for each in descents]
        steps, most = joined(listed), max(map(len, listed))
        shares = np.array([(len(each), sum(map(len, d.batches))) for each, d in zip(listed, descents, strict=True)])
        self._hold(max(len(batch) for each in descents for batch in each.batches), size)
        settings = np.array(ADAM if name == "adam" else (rate, momentum), np.float32)
        corrections = _corrections(rate, most) if name == "adam" else settings
        pulls, loss_sums = np.array(first.pulls, np.float32), np.empty(len(descents))
        moments = 2 if name == "adam" else int(momentum != 0)
        memory = [np.empty((moments, len(self._gradient[each.span])), np.float32) for each in first.parts]
        at = map(pointer, (values, labels, scale, shift))
        wrong: int = _library().descend(
            self._function,
            scratch,
            pointer(params),
            len(self._gradient),
            pointer(shares),
            len(descents),
            _Samples(*at, values.dtype == np.uint8, len(scale), size // len(scale)),
            pointer(steps),
            pointer(places),
            (_Part * len(memory))(*map(self._part, first.parts, memory)),
            len(memory),
            pointer(pulls),
            len(pulls),
            *map(pointer, (first.center, settings, corrections)),
            *self._buffers,
            pointer(loss_sums),
        )
        return loss_sums, wrong

    def _hold(self, batch: int, size: int) -> None:
        """Makes room for so many samples of `size` values."""
        if batch > len(self._y):
            self._x, self._y = np.empty(batch * size, np.float32), np.empty(batch, np.int64)
            memory: list[np.ndarray] = [self._x, self._y, self._gradient]
            self._buffers = tuple(map(pointer, memory))

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
    samples, parts = ctypes.POINTER(_Samples), ctypes.POINTER(_Part)
    library.descend.argtypes = [at, at, at, INT, at, count, samples, at, at, parts, count, at, count]
    library.descend.argtypes += [at] * 7
    library.descend.restype = INT
    return library


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays one after the other; a single one is not copied if it lies in order."""
    return np.ascontiguousarray(arrays[0]) if len(arrays) == 1 else np.concatenate(arrays)


@lru_cache(maxsize=64)
def _steps(lengths: tuple[int, ...], active: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """Returns the gradients of batches: size, number of the part, and whether it is the first of a batch."""
    rows = [(n, part, part == parts[0]) for n, parts in zip(lengths, active, strict=True) for part in parts]
    return np.array(rows, np.int32).reshape(-1, 3)


@lru_cache(maxsize=8)
def _corrections(learning_rate: float, steps: int) -> np.ndarray:
    """Returns what `adam_corrections` gives for each of the first steps, float32 `[steps, 2]`."""
    return np.array([adam_corrections(learning_rate, step) for step in range(1, steps + 1)], np.float32)
