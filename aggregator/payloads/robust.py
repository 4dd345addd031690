"""Computes the trimmed mean and the median of a round's updates for each parameter, in any order of arrival.

If devices sent m values of a parameter, g values at each end are left out, and the result is the exact mean of the
others: g is a share of m, rounded down, or (m - 1) // 2 for the median, which leaves the middle one or two. (Yin, Chen,
Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.)

Nothing is kept in memory while updates arrive: their bytes are in the store until the round closes, and are then
decoded again. The result depends only on these bytes, so a restarted aggregator gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.payloads.exact_sum import ExactSum

BLOCK_BYTES = 1 << 29
"""Most bytes of values in memory at once; for more, the updates are decoded several times, each time for a part."""
_SORTED_BYTES = 1 << 20


def left_out(rules: RoundSection, senders: np.ndarray) -> np.ndarray:
    """Returns how many values are left out at each end, for numbers of senders `[d]`."""
    if rules.aggregation == "median":
        return np.asarray(np.maximum(senders - 1, 0) // 2)
    return np.asarray(np.floor(senders * rules.trim + 1e-9), np.int64)


def robust_sums(
    rules: RoundSection, updates: Callable[[], Iterator[CheckedUpdate]], *, devices: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums of the values that are not left out, correctly rounded, and their number; both float64 `[d]`.

    :param updates: yields the round's updates, from the start at each call.
    :param devices: number of updates.
    :param size: d, the number of parameters.
    """
    sums, counts = np.zeros((2, size))
    width = _block_entries(devices)
    for start in range(0, size, width):
        stop = min(start + width, size)
        block = np.full((devices, stop - start), np.inf, np.float32)  # inf: not sent, and sorted to the end
        for row, update in enumerate(updates()):
            np.copyto(block[row], update.values[start:stop], where=update.shared[start:stop])
        narrow = max(1, _SORTED_BYTES // (4 * devices))
        for first in range(0, stop - start, narrow):
            part = slice(start + first, min(start + first + narrow, stop))
            sums[part], counts[part] = _sums(rules, block[:, first : first + narrow])
    return sums, counts


def _block_entries(devices: int) -> int:
    return max(1, BLOCK_BYTES // (4 * devices))


def _sums(rules: RoundSection, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns sums and weights float64 `[entries]` of values float32 `[devices, entries]`, inf if none was sent."""
    ordered = np.sort(np.ascontiguousarray(values.T), axis=1).T
    senders = np.count_nonzero(ordered != np.inf, axis=0)
    first = left_out(rules, senders)
    last = senders - first
    total = ExactSum(values.shape[1])
    for rank in range(int(first.min(initial=0)), int(last.max(initial=0))):
        kept = (first <= rank) & (rank < last)
        if kept.any():
            total.add(np.where(kept, ordered[rank], np.float32(0)), kept)
    return total.sums, total.weights
