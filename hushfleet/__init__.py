"""Hushfleet's base package: code that the device and the aggregator share.

Nothing here imports PyTorch or a network model, so a board can import all of it. The names in `__all__` are the Python
API for scripts and notebooks (docs/python.md). Each name is imported at its first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from hushfleet.version import __version__ as __version__

if TYPE_CHECKING:
    from hushfleet import methods, models, privacy
    from hushfleet.data.arrays import Data
    from hushfleet.data.conversion import as_data
    from hushfleet.methods.method import Method, Published, TrainingConfig, published
    from hushfleet.models.module import with_group_norm
    from hushfleet.simulator.api import Task, events, script, simulate, task
    from hushfleet.simulator.closed_round import Round
    from hushfleet.simulator.engines.fast.workers import Workers
    from hushfleet.simulator.runs import Comparison, Run, compare, open_run

# ONNX Runtime reads this variable at import. Without it, ONNX Runtime sends telemetry to its vendor over the internet:
# a machine id, run counts and durations by batch size, and error messages, which may contain a label.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

__all__ = [
    "Comparison",
    "Data",
    "Method",
    "Published",
    "Round",
    "Run",
    "Task",
    "TrainingConfig",
    "Workers",
    "as_data",
    "compare",
    "events",
    "methods",
    "models",
    "open_run",
    "privacy",
    "published",
    "script",
    "simulate",
    "task",
    "with_group_norm",
]

_MODULES = {
    "data.arrays": ("Data",),
    "data.conversion": ("as_data",),
    "methods.method": ("Method", "Published", "TrainingConfig", "published"),
    "models.module": ("with_group_norm",),
    "simulator.closed_round": ("Round",),
    "simulator.api": ("Task", "events", "script", "simulate", "task"),
    "simulator.engines.fast.workers": ("Workers",),
    "simulator.runs": ("Comparison", "Run", "compare", "open_run"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module 'hushfleet' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
