"""One step's batches of many clients, as `hushfleet.gradients.batch.Batch` for arrays `[c, d]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hushfleet.gradients.batch import Batch
from hushfleet.gradients.entries import ALL, Entries
from hushfleet.models.torch_gradient import TorchGradient
from hushfleet.privacy.record import clipped_sum
from hushfleet.simulator.engines.fast.vmap.device_data import CohortStep
from hushfleet.simulator.engines.fast.vmap.replay import ReplayedGradient


@dataclass
class CohortBatch(Batch):
    """The raw gradients of the clients that still train.

    :param out: float32 `[c, d]`, where a gradient is written.
    :param scratch: rows for single samples' gradients, kept from step to step since fresh pages take time.
    """

    gradient: TorchGradient | ReplayedGradient
    step: CohortStep
    out: Tensor
    scratch: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> Tensor:
        return self.step.sizes

    def mean(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return self._gradient(params, slice(None), self.out, weights=self.step.weights)

    def each(self, params: Tensor) -> tuple[Tensor, Tensor]:
        clients, width = self.step.y.shape[:2]
        losses = params.new_zeros(clients, width)
        rows = self.scratch.get("each")
        if rows is None or rows.shape[1] < width:
            rows = self.scratch["each"] = params.new_empty(clients, width, params.shape[1])
        grads = rows[:clients, :width]
        for column, loss in enumerate(self._columns(params, list(grads.unbind(1)))):
            losses[:, column] = loss
        return losses, grads

    def clipped_sum(self, params: Tensor, clip_norm: float, out: Tensor, entries: Entries = ALL) -> Tensor:
        """Records one by one, so that memory does not grow with the batch."""
        losses = params.new_zeros(len(params))

        def gradients() -> Iterator[Tensor]:
            for loss in self._columns(params, [self.out] * self.step.y.shape[1]):
                losses.add_(loss)
                yield entries.alone(self.out)

        clipped_sum(gradients(), clip_norm, out)
        return losses / self.sizes.clamp(min=1)

    def _columns(self, params: Tensor, outs: Sequence[Tensor]) -> Iterator[Tensor]:
        """One sample of each client after the other: losses `[c]`, with gradients `[c, d]` in `outs`; zero for a client
        that has no more."""
        for column, out in enumerate(outs):
            loss, grad = self._gradient(params, slice(column, column + 1), out)
            if self.step.weights is not None:
                absent = self.step.weights[:, column] == 0
                loss = loss.masked_fill(absent, 0)
                grad.masked_fill_(absent[:, None], 0)
            yield loss

    def _gradient(
        self, params: Tensor, columns: slice, out: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        step, learned = self.step, {}
        if step.teacher is not None and step.distill is not None:
            learned = {"teacher": step.teacher[:, columns], "distill": step.distill[:, columns]}
        masks = tuple(mask[:, columns] for mask in step.masks)
        return self.gradient.clients(
            params, step.x[:, columns], step.y[:, columns], masks, out=out, weights=weights, **learned
        )
