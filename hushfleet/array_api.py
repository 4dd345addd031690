"""Provides the array-API standard for NumPy and PyTorch, at a cost that a board can afford.

NumPy 2 follows the standard by itself. The compatible namespace of `array_api_compat` for NumPy imports all of NumPy's
sub-packages, even the one for Fortran: this costs a board 12 MiB and half a second, in the middle of a round.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace as _compatible_namespace
from array_api_compat import device, is_numpy_array, to_device

Array: TypeAlias = Any
"""A `numpy.ndarray` or a `torch.Tensor`: type checkers know no common type of the two."""

__all__ = ["Array", "array_namespace", "device", "is_numpy_array", "to_device"]


def array_namespace(*arrays: Any) -> Any:
    """Returns the module whose functions take these arrays: `numpy`, or `array_api_compat.torch`."""
    if all(isinstance(array, (np.ndarray, np.generic)) for array in arrays):
        return np
    return _compatible_namespace(*arrays)
