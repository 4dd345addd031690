"""Computes losses and gradients of one linear layer in closed form, with NumPy alone: no graph runs, on any machine.

Sums of products are `einsum`, because the rounding of a matrix product depends on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hushfleet.errors import GraphRefused
from hushfleet.losses import loss_and_cotangent
from hushfleet.objectives import CROSS_ENTROPY, Objective, both_or_none
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import can_clip, clip_factors

WHOLE = slice(None)
_RECORDS = 1024


class LinearGradient:
    """`(params, x, y, out) -> (loss, gradient)` of logits z = W x + b: a `GradientFunction` with `clipped_sum`.

    :param layout: of a linear model (`hushfleet.params.is_linear`): W `[C, F]`, then b `[C]`.
    """

    def __init__(self, layout: ParamLayout, objective: Objective = CROSS_ENTROPY) -> None:
        self.layout, self.objective = layout, objective
        self.clipped_sum = None if objective.distills else LinearClipping(layout, objective)

    def __call__(
        self,
        params: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        dropout: Sequence[np.ndarray] = (),
        out: np.ndarray | None = None,
        teacher: np.ndarray | None = None,
        distill: np.ndarray | None = None,
    ) -> tuple[float, np.ndarray]:
        """Computes the batch's mean loss and its gradient float32 `[d]`; the arrays are as for `GradientGraph`.

        :param dropout: none; a linear model has no masks.
        """
        given = both_or_none(teacher, distill, distills=self.objective.distills)
        if dropout or not len(x):
            raise ValueError("a linear model takes no dropout masks, and a mean over no samples has no gradient")
        rows, logits = _rows_and_logits(self.layout, params, x)
        shape = len(x), self.objective.teacher_values(logits.shape[1])
        nothing = (np.zeros(shape, np.float32), np.zeros(len(x))) if self.objective.distills else ()
        losses, slopes = loss_and_cotangent(self.objective, logits, y, *(given or nothing))
        shares = (slopes / len(x)).astype(np.float32)
        out = np.empty(self.layout.size, np.float32) if out is None else out
        by_weight, by_bias = self.layout.unflatten(out).values()
        np.einsum("bc,bf->cf", shares, rows, out=by_weight)
        shares.sum(0, out=by_bias)
        return float(losses.mean()), out

    def logits(self, params: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns logits float32 `[B, C]`."""
        _, logits = _rows_and_logits(self.layout, params, x)
        return logits


def check_memory(layout: ParamLayout, *, batch: int, memory_bytes: int) -> None:
    """Raises `GraphRefused` unless a batch of that size takes less memory; it depends on nothing but the task."""
    classes, inputs = layout.shapes[0]
    needed = 4 * batch * (inputs + 16 * classes) + 8 * _RECORDS * (inputs + classes) + 32 * layout.size
    if needed > memory_bytes:
        raise GraphRefused(f"a batch of {batch} takes {needed >> 20} MiB, and {memory_bytes >> 20} MiB are given")


def _rows_and_logits(layout: ParamLayout, params: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inputs `[B, F]` and the logits `[B, C]`, float32."""
    weight, bias = layout.unflatten(params).values()
    rows = x.reshape(len(x), weight.shape[1])
    return rows, np.einsum("bf,cf->bc", rows, weight) + bias


@dataclass(frozen=True)
class LinearClipping:
    """Computes the `clipped_sum` of a gradient function in closed form, for logits z = W x + b.

    A record's gradient with respect to (W, b) is the outer product of s and (x, 1). Here s is the gradient of the loss
    with respect to z (for the cross-entropy softmax(z) - onehot(y)). So its norm is |s| |(x, 1)| (Goodfellow:
    "Efficient Per-Example Gradient Computations", 2015), and clipping it means scaling s.

    :param layout: of a linear model (`hushfleet.params.is_linear`): W `[C, F]`, then b `[C]`.
    :param objective: without a teacher.
    """

    layout: ParamLayout
    objective: Objective = CROSS_ENTROPY

    def __call__(
        self,
        params: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        dropout: Sequence[np.ndarray] = (),
        clip_norm: float | Callable[[np.ndarray], float] = math.inf,
        out: np.ndarray | None = None,
        teacher: None = None,
        distill: None = None,
        part: slice = WHOLE,
        summed: slice = WHOLE,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each record's loss and gradient norm; writes the sum of gradients clipped to `clip_norm` into `out`.

        :param params: float32 `[d]`; `x`: float32 `[B, ...]`, F numbers per record; `y`: int64 `[B]` or float32
            `[B, C]`. B may be 0.
        :param clip_norm: C, above zero; or a function that receives the norms and returns it.
        :param out: float32 or float64 `[d]`, required. Sums are computed in float64.
        :param part: whole layers, W or b or both; gradients are restricted to them, and `out` is zero elsewhere.
        :param summed: the entries of `part` whose sum is wanted; `out` has all of them.
        :return: losses float64 `[B]` and norms float64 `[B]`, before clipping.
        """
        if out is None:
            raise ValueError("out must be given: it receives the sum")
        rows, logits = _rows_and_logits(self.layout, params, x)
        losses, cotangents = loss_and_cotangent(self.objective, logits, y)
        slopes = cotangents.astype(np.float32)  # before norms are computed: rounding may increase them
        wanted = [_within(place, part, len(params)) for place in self.layout.slices.values()]
        inputs = np.einsum("bf,bf->b", rows, rows, dtype=np.float64) * wanted[0] + wanted[1]
        norms = np.sqrt((slopes.astype(np.float64) ** 2).sum(1) * inputs)
        bound = clip_norm(norms) if callable(clip_norm) else clip_norm
        if not callable(clip_norm) and not (kept := can_clip(norms, bound)).all():
            # they count as zero; another way to handle them would take extra time, and so reveal them
            norms = np.where(kept, norms, 0.0)
            slopes, rows = (np.where(kept[:, None], each, np.float32(0)) for each in (slopes, rows))
        slopes *= clip_factors(norms, np.full_like(norms, bound)).astype(np.float32)[:, None]
        # Check again: with large inputs slopes may now be denormal, and rounding up can double such a value.
        slopes[np.sqrt((slopes.astype(np.float64) ** 2).sum(1) * inputs) > bound] = 0
        by_weight, by_bias = self.layout.unflatten(out).values()
        by_weight[...] = _sum_of_products(slopes, rows) if wanted[0] else 0.0
        by_bias[...] = slopes.sum(0, dtype=np.float64) * wanted[1]
        return losses, norms


def _sum_of_products(slopes: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns float64 `[C, F]` from `[B, C]` and `[B, F]`: some records at a time, because full copies need memory."""
    total = np.zeros((slopes.shape[1], rows.shape[1]))
    for first in range(0, len(rows), _RECORDS):
        some = (each[first : first + _RECORDS].astype(np.float64) for each in (slopes, rows))
        total += np.einsum("bc,bf->cf", *some)
    return total


def _within(place: slice, part: slice, size: int) -> bool:
    first, end, _ = part.indices(size)
    return bool(first <= place.start and place.stop <= end)
