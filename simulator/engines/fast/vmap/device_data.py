"""Makes the batches of many clients as arrays `[c, B, ...]`, cropped on the device from images kept there as bytes.

Client i takes its own batches at steps 0 to n_i - 1, without gaps, in the order in which one client alone would draw
them. Clients are in descending order of n_i, so the clients that still train are always the first rows, and the rows
of finished clients are ignored. A batch smaller than the largest one of its step is padded with copies of its own first
sample, of weight zero, so that padding cannot produce worse values (such as NaN) than the batch itself. Batches of the
privacy unit `record` may be empty, and are padded with the client's first sample.

The generators are NumPy's on the host for every device: a processor and an accelerator train with the same order, the
same crops and the same dropout masks. All steps of a round are drawn ahead and copied to the device in one table, with
the crop and flip of each image; with dropout masks, as many steps as these leave room for. All copies start from pinned
memory, so nothing waits for them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hushfleet.data.augment import PADDING, draw_flip_crop
from hushfleet.data.samples import LabelledSamples
from hushfleet.learning.draws import Inputs, draw_dropout, drawn_batches, epochs
from hushfleet.learning.own_samples import Teacher
from hushfleet.methods.method import TrainingConfig
from hushfleet.privacy.record import RecordMechanism

AHEAD_BYTES = 1 << 26
"""Most bytes of dropout masks that are drawn ahead."""


class SamplesOnDevice:
    """Keeps samples and labels on `device`, for as long as their owner keeps them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: WeakKeyDictionary[LabelledSamples, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, samples: LabelledSamples) -> tuple[Tensor, Tensor]:
        """Returns images uint8 `[n, C, H, W]`, or features float32, and labels int64 `[n]` or targets float32."""
        if samples not in self._held:
            self._held[samples] = _on(samples.kept, self.device), _on(samples.y, self.device)
        return self._held[samples]

    def keep_only(self, wanted: Collection[LabelledSamples]) -> None:
        """Drops all other samples from the device."""
        for samples in set(self._held) - set(wanted):
            del self._held[samples]


@dataclass(frozen=True)
class CohortStep:
    """One step of the clients that still train: the first `active` rows of their group.

    :param epoch: epoch of the first client; others may be in another one.
    :param x: float32 `[active, B, C, H, W]`, augmented and normalised.
    :param y: int64 `[active, B]`, or float32 `[active, B, outputs]`.
    :param masks: dropout, float32 `[active, B, *shape]` each.
    :param sizes: int64 `[active]`, on the device: samples in each client's own batch.
    :param weights: float32 `[active, B]`, 1 for a sample and 0 for padding; None without padding.
    :param teacher: its values float32 `[active, B, ...]`, and `distill` `[active, B]`, 0 for a client without a
        teacher; None if no client has one.
    """

    active: int
    epoch: int
    x: Tensor
    y: Tensor
    masks: tuple[Tensor, ...]
    sizes: Tensor
    weights: Tensor | None
    teacher: Tensor | None = None
    distill: Tensor | None = None


class _Drawn(NamedTuple):
    """A client's batch: sample numbers, offsets and flips (None: images unchanged), dropout masks."""

    epoch: int
    indices: np.ndarray
    crops: tuple[np.ndarray, np.ndarray] | None
    masks: tuple[np.ndarray, ...]


class GroupBatches:
    """All steps of a group of clients; it can be iterated only once, because iterating draws from the generators.

    :param samples: samples of each client; clients with most batches first.
    :param rngs: generator of each client for its batches, the augmentation and the dropout masks.
    :param record: mechanism for the privacy unit `record`; its noise is not used here.
    :param teachers: teacher of each client; empty without any.
    """

    def __init__(
        self,
        samples: Sequence[LabelledSamples],
        rngs: Sequence[np.random.Generator],
        on_device: SamplesOnDevice,
        *,
        config: TrainingConfig,
        inputs: Inputs,
        record: RecordMechanism | None = None,
        teachers: Sequence[Teacher | None] = (),
    ) -> None:
        self.config, self.inputs, self.record = config, inputs, record
        self.device = on_device.device
        self.steps = [step_count(len(each), config, record) for each in samples]
        if sorted(self.steps, reverse=True) != self.steps:
            raise ValueError(f"clients must come in falling order of their steps, got {self.steps}")
        images, labels = zip(*(on_device.of(each) for each in samples), strict=True)
        self._images, self._labels = torch.cat(images), torch.cat(labels)
        self._firsts = np.cumsum([0] + [len(each) for each in samples])
        # The same bits as Samples.x.
        self._scale = _on(np.stack([each.scale for each in samples])[:, None, :, None, None], self.device)
        self._shift = _on(np.stack([each.shift for each in samples])[:, None, :, None, None], self.device)
        self._teachers = self._teaching(samples, teachers)
        self._draws = [self._draw(len(each), rng) for each, rng in zip(samples, rngs, strict=True)]

    def __iter__(self) -> Iterator[CohortStep]:
        steps, config = self.steps[0], self.config
        values = sum(math.prod(spec.shape) for spec in self.inputs.dropout)
        ahead = max(1, AHEAD_BYTES // max(1, 4 * values * config.step_size * len(self.steps)))
        # Drawing dropout masks takes longer than training on an accelerator; NumPy lets other threads run meanwhile.
        threads = min(len(os.sched_getaffinity(0)), len(self.steps)) if values else 1
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
            for first in range(0, steps, ahead):
                part = range(first, min(first + ahead, steps))
                taken = [max(0, min(own, part.stop) - first) for own in self.steps]
                drawn = list((pool.map if pool else map)(_taken, self._draws, taken))
                yield from self._placed([row for row in drawn if row], len(part))

    def _draw(self, count: int, rng: np.random.Generator) -> Iterator[_Drawn]:
        """Yields a client's batches in the order in which one client alone draws them."""
        for epoch, batches in enumerate(epochs(count, self.config, self.record)):
            for indices in drawn_batches(count, self.config.step_size, batches, self.record, rng):
                crops = draw_flip_crop(len(indices), rng) if self.inputs.augment == "flip-crop" else None
                yield _Drawn(epoch, indices, crops, draw_dropout(self.inputs.dropout, len(indices), rng))

    def _teaching(
        self, samples: Sequence[LabelledSamples], teachers: Sequence[Teacher | None]
    ) -> tuple[Tensor, Tensor] | None:
        """Returns the teachers' values `[n, ...]` of all clients' samples and each client's weight `[c]`, there."""
        values = next((each.logits.shape[1] for each in teachers if each is not None), None)
        if values is None:
            return None
        pairs = list(zip(samples, teachers, strict=True))
        logits = [np.zeros((len(own), values)) if each is None else each.logits for own, each in pairs]
        weights = np.array([0.0 if each is None else each.weight for _, each in pairs], np.float32)
        return _on(np.concatenate(logits).astype(np.float32), self.device), _on(weights, self.device)

    def _placed(self, drawn: list[list[_Drawn]], steps: int) -> Iterator[CohortStep]:
        """Yields some steps; `drawn` has the batches of each client that still trains, one for each step of its own."""
        sizes = np.zeros((steps, len(drawn)), np.int32)
        for row, batches in enumerate(drawn):
            sizes[: len(batches), row] = [len(batch.indices) for batch in batches]
        width, crops = int(sizes.max(initial=0)), self.inputs.augment == "flip-crop"
        # One transfer for all: of each client's batch its size, sample numbers, and if they are cropped, three more.
        table = self._host((*sizes.shape, 1 + width * (4 if crops else 1)), torch.int32)
        masks = [self._host((*sizes.shape, width, *spec.shape), torch.float32) for spec in self.inputs.dropout]
        places, own_masks = table.numpy(), [mask.numpy() for mask in masks]
        places[..., 0] = sizes
        for row, batches in enumerate(drawn):
            for step, batch in enumerate(batches):
                _fill(places[step, row, 1:], batch, self._firsts[row], width)
                for place, mask in zip(own_masks, batch.masks, strict=True):
                    place[step, row, : len(mask)] = mask
                    place[step, row, len(mask) :] = 0
        on_device, masks_there = self._sent(table), [self._sent(mask) for mask in masks]
        for step, own in enumerate(sizes):
            active = sum(len(batches) > step for batches in drawn)
            rows = on_device[step, :active]
            drawn_masks = [mask[step, :active] for mask in masks_there]
            yield self._batch(drawn[0][step].epoch, own[:active], rows, drawn_masks, width)

    def _batch(
        self, epoch: int, sizes: np.ndarray, placed: Tensor, drawn_masks: Sequence[Tensor], widest: int
    ) -> CohortStep:
        """Gathers the images of a step; `placed` are the rows of `_placed`'s table, for batches of `widest`."""
        active, width = len(sizes), int(sizes.max())
        chosen, placed_sizes = placed[:, 1 : 1 + width].reshape(-1), placed[:, 0].long()
        images = self._images.index_select(0, chosen).view(active, width, *self._images.shape[1:])
        if self.inputs.augment == "flip-crop":
            images = _cut(images, placed[:, 1 + widest :].view(active, widest, 3)[:, :width])
        x = images.float()
        x *= self._scale[:active]
        x -= self._shift[:active]
        y = self._labels.index_select(0, chosen).view(active, width, *self._labels.shape[1:])
        weights = None
        if sizes.min() < width:
            weights = (torch.arange(width, device=self.device) < placed_sizes[:, None]).float()
        masks = tuple(mask[:, :width] for mask in drawn_masks)
        teacher = distill = None
        if self._teachers is not None:
            logits, shares = self._teachers
            teacher = logits.index_select(0, chosen).view(active, width, -1) if width else None
            distill = shares[:active, None].expand(active, width) if width else None
        return CohortStep(active, epoch, x, y, masks, placed_sizes, weights, teacher, distill)

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns new host memory: the allocator reuses a pinned block only after its transfer has ended."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _sent(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)


def _taken(draw: Iterator[_Drawn], count: int) -> list[_Drawn]:
    return list(islice(draw, count))


def _fill(places: np.ndarray, batch: _Drawn, first: int, width: int) -> None:
    """Writes sample numbers int32 `[width]`, and after them row, column and mirroring of each crop `[width, 3]`.

    Padding is the batch's first sample with its crop, or the client's first sample in the middle.
    """
    size = len(batch.indices)
    places[:size] = batch.indices
    places[size:width] = batch.indices[0] if size else 0
    places[:width] += first
    if batch.crops is not None:
        crops = places[width:].reshape(width, 3)
        crops[:size, :2], crops[:size, 2] = batch.crops
        crops[size:] = crops[0] if size else (PADDING, PADDING, 0)


def step_count(samples: int, config: TrainingConfig, record: RecordMechanism | None = None) -> int:
    """Returns the number of batches on which a client with `samples` samples trains."""
    return sum(epochs(samples, config, record))


def _cut(images: Tensor, crops: Tensor) -> Tensor:
    """Does `hushfleet.data.augment.apply_flip_crop` for bytes `[c, B, C, H, W]`, black is 0, with `crops [c, B, 3]`."""
    height, width = images.shape[3:]
    row, column, flip = (crops[..., i, None, None] for i in range(3))
    device = images.device
    rows = torch.arange(height, device=device)[:, None] + (row - PADDING)
    columns = torch.arange(width, device=device)
    columns = torch.where(flip == 1, width - 1 - columns, columns) + (column - PADDING)
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)  # [c, B, H, W]
    places = torch.where(inside, rows * width + columns, 0)[:, :, None].expand(images.shape)
    taken = images.flatten(3).gather(3, places.flatten(3)).view(images.shape)
    return taken * inside[:, :, None]


def _on(array: np.ndarray, device: torch.device) -> Tensor:
    # PyTorch has no read-only tensors and would warn, although nothing here writes to its inputs.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
