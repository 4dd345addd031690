"""Exact sums of updates: the order of arrival, batching, CPU or CUDA never change a bit of the model.

Floating-point addition is not associative, so a running float sum would depend on which device came first
and a resumed run would differ from a calm one. Here each float32 value is scaled by 2^40, rounded to int64
and added as an integer. A cohort whose total could leave int64 moves the upper part of the sums into a
second vector first; both ways give the same correctly rounded mean.
"""

from __future__ import annotations

import numpy as np
import torch

from hushfleet.aggregator.ingest.decoding import MAX_MAGNITUDE
from hushfleet.aggregator.ingest.pinned_slots import Staging
from hushfleet.aggregator.ingest.sum_kernels import SMALL, find_addition
from hushfleet.errors import Malformed

SCALE_BITS = 40
_SCALE = 2.0**SCALE_BITS
_LOW_BITS = 32
_HEAD_ROOM = 1 << 62
MAX_WEIGHT = 4.0  # times the largest value this still fits beside what is carried
_WEIGHT_SCALE = 1 << 20


class ExactSum:
    """Sums `[d]` of the values that devices sent, and how many sent each of them.

    :param size: d, the length of the flat vector.
    :param device: the torch device that holds the sums: 8 bytes a parameter for sums, 4 for counts, 8 more once
        many large updates came, and 8 more once one had a weight other than 1. An accelerator has 5 more, and the
        host 5 for each of the `staging.SLOTS`.
    """

    def __init__(self, size: int, *, device: str | torch.device = "cpu") -> None:
        self.size = size
        self.device = torch.device(device)
        self.updates = 0
        self._addition = find_addition()
        self._staging = None if self.device.type == "cpu" else Staging(size, self.device)
        self._low = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._high: torch.Tensor | None = None
        self._bound = 0
        # Updates of all entries are counted in one number each, the others entry by entry.
        self._full_count, self._full_weight = 0, 0.0
        self._counts = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._weights: torch.Tensor | None = None

    def add(
        self,
        values: np.ndarray,
        shared: np.ndarray | None = None,
        *,
        weight: float = 1.0,
        largest: float | None = None,
    ) -> None:
        """Adds one update, times `weight`. On an accelerator it is queued, and nothing here waits for it.

        :param values: float32 `[k]`, the entries where `shared` is True in their order; all `[d]` without it.
        :param shared: bool `[d]` with k times True.
        :param weight: positive, taken to 20 binary places, so that sums of weights are exact as well.
        :param largest: the largest magnitude among the values, where decoding has found it already.

        Raises `Malformed`, having added nothing, for a wrong shape, a value that is not finite or above 2^20.
        """
        shared = self._checked(values, shared)
        values = np.ascontiguousarray(values)
        if largest is None:
            largest = self._addition.largest(values)
        if not largest <= MAX_MAGNITUDE:  # a NaN among the values makes the maximum NaN
            raise Malformed(f"an update's largest value is {largest!r}, above the limit of {MAX_MAGNITUDE:g}")
        weight = round(weight * _WEIGHT_SCALE) / _WEIGHT_SCALE
        if not 0 < weight <= MAX_WEIGHT:
            raise Malformed(f"an update's weight is {weight!r}: it must be above 2^-21 and at most {MAX_WEIGHT:g}")
        self._reserve(int(largest * weight * _SCALE) + 1)
        if weight != 1 and self._weights is None:
            self._weights = self._counts.to(torch.float64)
        if self._staging is None:
            self._add_here(values, shared, weight, is_small=largest * weight * _SCALE < SMALL)
        else:
            self._add_there(*self._staging.put(values, shared), weight)
        if shared is None:
            self._full_count += 1
            self._full_weight += weight
        self.updates += 1

    @property
    def counts(self) -> torch.Tensor:
        """How many sent each entry, int32 `[d]`."""
        return self._counts + self._full_count

    @property
    def weights(self) -> torch.Tensor:
        """The sums of the senders' weights, `[d]`: `counts`, as long as each weighs 1."""
        return self.counts if self._weights is None else self._weights + self._full_weight

    @property
    def sums(self) -> torch.Tensor:
        """The sums, float64 `[d]`, each correctly rounded from the exact integer."""
        if self._high is None:
            return self._low.to(torch.float64) / _SCALE
        high, low = _carried(self._high, self._low)
        return (high.to(torch.float64) * 2.0**_LOW_BITS + low.to(torch.float64)) / _SCALE

    def exact(self, index: int) -> int:
        """The sum at one entry as the whole number of 2^-40."""
        high = 0 if self._high is None else int(self._high[index])
        return (high << _LOW_BITS) + int(self._low[index])

    def _add_here(self, values: np.ndarray, shared: np.ndarray | None, weight: float, *, is_small: bool) -> None:
        sums, scale = self._low.numpy(), weight * _SCALE
        if shared is None:
            self._addition.add(sums, values, scale=scale, is_small=is_small)
            return
        self._addition.add_shared(sums, self._counts.numpy(), values, shared, scale=scale, is_small=is_small)
        if self._weights is not None:
            self._weights.numpy()[:] += weight * shared

    def _add_there(self, values: torch.Tensor, shared: torch.Tensor | None, weight: float) -> None:
        """Queues the same on the accelerator: no value is read back, so the host goes on at once."""
        self._low += values.to(torch.float64).mul_(weight * _SCALE).round_().to(torch.int64)
        if shared is None:
            return
        self._counts += shared
        if self._weights is not None:
            self._weights += weight * shared.to(torch.float64)

    def _checked(self, values: np.ndarray, shared: np.ndarray | None) -> np.ndarray | None:
        """`shared`, contiguous; None if it is True everywhere."""
        if values.dtype != np.float32 or values.ndim != 1:
            raise Malformed(f"an update is a float32 vector, got {values.dtype} of shape {values.shape}")
        if shared is None:
            if values.size != self.size:
                raise Malformed(f"an update of {values.size} values does not fit {self.size} parameters")
            return None
        if shared.dtype != np.bool_ or shared.shape != (self.size,) or int(np.count_nonzero(shared)) != values.size:
            raise Malformed(f"{values.size} values do not fit a mask of shape {shared.shape}")
        return None if values.size == self.size else np.ascontiguousarray(shared)

    def _reserve(self, addend: int) -> None:
        """Makes sure that adding `addend` in absolute value cannot leave int64."""
        if self._bound + addend > _HEAD_ROOM:
            high = torch.zeros_like(self._low) if self._high is None else self._high
            self._high, self._low = _carried(high, self._low)
            self._bound = 1 << _LOW_BITS
        self._bound += addend


def _carried(high: torch.Tensor, low: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers `high * 2^32 + low` in their one form with `0 <= low < 2^32`."""
    carry = low >> _LOW_BITS  # arithmetic: rounds towards minus infinity
    return high + carry, low - (carry << _LOW_BITS)
