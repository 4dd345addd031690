"""Finds CUDA devices, without an import of PyTorch if possible, and chooses the one on which a run computes."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from hushfleet.errors import BadInput, format_value

CHOSEN = "HUSHFLEET_DEVICE"
"""The environment variable by which a run tells its processes on which device they compute; empty: on any."""


def sees_cuda() -> bool:
    """Returns whether PyTorch sees a CUDA device that may be used. Its import takes a second, and is skipped without
    the driver."""
    if os.environ.get(CHOSEN) == "cpu":
        return False
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return False
    import torch

    return torch.cuda.is_available()


def computing_device() -> str:
    """Returns `cuda` or `cpu` for PyTorch; the chosen CUDA device is then this process's current one."""
    if not sees_cuda():
        return "cpu"
    _, _, index = os.environ.get(CHOSEN, "").partition(":")
    if index:
        import torch

        torch.cuda.set_device(int(index))
    return "cuda"


@contextmanager
def computing_on(name: str) -> Iterator[None]:
    """Lets this process, and processes that it starts inside, compute on `cpu`, `cuda` or `cuda:N`; empty: on any.

    Raises `BadInput` with the devices of this machine, if it has no such device.
    """
    there = ["cpu"]
    if name not in ("", "cpu") and sees_cuda():
        import torch

        there += [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if name not in ("", *there) and not (name == "cuda" and len(there) > 1):
        raise BadInput(f"--device {format_value(name)}: this machine has {', '.join(there)}")
    before = os.environ.get(CHOSEN)
    os.environ[CHOSEN] = name
    try:
        with nullcontext() if len(there) == 1 else torch.cuda.device(torch.cuda.current_device()):
            yield
    finally:
        if before is None:
            del os.environ[CHOSEN]
        else:
            os.environ[CHOSEN] = before
