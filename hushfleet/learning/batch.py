"""Computes the gradients of one batch: plain, clipped per sample, or by DP-SGD; for one client, or for many at once.

A method uses the interface `Batch`. Each trainer computes gradients in its own class: `ClientBatch` here,
`hushfleet.simulator.engines.fast.vmap.batch.CohortBatch` for many clients as `[c, d]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from hushfleet.array_api import Array
from hushfleet.data.samples import LabelledSamples
from hushfleet.errors import GraphRefused
from hushfleet.learning.entries import ALL, BoundOf, Entries, mean_of_clipped
from hushfleet.privacy.clipping import can_clip, clipped_sum
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import RecordMechanism


class GradientFunction(Protocol):
    """The only interface to a network: flat parameters and a batch give a loss and its flat gradient.

    `teacher` and `distill` are given if the task's objective distils: the teacher's values float32 `[B, ...]`
    (`Objective.teacher_values`), and the weight of the distillation for each sample, float32 `[B]`.

    Four things are optional. A function with the attribute `takes_part = True` takes a slice `part`, and may leave the
    gradient of other entries at zero. `clipped_sum` sums clipped gradients, into float32 or float64; `squared_sum` sums
    squared gradients; `descend` does all steps of a `Descent` at once; see `hushfleet.models.native`.
    """

    def __call__(
        self,
        params: Array,
        x: Any,
        y: Any,
        dropout: Sequence[Any] = (),
        out: Array | None = None,
        teacher: Array | None = None,
        distill: Array | None = None,
    ) -> tuple[float, Array]: ...


class Descent(NamedTuple):
    """All steps of one client's training by plain gradients of the cross-entropy, without dropout.

    :param batches: the places of each batch's samples, int64 `[b]` each; not empty.
    :param active: the numbers of the parts that each batch trains, one after the other; not empty.
    :param parts: the entries that each part moves, by an optimizer of its own.
    :param optimizer: name, learning rate and momentum.
    :param pulls: the weights of pulls to `center`, float32 `[d]`.
    """

    samples: LabelledSamples
    batches: Sequence[np.ndarray]
    active: Sequence[Sequence[int]]
    parts: Sequence[Entries]
    optimizer: tuple[str, float, float]
    pulls: Sequence[float]
    center: np.ndarray


class Batch:
    """The objective's gradient on one batch, at the points that a method chooses. Losses are `[...]`, one per client.

    :param out: float32 `[..., d]`, where a gradient is written; the next gradient overwrites it.
    :param part: the number of the part of the training that uses the gradient.
    :param entries: the entries that this part will move. Gradients of other entries may be left at zero.
    :param moved: the entries that all parts of the training move.
    """

    out: Array
    part: int = 0
    entries: Entries = ALL
    moved: Entries = ALL

    @property
    def sizes(self) -> Array:
        """Number of samples in the batch, `[...]`."""
        raise NotImplementedError

    def mean(self, params: Array) -> tuple[Any, Array]:
        """Returns the mean loss and its gradient `[..., d]`. With privacy unit `record` the gradient is clipped per
        record and noised, and each call is charged."""
        raise NotImplementedError

    def each(self, params: Array) -> tuple[Array, Array]:
        """Returns each sample's loss `[..., B]` and raw gradient `[..., B, d]`; padding has loss and gradient zero."""
        raise NotImplementedError

    def clipped(self, params: Array, bound_of: float | BoundOf, normed: Entries) -> tuple[Any, Array]:
        """Returns the mean loss and the mean of gradients that are clipped one by one, without noise, as in `each`.

        :param bound_of: the clip norm; or a function that is called once, with the norms `[..., B]` of each sample's
            gradient (0 for padding), and returns the clip norm, a number or `[..., 1]`.
        :param normed: the entries whose norms are taken; they include `entries`.
        """
        losses, each = self.each(params)
        return losses.sum(-1) / self.sizes, mean_of_clipped(each, self.sizes, bound_of, normed, self.out)

    # used by DP-SGD on a plain batch

    def clipped_sum(self, params: Array, clip_norm: float, out: Array, entries: Entries) -> Any:
        """Writes the sum of single gradients on `entries`, each clipped, into `out`, float64 `[..., d]`; zeros
        elsewhere. Returns mean losses `[...]`, 0 for an empty batch."""
        raise NotImplementedError


@dataclass
class ClientBatch(Batch):
    """One batch of one client.

    :param distillation: the arguments of a distilling objective, see `distillation_inputs`.
    :param scratch: rows for single samples' gradients, kept from batch to batch because new memory pages take time.
    :param failures: with the unit `record`, why the first record without a gradient has none.
    :param subsets: the records that are clipped together, by their mean gradient; empty: each record alone.
    :param at_once: the largest number of samples of which a mean gradient is computed in one pass; 0: of all.
    """

    gradient: GradientFunction
    x: np.ndarray
    y: np.ndarray
    masks: tuple[np.ndarray, ...]
    distillation: dict[str, Any]
    out: np.ndarray
    scratch: dict[str, np.ndarray] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    subsets: Sequence[np.ndarray] = ()
    at_once: int = 0

    @property
    def sizes(self) -> Array:
        return np.int64(len(self.y))

    def mean(self, params: Array) -> tuple[float, Array]:
        if 0 < self.at_once < len(self.y):
            return self._accumulated(params), self.out
        asked: dict[str, Any] = {"part": self.entries.span} if getattr(self.gradient, "takes_part", False) else {}
        return self.gradient(params, self.x, self.y, self.masks, out=self.out, **self.distillation, **asked)

    def _accumulated(self, params: Array) -> float:
        """Computes the mean gradient in parts, into `out`; returns the mean loss."""
        mean, part = 0.0, self.scratch.setdefault("part", np.empty_like(self.out))
        for first in range(0, len(self.y), self.at_once):
            rows = slice(first, min(first + self.at_once, len(self.y)))
            loss, gradient = self._some(params, rows, part if first else self.out)
            share = (rows.stop - first) / len(self.y)
            mean += share * loss
            gradient *= share
            if first:
                self.out += gradient
        return mean

    def each(self, params: Array) -> tuple[Array, Array]:
        rows = self.scratch.get("each")
        if rows is None or len(rows) < len(self.y):
            rows = self.scratch["each"] = np.empty((len(self.y), len(params)), params.dtype)
        out = rows[: len(self.y)]
        return np.array([self._some(params, slice(i, i + 1), out[i])[0] for i in range(len(out))], np.float32), out

    def clipped(self, params: Array, bound_of: float | BoundOf, normed: Entries) -> tuple[float, Array]:
        at_once = getattr(self.gradient, "clipped_sum", None)  # a runtime that never stores single gradients
        if at_once is None or not normed.layers:
            losses, each = self.each(params)
            return float(losses.mean()), mean_of_clipped(each, self.sizes, bound_of, normed, self.out)
        clip_norm = (lambda norms: np.asarray(bound_of(norms)).item()) if callable(bound_of) else bound_of
        how = {"clip_norm": clip_norm, "part": normed.span, "summed": self.entries.span, **self.distillation}
        losses, _ = at_once(params, self.x, self.y, self.masks, out=self.out, **how)
        self.out[self.entries.span] /= len(self.y)
        return float(losses.mean()), self.out

    def clipped_sum(self, params: Array, clip_norm: float, out: Array, entries: Entries = ALL) -> float:
        at_once = None if self.subsets else getattr(self.gradient, "clipped_sum", None)
        if at_once is not None and entries.layers:
            how = {"clip_norm": clip_norm, "out": out, "part": entries.span, **self.distillation}
            each, norms = at_once(params, self.x, self.y, self.masks, **how)
            if can_clip(norms, clip_norm).all():
                return float(each.mean()) if len(each) else 0.0
        losses: list[float] = []

        def gradients() -> Iterator[Array]:
            for rows in self.subsets or (slice(i, i + 1) for i in range(len(self.y))):
                try:
                    loss, gradient = self._some(params, rows, self.out)
                except GraphRefused as error:  # counts as zero: otherwise one record could remove the others
                    if not self.failures:
                        self.failures.append(str(error))
                    continue
                losses.append(loss)
                yield entries.alone(gradient)

        clipped_sum(gradients(), clip_norm, out)
        return float(np.mean(losses)) if losses else 0.0

    def _some(self, params: Array, rows: Any, out: Array) -> tuple[float, Array]:
        """Returns the mean loss and gradient of some samples, in `out`."""
        return self.gradient(
            params,
            self.x[rows],
            self.y[rows],
            tuple(mask[rows] for mask in self.masks),
            out=out,
            **{name: None if each is None else each[rows] for name, each in self.distillation.items()},
        )


@dataclass
class NoisedBatch(Batch):
    """A batch whose mean gradient is computed by DP-SGD. Raw gradients are not available.

    The bound applies to a gradient's entries in `moved`: the rest is noise that nothing reads. `entries` has no effect.

    :param mechanisms: one for each client; they differ only in the noise.
    :param noises: one for each client.
    :param total: float64 `[..., d]`, where gradients are added up.
    """

    batch: Batch
    mechanisms: Sequence[RecordMechanism]
    noises: Sequence[NoiseSource]
    total: Array
    taken: int = 0

    @property
    def sizes(self) -> Array:
        return self.batch.sizes

    def mean(self, params: Array) -> tuple[Any, Array]:
        self.taken += 1
        first = self.mechanisms[0]
        first.check_charged(self.taken)
        total = self.total
        loss = self.batch.clipped_sum(params, first.clip_norm, total, self.moved)
        rows = [total] if total.ndim == 1 else total
        for row, mechanism, noise in zip(rows, self.mechanisms, self.noises, strict=True):
            mechanism.noised_mean(row, noise)  # in place
        out = self.batch.out
        out[...] = total
        return loss, out

    def each(self, params: Array) -> tuple[Array, Array]:
        raise TypeError("a method sees noised gradients only with privacy unit 'record'")

    def clipped(self, params: Array, bound_of: float | BoundOf, normed: Entries) -> tuple[Any, Array]:
        raise TypeError("a method sees noised gradients only with privacy unit 'record'")
