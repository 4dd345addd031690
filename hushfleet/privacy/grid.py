"""Values and their noise are added on a grid, so that the last bits of a float tell nothing about either.

A float has the finer steps the smaller it is. So a sum that lies near zero shows in its last bits how large its parts
were: noise added to exactly 0 keeps all of its bits, noise added to 0.3 has lost some (Mironov, "On significance of the
least significant bits for differential privacy", CCS 2012). Here the sum is taken in float64 and rounded at once to a
multiple of a power of two of about 2^-10 standard deviations, the same for all values. Whatever is done afterwards,
conversion to float32 included, is done to that multiple.
"""

from __future__ import annotations

from typing import Any

# 1.5 * 2^42: times a standard deviation it is a number whose neighbours are 2^-10 to 2^-9 of that deviation away.
_SHIFT = 1.5 * 2.0**42


def add_on_grid(noise: Any, values: Any, stds: Any) -> Any:
    """`noise + values`, rounded to the grid of `stds`, in the memory of `noise`.

    :param noise: float64 `[n]`, of standard deviation `stds`.
    :param values: float32 or float64 `[n]`.
    :param stds: above zero; a number, `[1]` or `[n]`.

    Sums beyond 2^42 standard deviations are on the coarser grid that float64 itself has there.
    """
    # A large number is added and taken away again: what its float64 cannot hold is rounded off. Both are single
    # operations of IEEE 754, so that NumPy and PyTorch, on any device, give the same bits.
    shift = stds * _SHIFT
    noise += values
    noise += shift
    noise -= shift
    return noise
