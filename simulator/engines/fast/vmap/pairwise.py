"""Sums rows of doubles in NumPy's own order, so that a norm has the same bits as on a board.

NumPy adds up to 128 values in eight interleaved sums, and halves longer arrays at multiples of eight. The halves of an
array form a tree, which is the same for all rows: each of its levels is one operation here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_LANES = 8
_LEAF = 128
_BLOCK_ENTRIES = 1 << 20  # `hushfleet.privacy.clipping` adds blocks of this length one after the other


class _Tree(NamedTuple):
    """The leaves of an array, in lanes of eight, and the sums of each level of the tree above them.

    :param first: the first lane of each leaf.
    :param lanes: the number of lanes of each leaf.
    :param levels: for each level, the numbers of both addends; sums are numbered after the leaves, in this order.
    """

    first: Tensor
    lanes: Tensor
    levels: list[tuple[Tensor, Tensor]]


def squares(x: Tensor, start: int, stop: int) -> Tensor:
    """Returns the sums of squares over `x[:, start:stop]`, float32 `[r, n]` -> float64 `[r]`, with the bits of
    `hushfleet.privacy.clipping` on each row."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for left in range(start, stop, _BLOCK_ENTRIES):
        block = x[:, left : min(left + _BLOCK_ENTRIES, stop)].double()
        total = total + row_sums(block.mul_(block))
    return total


def row_sums(x: Tensor) -> Tensor:
    """Returns the sum of each row of `x`, float64 `[r, n]` -> `[r]`, with the bits of `np.sum` of a row."""
    rows, size = x.shape
    whole = size - size % _LANES
    lanes = x[:, :whole].reshape(rows, whole // _LANES, _LANES)
    tree = _tree(whole + size % _LANES, str(x.device))
    total = torch.zeros(rows, len(tree.first), _LANES, dtype=x.dtype, device=x.device)
    for number in range(_LEAF // _LANES if whole else 0):
        inside = number < tree.lanes
        taken = lanes.index_select(1, torch.where(inside, tree.first + number, 0))
        total += taken.masked_fill_(~inside[:, None], 0)
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    sums = total[..., 0]
    for place in range(whole, size):  # the rest belongs to the last leaf
        sums[:, -1] += x[:, place]
    for left, right in tree.levels:
        sums = torch.cat((sums, sums.index_select(1, left) + sums.index_select(1, right)), dim=1)
    return sums[:, -1]


@lru_cache(maxsize=64)
def _tree(size: int, device: str) -> _Tree:
    leaves: list[tuple[int, int]] = []
    sums: list[list[tuple[int, int, int]]] = []  # by height: number within the height, left, right

    def divide(start: int, size: int) -> tuple[int, int]:
        """Returns the height of a part, and its number among the parts of this height."""
        if size <= _LEAF:
            leaves.append((start // _LANES, size // _LANES))
            return 0, len(leaves) - 1
        half = size // 2
        half -= half % _LANES
        left, right = divide(start, half), divide(start + half, size - half)
        height = max(left[0], right[0]) + 1
        while len(sums) < height:
            sums.append([])
        sums[height - 1].append((*left, *right))  # type: ignore[arg-type]
        return height, len(sums[height - 1]) - 1

    divide(0, size)
    firsts = [0]
    for count in (len(leaves), *map(len, sums)):
        firsts.append(firsts[-1] + count)
    where = [[(firsts[a] + i, firsts[b] + j) for a, i, b, j in level] for level in sums]  # type: ignore[misc]
    levels = [tuple(torch.tensor(side, device=device) for side in zip(*level, strict=True)) for level in where]
    first, lanes = (torch.tensor(side, device=device) for side in zip(*leaves, strict=True))
    return _Tree(first, lanes, levels)  # type: ignore[arg-type]
