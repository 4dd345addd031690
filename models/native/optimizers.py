"""Compiles Adam and SGD of `hushfleet.learning.optim`: the same bits in a fraction of the time, for every runtime.

NumPy computes Adam's step in a dozen passes over cache-sized blocks; this code makes one pass over memory.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial

import numpy as np

from hushfleet.learning.optim import SGD, Adam, make_optimizer
from hushfleet.models.native.build import kernels, load_library

FLAGS = ("-ffp-contract=off",)
ADAM = Adam.beta_1, 1 - Adam.beta_1, Adam.beta_2, 1 - Adam.beta_2, Adam.epsilon


@cache
def _library() -> ctypes.CDLL:
    library = load_library(kernels("optimizers.c"), flags=FLAGS)
    pointer, scalar = ctypes.c_void_p, ctypes.c_float
    library.sgd_step.argtypes = [pointer, pointer, ctypes.c_size_t, scalar]
    library.momentum_step.argtypes = [pointer] * 3 + [ctypes.c_size_t, scalar, scalar]
    library.adam_step.argtypes = [pointer] * 4 + [ctypes.c_size_t] + [scalar] * 7
    library.sgd_step.restype = library.momentum_step.restype = library.adam_step.restype = None
    return library


class NativeSGD(SGD):
    """`hushfleet.learning.optim.SGD` for contiguous float32 arrays of NumPy, bit for bit.

    :raises HushfleetError: there is no compiler, or it refuses.
    """

    def __init__(self, learning_rate: float, momentum: float = 0.0) -> None:
        super().__init__(learning_rate, momentum)
        self._step, self._momentum_step = _library().sgd_step, _library().momentum_step

    def step(self, params: np.ndarray, gradient: np.ndarray) -> None:
        """Moves `params [..., d]` in place. Raises ValueError for other arrays (see the class)."""
        if not self.momentum:
            self._step(*_addresses(params, gradient), params.size, self.learning_rate)
            return
        if self.velocity is None:
            self.velocity = np.zeros_like(params)
        addresses = _addresses(params, gradient, self.velocity)
        self._momentum_step(*addresses, params.size, self.momentum, self.learning_rate)


class NativeAdam(Adam):
    """`hushfleet.learning.optim.Adam` for contiguous float32 arrays of NumPy, bit for bit.

    :raises HushfleetError: there is no compiler, or it refuses.
    """

    def __init__(self, learning_rate: float) -> None:
        super().__init__(learning_rate)
        self._step = _library().adam_step

    def step(self, params: np.ndarray, gradient: np.ndarray) -> None:
        """Moves `params [..., d]` in place. Raises ValueError for other arrays (see the class)."""
        if self.first is None:
            self.first, self.second = np.zeros_like(params), np.zeros_like(params)
        addresses = _addresses(params, gradient, self.first, self.second)
        self.steps += 1
        # NumPy rounds a Python number to float32 before it combines it with an array; ctypes rounds in the same way.
        root_correction, step_size = adam_corrections(self.learning_rate, self.steps)
        self._step(*addresses, params.size, *ADAM[:4], root_correction, ADAM[4], step_size)


def adam_corrections(learning_rate: float, step: int) -> tuple[float, float]:
    """Returns the root of the correction of the squares, and the corrected learning rate, in step 1, 2, ..."""
    return (1 - Adam.beta_2**step) ** 0.5, learning_rate / (1 - Adam.beta_1**step)


make_native_optimizer = partial(make_optimizer, sgd=NativeSGD, adam=NativeAdam)
"""Like `hushfleet.learning.optim.make_optimizer`. Raises `HushfleetError` if nothing can be compiled."""


def _addresses(params: np.ndarray, *others: np.ndarray) -> list[int]:
    for array in (params, *others):
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != params.shape:
            raise ValueError("compiled optimizers take NumPy arrays of float32 and of one shape")
        if not array.flags.c_contiguous:
            raise ValueError("compiled optimizers take contiguous arrays; pass np.ascontiguousarray(...)")
    if not params.flags.writeable or any(np.may_share_memory(params, other) for other in others):
        raise ValueError("params must be writeable memory of its own")
    return [array.ctypes.data for array in (params, *others)]
