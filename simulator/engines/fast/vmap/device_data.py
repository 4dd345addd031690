"""Makes the batches of many clients as arrays `[c, B, ...]`, cropped on the device from images kept there as bytes.

Client i takes its own batches at steps 0 to n_i - 1, without gaps, in the order in which one client alone would draw
them. Clients are in descending order of n_i, so the clients that still train are always the first rows, and the rows
of finished clients are ignored. A batch smaller than the largest one of its step is padded with copies of its own first
sample, of weight zero, so that padding cannot produce worse values (such as NaN) than the batch itself. Batches of the
privacy unit `record` may be empty, and are padded with the client's first sample.

The generators are NumPy's on the host for every device: a processor and an accelerator train with the same order, the
same crops and the same dropout masks. In each step, one row of sample numbers for each client is copied to the device,
the crop and flip of each image, and the dropout masks if the network has them. All copies start from pinned memory, so
nothing waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
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
    :param teacher: logits float32 `[active, B, classes]`, and `distill` `[active, B]`, 0 for a client without a
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
        active = len(self.steps)
        # Drawing dropout masks takes longer than training on an accelerator; NumPy lets other threads run meanwhile.
        threads = min(len(os.sched_getaffinity(0)), active) if self.inputs.dropout else 1
        with ThreadPoolExecutor(threads) if threads > 1 else nullcontext() as pool:
            for step in range(self.steps[0]):
                while self.steps[active - 1] <= step:
                    active -= 1
                yield self._batch(list((pool.map if pool else map)(next, self._draws[:active])))

    def _draw(self, count: int, rng: np.random.Generator) -> Iterator[_Drawn]:
        """Yields a client's batches in the order in which one client alone draws them."""
        for epoch, batches in enumerate(epochs(count, self.config, self.record)):
            for indices in drawn_batches(count, self.config.batch_size, batches, self.record, rng):
                crops = draw_flip_crop(len(indices), rng) if self.inputs.augment == "flip-crop" else None
                yield _Drawn(epoch, indices, crops, draw_dropout(self.inputs.dropout, len(indices), rng))

    def _teaching(
        self, samples: Sequence[LabelledSamples], teachers: Sequence[Teacher | None]
    ) -> tuple[Tensor, Tensor] | None:
        """Returns logits of all clients' samples `[n, classes]` and each client's weight `[c]`, on the device."""
        classes = next((each.logits.shape[1] for each in teachers if each is not None), None)
        if classes is None:
            return None
        pairs = list(zip(samples, teachers, strict=True))
        logits = [np.zeros((len(own), classes)) if each is None else each.logits for own, each in pairs]
        weights = np.array([0.0 if each is None else each.weight for _, each in pairs], np.float32)
        return _on(np.concatenate(logits).astype(np.float32), self.device), _on(weights, self.device)

    def _batch(self, drawn: list[_Drawn]) -> CohortStep:
        active, sizes = len(drawn), [len(each.indices) for each in drawn]
        width = max(sizes)
        # The last column is the size of the client's batch: one transfer for both.
        numbers = self._host((active, width + 1), torch.int64)
        table = numbers.numpy()
        for row, (_, indices, _, _) in enumerate(drawn):
            table[row, : len(indices)] = indices
            table[row, len(indices) : width] = indices[0] if len(indices) else 0
            table[row] += self._firsts[row]
            table[row, width] = len(indices)
        placed = self._sent(numbers)
        chosen, placed_sizes = placed[:, :width].reshape(-1), placed[:, width]
        images = self._images.index_select(0, chosen).view(active, width, *self._images.shape[1:])
        if self.inputs.augment == "flip-crop":
            images = _cut(images, self._crops(drawn, width))
        x = images.float()
        x *= self._scale[:active]
        x -= self._shift[:active]
        y = self._labels.index_select(0, chosen).view(active, width, *self._labels.shape[1:])
        weights = None
        if min(sizes) < width:
            weights = (torch.arange(width, device=self.device) < placed_sizes[:, None]).float()
        masks = tuple(self._mask(number, drawn, width) for number in range(len(self.inputs.dropout)))
        teacher = distill = None
        if self._teachers is not None:
            logits, shares = self._teachers
            teacher = logits.index_select(0, chosen).view(active, width, -1) if width else None
            distill = shares[:active, None].expand(active, width) if width else None
        return CohortStep(active, drawn[0].epoch, x, y, masks, placed_sizes, weights, teacher, distill)

    def _crops(self, drawn: list[_Drawn], width: int) -> Tensor:
        """Returns int64 `[active, width, 3]`: row and column of each crop, and 1 if it is mirrored. Padding has the
        crop of the sample that it copies."""
        host = self._host((len(drawn), width, 3), torch.int64)
        table = host.numpy()
        for row, (_, indices, crops, _) in enumerate(drawn):
            assert crops is not None
            offsets, flips = crops
            table[row, : len(indices), :2] = offsets
            table[row, : len(indices), 2] = flips
            table[row, len(indices) :] = table[row, 0] if len(indices) else (PADDING, PADDING, 0)
        return self._sent(host)

    def _mask(self, number: int, drawn: list[_Drawn], width: int) -> Tensor:
        host = self._host((len(drawn), width, *self.inputs.dropout[number].shape), torch.float32)
        rows = host.numpy()
        for row, (_, indices, _, masks) in enumerate(drawn):
            rows[row, : len(indices)] = masks[number]
            rows[row, len(indices) :] = 0
        return self._sent(host)

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns new host memory for a step: the allocator reuses a pinned block only after its transfer has ended."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _sent(self, host: Tensor) -> Tensor:
        return host.to(self.device, non_blocking=True)


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
