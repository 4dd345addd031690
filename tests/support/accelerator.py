"""Where PyTorch computes in tests: on the processor, and on CUDA too where there is one."""

from __future__ import annotations

import torch

TORCH_DEVICES = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
