"""Whether there is a CUDA device, asked without PyTorch where that is answer enough."""

from __future__ import annotations

import ctypes
import sys


def sees_cuda() -> bool:
    """Whether PyTorch sees a CUDA device. It takes a second to import, and sees none without the driver's library."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
    import torch

    return torch.cuda.is_available()
