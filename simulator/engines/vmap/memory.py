"""What a client costs in memory when many are trained at once, counted before anything of that size is allocated.

Two parts: vectors of length d, which are known, and what the network's forward and backward pass hold at their peak,
which is counted. The count runs the pass of two clients on PyTorch's meta device (shapes without numbers) and follows
every tensor from its making to its end. Scratch space inside a kernel is not seen by it; the share of the memory that
is left free is for that.

What a method asks of a batch (the gradients of single samples, arrays that it keeps from batch to batch) is found by
asking it once, with vectors of zeros in place of gradients.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hushfleet.config.spec import DropoutSpec
from hushfleet.methods.base import DeviceState, Method
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.record import RecordMechanism
from hushfleet.training.parts import WHOLE, BoundOf, Part, mean_of_clipped

FLOAT_BYTES = 4

# Parameters, where they started, gradient, the device's own model, and three temporaries of method and optimizer.
VECTORS = 7
MOMENTS = {"adam": 2, "sgd": 0}

# With privacy unit `record`: one record's gradient, and that clipped.
RECORD_VECTORS = 2

# Of each sample, where a method asks for single gradients: its gradient, and what the method makes of it.
SAMPLE_VECTORS = 2

COMPANION_VECTORS = 2  # what the first training ended with, and the global vector

CROP_BYTES = 40  # for each pixel of one channel: where it comes from and whether it is in the image, in several steps


class Asked(NamedTuple):
    """:param each: whether a method takes gradients of single samples.
    :param kept_bytes: what it keeps from batch to batch.
    :param companion: whether there is a second training.
    """

    each: bool = False
    kept_bytes: int = 0
    companion: bool = False


NOTHING = Asked()


def bytes_per_client(
    gradient: TorchGradient,
    *,
    batch_size: int,
    dropout: tuple[DropoutSpec, ...],
    optimizer: str,
    passes: int,
    image_bytes: int,
    samples: int = 0,
    momentum: bool = False,
    asked: Asked = NOTHING,
    record: RecordMechanism | None = None,
    augments: bool = False,
) -> int:
    """Peak bytes that one more client adds to a group.

    :param passes: optimizers of each client (`Method.passes`).
    :param image_bytes: the largest client's images; they are held twice, as kept and as joined for the group.
    :param samples: how many it has.
    :param record: of the privacy unit `record`: records go through the network one by one unless batches are clipped,
        and a batch may be larger than the mean, by as much as hardly ever happens.
    """
    size, model = gradient.layout.size, gradient.model
    channels, height, width = model.input_shape
    vectors = VECTORS + passes * (MOMENTS[optimizer] + momentum) + COMPANION_VECTORS * asked.companion
    beside = 0
    if record is not None:
        vectors += RECORD_VECTORS
        batch_size = min(samples, _most_drawn(samples, record.sample_rate))
        beside += batch_size * FLOAT_BYTES * channels * height * width
        beside += batch_size * FLOAT_BYTES * sum(int(np.prod(spec.shape)) for spec in dropout)
    elif asked.each:
        vectors += SAMPLE_VECTORS * batch_size
    if gradient.objective.distills:
        beside += FLOAT_BYTES * model.classes * samples
    if augments:
        beside += CROP_BYTES * batch_size * height * width
    # Two, since vmap takes short cuts with one.
    at_once = 1 if record is not None and record.clips == "record" else batch_size
    network = pass_bytes(gradient, 2, batch_size=at_once, dropout=dropout) // 2
    # 1: the mask of bools
    return size * (FLOAT_BYTES * vectors + 1) + network + beside + asked.kept_bytes + 2 * image_bytes


def what_is_asked(method: Method, state: DeviceState, global_params: np.ndarray) -> Asked:
    """What the method's `gradient` needs beside the vectors that all have.

    :param state: after `prepare`.
    """
    start = method.start(state, global_params)
    probe = _Probe(raw=method.privacy.unit != "record")
    with np.errstate(all="ignore"):  # zeros are divided by each other
        method.gradient(state, start, start.copy(), probe)
    kept = sum(leaf.nbytes for leaf in tree_leaves(probe.memory) if isinstance(leaf, np.ndarray))
    return Asked(probe.asked_each, kept, method.companion is not None)


@dataclass
class _Probe:
    """A batch of one sample, as `hushfleet.methods.base.BatchGradient`, with gradients of zero."""

    raw: bool
    memory: dict[str, Any] = field(default_factory=dict)
    asked_each: bool = False
    part: Part = WHOLE

    @property
    def sizes(self) -> np.ndarray:
        return np.int64(1)

    def mean(self, params: np.ndarray) -> tuple[float, np.ndarray]:
        return 0.0, np.zeros_like(params)

    def each(self, params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.raw:
            raise TypeError("with privacy unit 'record' a method sees noised gradients only")
        self.asked_each = True
        return np.zeros(1, np.float32), np.zeros((1, len(params)), params.dtype)

    def clipped(self, params: np.ndarray, bound_of: BoundOf) -> tuple[float, np.ndarray]:
        losses, each = self.each(params)
        return float(losses.sum()), mean_of_clipped(each, self.sizes, bound_of, self.part, np.empty_like(params))


def _most_drawn(samples: int, rate: float) -> int:
    mean = samples * rate
    return int(np.ceil(mean + 6 * np.sqrt(mean * (1 - rate)) + 1))


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
        taught = {}
        if gradient.objective.distills:
            teacher = torch.empty(*shape, gradient.model.classes, device=meta)
            taught = {"teacher": teacher, "distill": torch.empty(shape, device=meta)}
        gradient.clients(params, x, y, masks, out=out, weights=torch.empty(shape, device=meta), **taught)
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
