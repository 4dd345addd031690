"""Runs PyTorch on one thread for a while. PyTorch is imported only at the call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limits PyTorch to one thread: for sums in a fixed order, or for operations too small for several threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
