"""Computes clipped gradients of one linear layer in closed form, without an array or a graph call for each record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hushfleet.losses import loss_and_cotangent
from hushfleet.objectives import CROSS_ENTROPY, Objective
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import can_clip, clip_factors

WHOLE = slice(None)
_RECORDS = 1024


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
        summed: slice | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns each record's loss and gradient norm; writes the sum of gradients clipped to `clip_norm` into `out`.

        :param params: float32 `[d]`; `x`: float32 `[B, ...]`, F numbers per record; `y`: int64 `[B]` or float32
            `[B, C]`. B may be 0.
        :param clip_norm: C, above zero; or a function that receives the norms and returns it.
        :param out: float32 or float64 `[d]`, required. Sums are computed in float64.
        :param part: whole layers, W or b or both; gradients are restricted to them, and `out` is zero elsewhere.
        :param summed: the entries of `part` whose sum is wanted; all of `part` is summed.
        :return: losses float64 `[B]` and norms float64 `[B]`, before clipping.
        """
        if out is None:
            raise ValueError("out must be given: it receives the sum")
        weight, bias = self.layout.unflatten(params).values()
        rows = x.reshape(len(x), weight.shape[1])
        # einsum, because the rounding of a matrix product depends on the number of threads.
        logits = np.einsum("bf,cf->bc", rows, weight) + bias
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
