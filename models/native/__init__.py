"""Runs gradients, optimizer steps and noise of simulations in compiled C; without a C compiler all still works.

A network that is described by layers (`layers`) becomes its own C program, which is built at first use and stored in
the user's cache. It computes the same as PyTorch, up to rounding, several times faster on one core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hushfleet.errors import HushfleetError
from hushfleet.models.native.noise import NativeNoise
from hushfleet.models.native.optimizers import NativeAdam, NativeSGD, make_native_optimizer

if TYPE_CHECKING:
    from hushfleet.models.model import Model

__all__ = ["NativeAdam", "NativeNoise", "NativeSGD", "make_native_optimizer", "unavailable"]


def unavailable(model: Model | None = None) -> str | None:
    """Returns why there is no compiled gradient of `model` (without a model: no compiled code); None if there is."""
    try:
        if model is None:
            NativeSGD(0.0)
        else:
            from hushfleet.models.native.gradient import NativeGradient  # optimizers need no network, and no PyTorch

            NativeGradient(model)
    except HushfleetError as error:
        return str(error)
    return None
