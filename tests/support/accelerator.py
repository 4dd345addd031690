"""Where is computed in tests: on the processor, and on CUDA too where there is one."""

from __future__ import annotations

import torch

_CUDA = ("cuda",) if torch.cuda.is_available() else ()
TORCH_DEVICES = ("cpu", *_CUDA)
# An aggregator's "cpu" is NumPy; "cpu:0" is PyTorch's name for the same processor.
SUM_DEVICES = ("cpu", "cpu:0", *_CUDA)
