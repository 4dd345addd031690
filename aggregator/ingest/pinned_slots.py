"""Updates on their way to an accelerator: the host writes into pinned slots and goes on while they are copied.

A pageable copy would make the host wait for the accelerator at every update. Here it waits only for a slot whose
last copy has not left yet, that is, if the accelerator is `SLOTS` updates behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

SLOTS = 3


class Event(Protocol):
    """`torch.cuda.Event`, as far as it is used."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Nothing:
    """Copies on a processor are done when they return."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class _Slot:
    values: torch.Tensor
    shared: torch.Tensor
    copied: Event


class Staging:
    """A ring of slots for updates of `size` values, and the memory on `device` that they are copied to.

    What `put` gives is overwritten by the next `put`, in the stream's order: work queued before sees what it should.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._slots = [self._new_slot(size) for _ in range(SLOTS)]
        self._values = torch.empty(size, dtype=torch.float32, device=device)
        self._shared = torch.empty(size, dtype=torch.bool, device=device)
        self._next = 0

    def put(self, values: np.ndarray, shared: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """On the device: `values` float32 `[k]` as `[d]`, zero where `shared` (bool `[d]`) is False, and `shared`."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.copied.synchronize()
        if shared is None:
            slot.values.numpy()[:] = values
        else:
            dense = slot.values.numpy()
            dense.fill(0.0)
            dense[shared] = values
            slot.shared.numpy()[:] = shared
            self._shared.copy_(slot.shared, non_blocking=True)
        self._values.copy_(slot.values, non_blocking=True)
        slot.copied.record()
        return self._values, None if shared is None else self._shared

    def _new_slot(self, size: int) -> _Slot:
        pinned = self._device.type == "cuda"
        return _Slot(
            torch.empty(size, dtype=torch.float32, pin_memory=pinned),
            torch.empty(size, dtype=torch.bool, pin_memory=pinned),
            new_event(self._device),
        )


def new_event(device: torch.device) -> Event:
    return torch.cuda.Event() if device.type == "cuda" else _Nothing()
