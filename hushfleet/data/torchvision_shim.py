"""Imports torchvision beside a PyTorch that it was not built for.

PyPI's torchvision wheel carries CUDA operators. Beside a CPU-only PyTorch its native library does not load,
and `import torchvision` then fails with "operator torchvision::nms does not exist", because it registers
Python kernels for operators that nobody declared. Only the data set classes are used here, so it is enough
to declare the two operators first; they stay without an implementation.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_declared: list[Any] = []
"""Keeps the library alive: its declarations vanish with it."""


def import_torchvision() -> ModuleType:
    """The `torchvision` package, whatever PyTorch it meets.

    :raises ImportError: torch or torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    import torch

    for module in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[module]
    if not _declared:
        make: Any = torch.library.Library  # has no types
        library = make("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return importlib.import_module("torchvision")
