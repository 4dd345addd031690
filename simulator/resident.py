"""The batches of many clients as arrays `[c, B, ...]`, cut on the device from images that stay there as bytes.

Client i takes its own batches at steps 0 to n_i - 1, without gaps, in the order in which `train_locally` would draw
them. Clients are in falling order of n_i, so those that still train are always the first rows of everything, and
who has finished is simply no longer looked at. A batch smaller than its step's largest one is padded with copies of
its own first sample, of weight zero: padding can then be no worse a number than what it pads.

The generators are NumPy's on the host, whatever the device: a processor and an accelerator train on the same order
and under the same masks. What crosses to the device at a step is one row of sample numbers for each client, and the
dropout masks where a network has them. Both leave from pinned memory, so nobody waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hushfleet.data.samples import Samples
from hushfleet.spec import DropoutSpec
from hushfleet.training import draw_dropout, shuffled_batches


class ResidentSamples:
    """Images as uint8 and labels on `device`, kept from round to round for as long as their owner keeps them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: WeakKeyDictionary[Samples, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Images uint8 `[n, C, H, W]` and labels int64 `[n]`."""
        if samples not in self._held:
            self._held[samples] = _on(samples.images, self.device), _on(samples.labels, self.device)
        return self._held[samples]

    def keep_only(self, wanted: Collection[Samples]) -> None:
        """Forgets all others."""
        for samples in set(self._held) - set(wanted):
            del self._held[samples]


@dataclass(frozen=True)
class Batch:
    """One step of the clients that still train: the first `active` rows of their group.

    :param x: float32 `[active, B, C, H, W]`, normalised.
    :param y: int64 `[active, B]`.
    :param masks: dropout, float32 `[active, B, *shape]` each.
    :param sizes: int64 `[active]`, on the device: samples in each client's own batch.
    :param weights: float32 `[active, B]`, 1 for a sample and 0 for padding; None where nothing is padded.
    """

    active: int
    x: Tensor
    y: Tensor
    masks: tuple[Tensor, ...]
    sizes: Tensor
    weights: Tensor | None


class GroupBatches:
    """All steps of a group of clients; iterating draws from their generators, so it can be done once.

    :param samples: of each client, those with most batches first.
    :param rngs: of each client; draws the order of the samples and the dropout masks.
    """

    def __init__(
        self,
        samples: Sequence[Samples],
        rngs: Sequence[np.random.Generator],
        resident: ResidentSamples,
        *,
        batch_size: int,
        local_epochs: int,
        dropout: Sequence[DropoutSpec],
    ) -> None:
        self.batch_size, self.local_epochs, self.dropout = batch_size, local_epochs, dropout
        self.device = resident.device
        self.steps = [step_count(each, batch_size, local_epochs) for each in samples]
        if sorted(self.steps, reverse=True) != self.steps:
            raise ValueError(f"clients must come in falling order of their steps, got {self.steps}")
        images, labels = zip(*(resident.of(each) for each in samples), strict=True)
        self._images, self._labels = torch.cat(images), torch.cat(labels)
        self._firsts = np.cumsum([0] + [len(each) for each in samples])
        mean, std = (np.array([getattr(each, name) for each in samples]) for name in ("mean", "std"))
        # As Samples.x has it, to the bit.
        self._scale = _on((1 / (255 * std)).astype(np.float32)[:, None, :, None, None], self.device)
        self._shift = _on((mean / std).astype(np.float32)[:, None, :, None, None], self.device)
        self._draws = [self._draw(len(each), rng) for each, rng in zip(samples, rngs, strict=True)]

    def __iter__(self) -> Iterator[Batch]:
        active = len(self.steps)
        for step in range(self.steps[0]):
            while self.steps[active - 1] <= step:
                active -= 1
            yield self._batch([next(draws) for draws in self._draws[:active]])

    def _draw(self, count: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, ...]]]:
        for _ in range(self.local_epochs):
            for indices in shuffled_batches(count, self.batch_size, rng):
                yield indices, draw_dropout(self.dropout, len(indices), rng)

    def _batch(self, drawn: list[tuple[np.ndarray, tuple[np.ndarray, ...]]]) -> Batch:
        active, sizes = len(drawn), [len(indices) for indices, _ in drawn]
        width = max(sizes)
        # The last column is the size of the client's batch: one transfer for both.
        numbers = self._host((active, width + 1), torch.int64)
        table = numbers.numpy()
        for row, (indices, _) in enumerate(drawn):
            table[row, : len(indices)] = indices
            table[row, len(indices) : width] = indices[0]
            table[row] += self._firsts[row]
            table[row, width] = len(indices)
        placed = self._sent(numbers)
        chosen, placed_sizes = placed[:, :width].reshape(-1), placed[:, width]
        x = self._images.index_select(0, chosen).view(active, width, *self._images.shape[1:]).float()
        x *= self._scale[:active]
        x -= self._shift[:active]
        y = self._labels.index_select(0, chosen).view(active, width)
        weights = None
        if min(sizes) < width:
            weights = (torch.arange(width, device=self.device) < placed_sizes[:, None]).float()
        masks = tuple(self._mask(number, drawn, width) for number in range(len(self.dropout)))
        return Batch(active, x, y, masks, placed_sizes, weights)

    def _mask(self, number: int, drawn: list[tuple[np.ndarray, tuple[np.ndarray, ...]]], width: int) -> Tensor:
        host = self._host((len(drawn), width, *self.dropout[number].shape), torch.float32)
        rows = host.numpy()
        for row, (indices, masks) in enumerate(drawn):
            rows[row, : len(indices)] = masks[number]
            rows[row, len(indices) :] = 0
        return self._sent(host)

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Fresh at each step: a pinned block is used again only when its transfer is over, the allocator sees to it."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _sent(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)


def step_count(samples: Samples, batch_size: int, local_epochs: int) -> int:
    """How many batches a client trains on."""
    return -(-len(samples) // batch_size) * local_epochs


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    # PyTorch has no read-only tensors; nothing here writes to its inputs, but it warns.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
