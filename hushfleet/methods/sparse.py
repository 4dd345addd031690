"""Keeps the largest entries of a vector."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushfleet.array_api import Array, np
from hushfleet.methods.stages import Transform

if TYPE_CHECKING:
    from hushfleet.methods.state import RoundContext
    from hushfleet.privacy.noise import NoiseSource


@dataclass(frozen=True)
class KeepLargest(Transform):
    """Zeroes all shared entries except the largest, by magnitude, of each vector; ties go to the lower index.

    The choice of entries depends on the data, so the zeroed entries get noise, too.

    :param share: share of the entries that stay, `ceil(share x n)` of n; in (0, 1].
    """

    share: float
    shrinks = True

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Returns the update, `[d]`, with the other entries 0."""
        magnitude = np.where(context.mask, -1.0, np.abs(update))
        magnitude[np.isnan(magnitude)] = np.inf  # NaN stays, so that clipping detects diverged training
        stays = largest(magnitude, kept_count(self.share, int(np.count_nonzero(~context.mask))))
        return np.where(stays, update, np.zeros_like(update))


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns bool `[n]`, True for the `count` largest of `values [n]`; ties go to the lower index."""
    chosen = np.zeros(len(values), dtype=bool)
    if count > 0:
        least = np.sort(values)[len(values) - count]  # argsort would take four times as long and twice the memory
        (equal,) = np.nonzero(values == least)
        chosen |= values > least
        chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return chosen


def kept_count(share: float, total: int) -> int:
    """Returns `ceil(share * total)`; a product within 1e-9 above a whole number counts as this number."""
    return math.ceil(share * total - 1e-9)
