"""Checks for a CUDA device, without an import of PyTorch if possible."""

from __future__ import annotations

import ctypes
import sys


def sees_cuda() -> bool:
    """Returns whether PyTorch sees a CUDA device. Its import takes a second, and is skipped without the driver."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
    import torch

    return torch.cuda.is_available()
