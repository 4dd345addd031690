"""Computes exact sums of updates: the order of arrival, batching, CPU or CUDA never change a bit of the model.

Floating-point addition is not associative, so a running float sum would depend on which device came first, and a
resumed run would differ from an uninterrupted one. Here each float32 value is scaled by 2^40, rounded to int64 and
added as an integer. If the total of a cohort could overflow int64, the upper part of the sums is first moved into a
second vector; both ways give the same correctly rounded mean.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from hushfleet.aggregator.payloads.decoding import MAX_MAGNITUDE
from hushfleet.array_api import Array, array_namespace, blocks
from hushfleet.errors import Malformed

SCALE_BITS = 40
_SCALE = 2.0**SCALE_BITS
_LOW_BITS = 32
_HEAD_ROOM = 1 << 62
MAX_WEIGHT = 4.0  # times the largest value, this still fits together with the carried part
_WEIGHT_SCALE = 1 << 20
SMALL = 2.0**51
# Adding this to a double below `SMALL` leaves the nearest whole number in its low bits: three times as fast as rounding
# and converting it.
_SHIFT = 1.5 * 2.0**52
_SHIFT_BITS = int(np.float64(_SHIFT).view(np.int64))

AddSmall = Callable[[np.ndarray, np.ndarray, float], None]


class ExactSum:
    """Sums `[d]` of the values that devices sent, and of the weights of the devices that sent each of them.

    :param size: d, the length of the flat vector.
    :param device: "cpu" for NumPy's arrays, or the PyTorch device that holds the sums: 16 bytes per parameter, and 8
        more after many large updates.
    :param add_small: faster code that adds the same bits as `_add_small`.
    """

    def __init__(self, size: int, *, device: str = "cpu", add_small: AddSmall | None = None) -> None:
        self.size = size
        self._add_small = add_small or _add_small
        self.updates = 0
        # The import of PyTorch takes seconds, so an aggregator without an accelerator does not import it.
        self._torch: Any = None if device == "cpu" else importlib.import_module("torch")
        xp, self._device = self._torch or np, device
        self._low: Array = xp.zeros(size, dtype=xp.int64, device=device)
        self._high: Array | None = None
        self._bound = 0
        # The weights of updates with all entries are added in one number, the others for each entry.
        self._full_weight = 0.0
        self._weights: Array | None = None

    def add(
        self,
        values: np.ndarray,
        shared: np.ndarray | None = None,
        *,
        weight: float = 1.0,
        discount: float = 1.0,
        largest: float | None = None,
    ) -> None:
        """Adds one update, times `weight` and `discount`.

        :param values: float32 `[d]`, zero where `shared` is False.
        :param shared: bool `[d]`, which entries were sent; None for all.
        :param weight: positive, rounded to 20 binary places, so that sums of weights are exact as well.
        :param discount: in (0, 1], rounded to 20 binary places; the sums of weights use the weight without it.
        :param largest: the largest magnitude among the values, if decoding has already found it.

        Raises `Malformed` and adds nothing for a wrong shape, or for a value that is not finite or above 2^20.
        """
        if values.dtype != np.float32 or values.shape != (self.size,):
            raise Malformed(f"{values.dtype} of shape {values.shape} is not an update of {self.size} parameters")
        if shared is not None and (shared.dtype != np.bool_ or shared.shape != (self.size,)):
            raise Malformed(f"{shared.dtype} of shape {shared.shape} is not a mask of {self.size} parameters")
        if largest is None:
            largest = float(np.abs(values).max(initial=0.0))
        if not largest <= MAX_MAGNITUDE:  # a NaN among the values makes the maximum NaN
            raise Malformed(f"an update's largest value is {largest!r}, above the limit of {MAX_MAGNITUDE:g}")
        weight = round(weight * _WEIGHT_SCALE) / _WEIGHT_SCALE
        if not 0 < weight <= MAX_WEIGHT:
            raise Malformed(f"an update's weight is {weight!r}: it must be above 2^-21 and at most {MAX_WEIGHT:g}")
        scale = weight * (round(discount * _WEIGHT_SCALE) / _WEIGHT_SCALE) * _SCALE
        self._reserve(int(largest * scale) + 1)
        torch = self._torch
        if torch is None:
            (self._add_small if largest * scale < SMALL else _add_large)(self._low, values, scale)
        else:
            scaled = torch.tensor(values, dtype=torch.float64, device=self._device).mul_(scale)
            self._low += scaled.round_().to(torch.int64)
        if shared is None:
            self._full_weight += weight
        else:
            sent = weight * shared
            self._add_weights(sent if torch is None else torch.from_numpy(sent).to(self._device))
        self.updates += 1

    def add_total(self, total: np.ndarray, updates: int, shared: np.ndarray | None, *, bound: int) -> None:
        """Adds the sum of several updates of weight 1, as it was computed elsewhere.

        :param total: int64 `[d]`, their values times 2^40, rounded and added; zero where `shared` is False.
        :param shared: bool `[d]`, the entries that all of them sent; None for all.
        :param bound: of the magnitudes in `total`.
        """
        self._reserve(bound)
        self._low += total
        if shared is None:
            self._full_weight += updates
        else:
            self._add_weights(float(updates) * shared)
        self.updates += updates

    def merge(self, other: ExactSum) -> None:
        """Adds the updates of another sum of the same size on the same device: any division gives the same result."""
        self._reserve(other._bound)
        self._low += other._low
        if other._high is not None:
            self._high = other._high if self._high is None else self._high + other._high
        if other._weights is not None:
            self._add_weights(other._weights)
        self._full_weight += other._full_weight
        self.updates += other.updates

    @property
    def weights(self) -> Array:
        """The sums of the senders' weights, float64 `[d]`: the number of senders if each has the weight 1."""
        weights = (self._torch or np).zeros_like(self._low, dtype=(self._torch or np).float64)
        return weights + self._full_weight if self._weights is None else self._weights + self._full_weight

    def _add_weights(self, sent: Array) -> None:
        self._weights = sent if self._weights is None else self._weights + sent

    @property
    def sums(self) -> Array:
        """The sums, float64 `[d]`, each correctly rounded from the exact integer."""
        xp = array_namespace(self._low)
        if self._high is None:
            return xp.astype(self._low, xp.float64) / _SCALE
        high, low = _carried(self._high, self._low)
        return (xp.astype(high, xp.float64) * 2.0**_LOW_BITS + xp.astype(low, xp.float64)) / _SCALE

    def _reserve(self, addend: int) -> None:
        """Makes sure that adding a value of magnitude `addend` cannot overflow int64."""
        if self._bound + addend > _HEAD_ROOM:
            high = self._low * 0 if self._high is None else self._high
            self._high, self._low = _carried(high, self._low)
            self._bound = 1 << _LOW_BITS
        self._bound += addend


def _add_small(sums: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Adds values times `scale`: the product is exact in float64 (24 bits times at most 23), and rounded half to even.

    :param sums: int64 `[d]`, changed.
    :param values: float32 `[d]`; no value times `scale` reaches 2^51.
    """
    for part in blocks(values):
        scaled = values[part].astype(np.float64)
        scaled *= scale
        scaled += _SHIFT
        sums[part] += scaled.view(np.int64)
        sums[part] -= _SHIFT_BITS


def _add_large(sums: np.ndarray, values: np.ndarray, scale: float) -> None:
    """Adds as `_add_small` does; no value times `scale` reaches 2^63."""
    for part in blocks(values):
        scaled = values[part].astype(np.float64)
        scaled *= scale
        sums[part] += np.rint(scaled, out=scaled).astype(np.int64)


def _carried(high: Array, low: Array) -> tuple[Array, Array]:
    """Returns the same numbers `high * 2^32 + low` in their unique form with `0 <= low < 2^32`."""
    carry = low >> _LOW_BITS  # arithmetic: rounds towards minus infinity
    return high + carry, low - (carry << _LOW_BITS)
