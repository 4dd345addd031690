"""Implements `hushfleet.learning.batch.Batch` for arrays `[c, d]`: one step's batches of many clients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from hushfleet.learning.batch import Batch
from hushfleet.learning.entries import ALL, Entries
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.clipping import clipped_sum
from hushfleet.simulator.engines.fast.vmap.device_data import CohortStep
from hushfleet.simulator.engines.fast.vmap.replay import ReplayedGradient


@dataclass
class CohortBatch(Batch):
    """The raw gradients of the clients that still train.

    :param single: computes gradients of single samples.
    :param at_once: samples of each client that `single` computes in one pass.
    :param out: float32 `[c, d]`; a gradient is written to it.
    :param scratch: rows for single samples' gradients, reused in each step because fresh pages take time.
    """

    gradient: TorchGradient | ReplayedGradient
    single: TorchGradient
    at_once: int
    step: CohortStep
    out: Tensor
    scratch: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> Tensor:
        return self.step.sizes

    def mean(self, params: Tensor) -> tuple[Tensor, Tensor]:
        step = self.step
        return self.gradient.clients(
            params, step.x, step.y, step.masks, out=self.out, weights=step.weights, **self._learned(slice(None))
        )

    def each(self, params: Tensor) -> tuple[Tensor, Tensor]:
        width = self.step.y.shape[1]
        losses, grads = params.new_empty(len(params), width), self._rows(params, width)
        for columns in self._columns():
            losses[:, columns] = self._some(params, columns, grads[:, columns])
        return losses, grads

    def clipped_sum(self, params: Tensor, clip_norm: float, out: Tensor, entries: Entries = ALL) -> Tensor:
        """Sums a few clipped records at a time, so that memory does not grow with the batch."""
        losses = params.new_zeros(len(params))

        def gradients() -> Iterator[Tensor]:
            for columns in self._columns():
                some = self._rows(params, columns.stop - columns.start)
                losses.add_(self._some(params, columns, some).sum(1))
                for each in some.unbind(1):
                    entries.alone(each)
                yield some

        clipped_sum(gradients(), clip_norm, out)
        return losses / self.sizes.clamp(min=1)

    def _rows(self, params: Tensor, width: int) -> Tensor:
        """Returns memory for gradients `[c, width, d]`."""
        rows = self.scratch.get("each")
        if rows is None or rows.shape[1] < width:
            rows = self.scratch["each"] = params.new_empty(len(params), width, params.shape[1])
        return rows[: len(params), :width]

    def _columns(self) -> Iterator[slice]:
        width = self.step.y.shape[1]
        for first in range(0, width, self.at_once):
            yield slice(first, min(first + self.at_once, width))

    def _some(self, params: Tensor, columns: slice, out: Tensor) -> Tensor:
        """Returns losses `[c, k]` of some samples of each client, and writes gradients `[c, k, d]` to `out`; both are
        zero for padding."""
        step = self.step
        masks = [mask[:, columns] for mask in step.masks]
        losses, _ = self.single.records(
            params, step.x[:, columns], step.y[:, columns], masks, out, **self._learned(columns)
        )
        if step.weights is None:
            return losses
        absent = step.weights[:, columns] == 0
        out.masked_fill_(absent[..., None], 0)
        return losses.masked_fill(absent, 0)

    def _learned(self, columns: slice) -> dict[str, Tensor]:
        step = self.step
        if step.teacher is None or step.distill is None:
            return {}
        return {"teacher": step.teacher[:, columns], "distill": step.distill[:, columns]}
