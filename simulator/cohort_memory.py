"""What a client costs in memory when many are trained at once, counted before anything of that size is allocated.

Two parts: vectors of length d, which are known, and what the network's forward and backward pass hold at their peak,
which is counted. The count runs the pass of two clients on PyTorch's meta device (shapes without numbers) and follows
every tensor from its making to its end. Scratch space inside a kernel is not seen by it; the share of the memory that
is left free is for that.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hushfleet.spec import DropoutSpec
from models.torch_gradient import TorchGradient

FLOAT_BYTES = 4

# Parameters, where they started, gradient, the device's own model, and three temporaries of method and optimizer.
VECTORS = 7
MOMENTS = {"adam": 2, "sgd": 0}


def bytes_per_client(
    gradient: TorchGradient,
    *,
    batch_size: int,
    dropout: tuple[DropoutSpec, ...],
    optimizer: str,
    passes: int,
    image_bytes: int,
) -> int:
    """Peak bytes that one more client adds to a group.

    :param passes: optimizers of each client (`Method.passes`).
    :param image_bytes: the largest client's images; they are held twice, as kept and as joined for the group.
    """
    size = gradient.layout.size
    vectors = size * (FLOAT_BYTES * (VECTORS + passes * MOMENTS[optimizer]) + 1)  # 1: the mask of bools
    # Two, since vmap takes short cuts with one.
    network = pass_bytes(gradient, 2, batch_size=batch_size, dropout=dropout) // 2
    return vectors + network + 2 * image_bytes


@lru_cache(maxsize=16)  # it takes as long as some steps, and is asked for in every round
def pass_bytes(gradient: TorchGradient, clients: int, *, batch_size: int, dropout: tuple[DropoutSpec, ...]) -> int:
    """Peak bytes of one `gradient.clients` call, with its batch and masks, but without parameters and `out`."""
    shape, meta = (clients, batch_size), torch.device("meta")
    params = torch.empty(clients, gradient.layout.size, device=meta)
    out = torch.empty_like(params)
    with AliveBytes() as alive:
        x = torch.empty(*shape, *gradient.model.input_shape, device=meta)
        y = torch.empty(shape, dtype=torch.int64, device=meta)
        masks = [torch.empty(*shape, *spec.shape, device=meta) for spec in dropout]
        gradient.clients(params, x, y, masks, out=out, weights=torch.empty(shape, device=meta))
    return alive.peak


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made within, while they are alive; `peak` is the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views and in-place operations return the storage of an argument, which is no new memory.
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage())
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._known:
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage)
        size = storage.nbytes()
        self._now += size
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self._now -= size
