"""The gradients of one batch of one client, as `hushfleet.methods.base.BatchGradient`: plain, and by DP-SGD."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hushfleet.errors import PrivacyError
from hushfleet.methods.base import Array
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism, clipped_sum
from hushfleet.training.parts import WHOLE, BoundOf, Part, mean_of_clipped

_EACH = "each"  # in a batch's memory: rows for single samples' gradients


class GradientFunction(Protocol):
    """The only place where a network is met: flat parameters and a batch give a loss and its flat gradient.

    `teacher` and `distill` are given where the task's objective distils: logits float32 `[B, C]`, and the weight of
    the distillation for each sample, float32 `[B]`.

    Two things are optional. A function with the attribute `takes_part = True` takes a slice `part`, and may leave the
    gradient of other entries at zero. `clipped_sum` sums clipped gradients; see `hushfleet.models.native`.
    """

    def __call__(
        self, params: Array, x: Any, y: Any, dropout: Sequence[Any] = (), out: Array | None = None, **distilled: Any
    ) -> tuple[float, Array]: ...


@dataclass
class Batch:
    """One batch of one client, whose gradients a method may have as they are."""

    gradient: GradientFunction
    x: np.ndarray
    y: np.ndarray
    masks: tuple[np.ndarray, ...]
    taught: dict[str, np.ndarray]
    buffer: np.ndarray
    memory: dict[str, Any] = field(default_factory=dict)
    part: Part = WHOLE

    @property
    def sizes(self) -> np.ndarray:
        return np.int64(len(self.y))

    def mean(self, params: Array) -> tuple[float, Array]:
        asked = {"part": self.part.span} if getattr(self.gradient, "takes_part", False) else {}
        return self.gradient(params, self.x, self.y, self.masks, out=self.buffer, **self.taught, **asked)

    def clipped(self, params: Array, bound_of: BoundOf) -> tuple[float, Array]:
        at_once = getattr(self.gradient, "clipped_sum", None)  # of a runtime that never writes single gradients out
        if at_once is None or not self.part.layers:
            losses, each = self.each(params)
            return float(losses.mean()), mean_of_clipped(each, self.sizes, bound_of, self.part, self.buffer)
        how = {"clip_norm": lambda norms: np.asarray(bound_of(norms)).item(), "part": self.part.span, **self.taught}
        losses, _ = at_once(params, self.x, self.y, self.masks, out=self.buffer, **how)
        self.buffer[self.part.span] /= len(self.y)
        return float(losses.mean()), self.buffer

    def each(self, params: Array) -> tuple[Array, Array]:
        rows = self.memory.get(_EACH)
        if rows is None or len(rows) < len(self.y):  # kept, since fresh pages take time
            rows = self.memory[_EACH] = np.empty((len(self.y), len(params)), params.dtype)
        out = rows[: len(self.y)]
        losses = np.array([loss for loss, _ in self.one_by_one(params, out)], np.float32)
        return losses, out

    def one_by_one(self, params: Array, out: Array | None = None) -> Iterator[tuple[float, Array]]:
        """Each sample's loss and gradient, in rows of `out` or in memory that the next one overwrites."""
        for i in range(len(self.y)):
            one = slice(i, i + 1)
            yield self.gradient(
                params,
                self.x[one],
                self.y[one],
                tuple(mask[one] for mask in self.masks),
                out=self.buffer if out is None else out[i],
                **{name: None if rows is None else rows[one] for name, rows in self.taught.items()},
            )


@dataclass
class RecordBatch:
    """A batch whose mean gradient is DP-SGD's. Raw gradients are not to be had.

    :param part: changes nothing: bound and noise are on the whole gradient.
    """

    batch: Batch
    record: RecordMechanism
    noise: NoiseSource
    part: Part = WHOLE
    taken: int = 0

    @property
    def memory(self) -> dict[str, Any]:
        return self.batch.memory

    @property
    def sizes(self) -> np.ndarray:
        return self.batch.sizes

    def mean(self, params: Array) -> tuple[float, Array]:
        self.taken += 1
        self.record.check_charged(self.taken)
        loss, total = self._clipped_batch(params) if self.record.clips == "batch" else self._clipped_sum(params)
        return loss, self.record.noised_mean(total, self.noise)

    def _clipped_batch(self, params: Array) -> tuple[float, Array]:
        if not len(self.batch.y):
            return 0.0, np.zeros_like(params)
        loss, mean = self.batch.mean(params)
        return loss, self.record.clipped_batch(mean)

    def _clipped_sum(self, params: Array) -> tuple[float, Array]:
        batch, total = self.batch, np.empty_like(params)
        at_once = getattr(batch.gradient, "clipped_sum", None)
        if at_once is not None:
            bound = self.record.clip_norm
            each, norms = at_once(params, batch.x, batch.y, batch.masks, clip_norm=bound, out=total, **batch.taught)
            if not np.isfinite(norms).all():
                raise PrivacyError("a record's gradient is not finite; training has diverged: lower the learning rate")
            return float(each.mean()) if len(each) else 0.0, total
        losses: list[float] = []

        def gradients() -> Iterator[Array]:
            for loss, gradient in batch.one_by_one(params):
                losses.append(loss)
                yield gradient

        clipped_sum(gradients(), self.record.clip_norm, total)
        return float(np.mean(losses)) if losses else 0.0, total

    def each(self, params: Array) -> tuple[Array, Array]:
        raise TypeError("with privacy unit 'record' a method sees noised gradients only")

    def clipped(self, params: Array, bound_of: BoundOf) -> tuple[float, Array]:
        raise TypeError("with privacy unit 'record' a method sees noised gradients only")
