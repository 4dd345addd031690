"""Clipping, noise, accounting and the ledger: a device's privacy guarantee, and the proof that the device kept it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hushfleet.privacy.adversaries import Against, epsilon, noise_multiplier

__all__ = ["Against", "epsilon", "noise_multiplier"]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, because a board needs only other parts of this package."""
    if name not in __all__:
        raise AttributeError(f"module 'hushfleet.privacy' has no attribute {name!r}")
    return getattr(importlib.import_module("hushfleet.privacy.adversaries"), name)
