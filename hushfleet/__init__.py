"""Hushfleet's ground floor: what a device and the aggregator must agree on.

Nothing here imports PyTorch or a network model, so a board can import all of it. The names of `__all__` are the Python
API, for scripts and notebooks (docs/python.md); they are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hushfleet.simulator.api import Run, Task, events, open_run, simulate, task

__version__ = "0.3.0"
__all__ = ["Run", "Task", "events", "open_run", "simulate", "task"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hushfleet' has no attribute {name!r}")
    return getattr(importlib.import_module("hushfleet.simulator.api"), name)
