"""Sparsification: the entries of an update that are large stay, the others become zero."""

from __future__ import annotations

import math

import numpy as np

from hushfleet import array_api
from hushfleet.methods.base import Array


def keep_largest(update: Array, share: float, where: Array) -> Array:
    """A copy of `update [..., d]` with zeros but for the largest entries, by magnitude, of each vector.

    Kept are `ceil(share x n)` of the n entries in `where`, bool `[..., d]`; ties go to the lower index. Zero elsewhere.

    :param share: in (0, 1].
    """
    xp = array_api.array_namespace(update)
    kept = xp.where(where, update, xp.zeros_like(update))
    if share == 1:
        return kept
    order = xp.argsort(-xp.abs(kept), axis=-1, stable=True)
    candidates = xp.count_nonzero(where, axis=-1)
    for row in np.ndindex(update.shape[:-1]):  # one, unless many clients are computed at once
        count = math.ceil(share * int(candidates[row]) - 1e-9)  # 0.55 * 100 is above 55
        kept[row][order[row][count:]] = 0
    return kept
