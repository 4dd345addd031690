"""One step's batches of many clients, as `hushfleet.methods.base.BatchGradient` for arrays `[c, d]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism, clipped_sum
from hushfleet.simulator.engines.vmap.device_data import Batch
from hushfleet.training.parts import WHOLE, BoundOf, Part, mean_of_clipped

_EACH = "each"  # in a batch's memory: rows for single samples' gradients


@dataclass
class CohortBatch:
    """The raw gradients of the clients that still train.

    :param out: float32 `[c, d]`, where a mean gradient is written.
    :param memory: of this local training; see `first_rows` for what becomes of it when a client has finished.
    :param reduced: the network computes in bfloat16.
    """

    gradient: TorchGradient
    batch: Batch
    out: Tensor
    memory: dict[str, Any] = field(default_factory=dict)
    reduced: bool = False
    part: Part = WHOLE

    @property
    def sizes(self) -> Tensor:
        return self.batch.sizes

    def mean(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return self._gradient(params, slice(None), self.out, weights=self.batch.weights)

    def each(self, params: Tensor) -> tuple[Tensor, Tensor]:
        clients, width = self.batch.y.shape
        losses = params.new_zeros(clients, width)
        rows = self.memory.get(_EACH)
        if rows is None or rows.shape[1] < width:  # kept, since fresh pages take time
            rows = self.memory[_EACH] = params.new_empty(clients, width, params.shape[1])
        grads = rows[:, :width]
        for column, loss in enumerate(self._columns(params, list(grads.unbind(1)))):
            losses[:, column] = loss
        return losses, grads

    def clipped(self, params: Tensor, bound_of: BoundOf) -> tuple[Tensor, Tensor]:
        losses, each = self.each(params)
        return losses.sum(1) / self.sizes, mean_of_clipped(each, self.sizes, bound_of, self.part, self.out)

    def one_by_one(self, params: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """One sample of each client after the other: losses `[c]` and gradients `[c, d]` in `out`, which the next
        overwrites; zero for a client that has no more."""
        for loss in self._columns(params, [out] * self.batch.y.shape[1]):
            yield loss, out

    def _columns(self, params: Tensor, outs: Sequence[Tensor]) -> Iterator[Tensor]:
        for column, out in enumerate(outs):
            loss, grad = self._gradient(params, slice(column, column + 1), out)
            if self.batch.weights is not None:
                absent = self.batch.weights[:, column] == 0
                loss = loss.masked_fill(absent, 0)
                grad.masked_fill_(absent[:, None], 0)
            yield loss

    def _gradient(
        self, params: Tensor, columns: slice, out: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        batch, taught = self.batch, {}
        if batch.teacher is not None:
            taught = {"teacher": batch.teacher[:, columns], "distill": batch.distill[:, columns]}
        masks = tuple(mask[:, columns] for mask in batch.masks)
        with self._precision():
            return self.gradient.clients(
                params, batch.x[:, columns], batch.y[:, columns], masks, out=out, weights=weights, **taught
            )

    def _precision(self) -> AbstractContextManager:
        return torch.autocast(self.out.device.type, torch.bfloat16) if self.reduced else nullcontext()


@dataclass
class CohortRecordBatch:
    """DP-SGD's mean gradients: records one by one, so that memory does not grow with the batch.

    :param mechanisms: of each client; they differ in nothing but the noise.
    :param noises: of each client.
    :param scratch: float32 `[c, d]`.
    :param part: changes nothing: bound and noise are on the whole gradient.
    """

    batch: CohortBatch
    mechanisms: Sequence[RecordMechanism]
    noises: Sequence[NoiseSource]
    scratch: Tensor
    part: Part = WHOLE
    taken: int = 0

    @property
    def memory(self) -> dict[str, Any]:
        return self.batch.memory

    @property
    def sizes(self) -> Tensor:
        return self.batch.sizes

    def mean(self, params: Tensor) -> tuple[Tensor, Tensor]:
        self.taken += 1
        self.mechanisms[0].check_charged(self.taken)
        by_batch = self.mechanisms[0].clips == "batch"
        losses, total = self._clipped_batch(params) if by_batch else self._clipped_sum(params)
        for row, (mechanism, noise) in enumerate(zip(self.mechanisms, self.noises, strict=True)):
            mechanism.noised_mean(total[row], noise)  # in place
        return losses, total

    def _clipped_batch(self, params: Tensor) -> tuple[Tensor, Tensor]:
        if not self.batch.batch.y.shape[1]:
            return params.new_zeros(len(params)), self.batch.out.zero_()
        empty = self.sizes == 0
        losses, mean = self.batch.mean(params)  # of nothing it is not a number
        mean.masked_fill_(empty[:, None], 0)
        return losses.masked_fill(empty, 0), self.mechanisms[0].clipped_batch(mean)

    def _clipped_sum(self, params: Tensor) -> tuple[Tensor, Tensor]:
        losses = params.new_zeros(len(params))

        def gradients() -> Iterator[Tensor]:
            for loss, gradient in self.batch.one_by_one(params, self.scratch):
                losses.add_(loss)
                yield gradient

        total = clipped_sum(gradients(), self.mechanisms[0].clip_norm, self.batch.out)
        return losses / self.sizes.clamp(min=1), total

    def each(self, params: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("with privacy unit 'record' a method sees noised gradients only")

    def clipped(self, params: Tensor, bound_of: BoundOf) -> tuple[Tensor, Tensor]:
        raise TypeError("with privacy unit 'record' a method sees noised gradients only")


def first_rows(memory: dict[str, Any], count: int) -> dict[str, Any]:
    """What a method keeps, without the clients that have finished, which are the last rows of every array.

    Tensors are cut wherever they are, in tuples and dicts too; they become views, so what is written to them stays. A
    tensor without axes and anything that is no tensor is left as it is: it must mean the same for all clients.
    """
    return tree_map_only(Tensor, lambda tensor: tensor[:count] if tensor.ndim else tensor, memory)
