"""Provides the array-API standard for NumPy and PyTorch, at a cost that a board can afford.

`np` here is NumPy, imported at its first use: a board's guardian loads the modules that say what a method is and what
it costs, and computes nothing with vectors. Modules that a guardian loads take `np` from here.

NumPy 2 follows the standard by itself. The compatible namespace of `array_api_compat` for NumPy imports all of NumPy's
sub-packages, even the one for Fortran: this costs a board 12 MiB and half a second, in the middle of a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from hushfleet.at_need import at_need

Array: TypeAlias = Any
"""A `numpy.ndarray` or a `torch.Tensor`: type checkers know no common type of the two."""

__all__ = ["BLOCK", "Array", "array_namespace", "blocks", "device", "np", "one_torch_thread", "to_device"]

BLOCK = 1 << 15


if TYPE_CHECKING:
    import numpy as np
else:
    np = at_need("numpy")
_compat = at_need("array_api_compat")


def device(array: Array) -> Any:
    """Returns the device that has the array."""
    return _compat.device(array)


def to_device(array: Array, device: Any) -> Array:
    """Returns the array on that device."""
    return _compat.to_device(array, device)


def array_namespace(*arrays: Any) -> Any:
    """Returns the module whose functions take these arrays: `numpy`, or `array_api_compat.torch`."""
    if all(isinstance(array, (np.ndarray, np.generic)) for array in arrays):
        return sys.modules["numpy"]
    return _compat.array_namespace(*arrays)


def blocks(array: Any) -> Iterator[slice]:
    """Yields slices of the last axis that fit the cache; an accelerator gets one slice, because its kernels work best
    on the whole.

    Memory traffic limits a chain of elementwise operations over a million entries: ten passes over 5 MB miss the cache
    ten times. The same chain over one piece after the other misses it once, and its temporary arrays stay small, which
    also suits a board with 512 MB.
    """
    size = array.shape[-1]
    on_host = isinstance(array, np.ndarray) or array.device.type == "cpu"
    step = BLOCK if on_host else max(size, 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limits PyTorch to one thread: for sums in a fixed order, or for operations too small for several threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
