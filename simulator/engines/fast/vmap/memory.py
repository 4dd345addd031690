"""Counts the memory per client when many clients are trained at once, before anything of this size is allocated.

There are two parts: vectors of length d, whose number is known, and the peak memory of the network's forward and
backward pass, which is counted. The count runs the pass of two clients on PyTorch's meta device (shapes without
numbers) and follows each tensor from creation to deletion. It does not see scratch space inside a kernel; part of the
memory is left free for it.

A gradient rule's memory between batches is only a few numbers and is left out.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hushfleet.learning.draws import Inputs
from hushfleet.methods.method import TrainingConfig
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.record import RecordMechanism
from hushfleet.wire.format.spec import DropoutSpec

FLOAT_BYTES = 4

# Parameters, their start values, gradient, the device's personalized model, and three temporaries of method and
# optimizer.
VECTORS = 7
MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}

# With privacy unit `record`: the sum, which has twice the width; and for each record of a pass its gradient as tensors,
# as a vector, and clipped.
SUM_VECTORS = 2
RECORD_VECTORS = 3

# For each sample, if a method asks for single gradients: its gradient, and the method's result from it.
SAMPLE_VECTORS = 2

RECORD_ENTRIES = 1 << 26
"""Largest number of entries in the gradients of one client's records in one pass. On an accelerator, launching a pass
of one record takes as long as launching one of many."""
CPU_RECORD_ENTRIES = 1 << 22  # more would not fit the processor's cache, which costs more than fewer passes save
MOST_RECORDS = 64

SECOND_VECTORS = 2  # the end of the first training, and the start of the second one

REPLAY_VECTORS = 2  # parameters and gradient of a recorded pass

CROP_BYTES = 40  # for each pixel of one channel: its source, and whether it is inside the image, in several steps


def bytes_per_client(
    gradient: TorchGradient,
    *,
    config: TrainingConfig,
    inputs: Inputs,
    parts: int,
    samples: int,
    image_bytes: int,
    each: bool = False,
    second: bool = False,
    record: RecordMechanism | None = None,
    records_at_once: int = 1,
    replayed: bool = False,
) -> int:
    """Returns the peak bytes that one more client adds to a group.

    :param parts: number of optimizers of each client.
    :param samples: number of samples of the largest client.
    :param image_bytes: bytes of these samples; they are held twice, as kept and as joined for the group.
    :param each: whether gradients of single samples are computed.
    :param second: whether there is a second model.
    :param record: mechanism for the privacy unit `record`; the largest likely batch counts (mean + 6 deviations).
    :param records_at_once: number of single gradients computed in one pass.
    :param replayed: whether passes are recorded; each recording then has its own memory.
    """
    size, model = gradient.layout.size, gradient.model
    channels, height, width = model.input_shape
    batch_size, dropout = min(config.step_size, samples), tuple(inputs.dropout)
    vectors = VECTORS + parts * (MOMENTS[config.optimizer] + (config.momentum > 0)) + SECOND_VECTORS * second
    beside = 0
    if record is not None:
        batch_size = min(samples, _most_drawn(samples, record.sample_rate))
        beside += batch_size * FLOAT_BYTES * channels * height * width
        beside += batch_size * FLOAT_BYTES * sum(int(np.prod(spec.shape)) for spec in dropout)
        vectors += SUM_VECTORS + RECORD_VECTORS * min(records_at_once, batch_size)
    elif each:
        vectors += SAMPLE_VECTORS * batch_size + min(records_at_once, batch_size)
    if gradient.objective.distills:
        beside += FLOAT_BYTES * gradient.objective.teacher_values(model.classes) * samples
    if inputs.augment != "none":
        beside += CROP_BYTES * batch_size * height * width
    # Two clients, because vmap takes short cuts with one.
    at_once = batch_size if record is None else min(records_at_once, batch_size)
    network = pass_bytes(gradient, 2, batch_size=at_once, dropout=dropout) // 2
    if replayed:
        vectors += REPLAY_VECTORS
        network *= 2
    # 1: the mask of bools
    return size * (FLOAT_BYTES * vectors + 1) + network + beside + 2 * image_bytes


def free_bytes(device: torch.device) -> int:
    """Returns the bytes of a CUDA device that nothing holds, with those that PyTorch keeps for later use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def records_at_once(size: int, device_type: str) -> int:
    """Returns the number of a client's records in one gradient pass, for a network with `size` parameters."""
    entries = CPU_RECORD_ENTRIES if device_type == "cpu" else RECORD_ENTRIES
    return min(max(1, entries // size), MOST_RECORDS)


def _most_drawn(samples: int, rate: float) -> int:
    mean = samples * rate
    return int(np.ceil(mean + 6 * np.sqrt(mean * (1 - rate)) + 1))


@lru_cache(maxsize=16)  # it takes as long as some training steps, and is called in every round
def pass_bytes(gradient: TorchGradient, clients: int, *, batch_size: int, dropout: tuple[DropoutSpec, ...]) -> int:
    """Returns peak bytes of one `gradient.clients` call, with batch and masks, but without parameters and `out`."""
    shape, meta = (clients, batch_size), torch.device("meta")
    params = torch.empty(clients, gradient.layout.size, device=meta)
    out = torch.empty_like(params)
    with AliveBytes() as alive:
        x = torch.empty(*shape, *gradient.model.input_shape, device=meta)
        y = torch.empty(shape, dtype=torch.int64, device=meta)
        if not gradient.objective.of_classes:
            y = torch.empty(*shape, gradient.model.classes, device=meta)
        masks = [torch.empty(*shape, *spec.shape, device=meta) for spec in dropout]
        learned = {}
        if gradient.objective.distills:
            teacher = torch.empty(*shape, gradient.objective.teacher_values(gradient.model.classes), device=meta)
            learned = {"teacher": teacher, "distill": torch.empty(shape, device=meta)}
        gradient.clients(params, x, y, masks, out=out, weights=torch.empty(shape, device=meta), **learned)
    return alive.peak


class AliveBytes(TorchDispatchMode):
    """Counts the bytes of living tensors that were made inside; `peak` is the largest number at one time."""

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
