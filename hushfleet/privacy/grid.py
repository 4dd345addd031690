"""Adds values and their noise on a grid, so that the last bits of a float reveal nothing about either.

The smaller a float is, the finer its steps are. The last bits of a sum near zero therefore show how large its parts
were: noise added to exactly 0 keeps all its bits, noise added to 0.3 loses some (Mironov, "On significance of the
least significant bits for differential privacy", CCS 2012). Here the sum is computed in float64 and rounded at once to
a multiple of a power of two of about 2^-10 standard deviations, the same for all values. All later steps, including
the conversion to float32, use this multiple.
"""

from __future__ import annotations

from typing import Any

# 1.5 * 2^42: times a standard deviation, it is a float64 whose neighbours are 2^-10 to 2^-9 of that deviation away.
_SHIFT = 1.5 * 2.0**42


def add_on_grid(noise: Any, values: Any, stds: Any) -> Any:
    """Returns `noise + values`, rounded to the grid of `stds`, in the memory of `noise`.

    :param noise: float64 `[n]`, of standard deviation `stds`.
    :param values: float32 or float64 `[n]`.
    :param stds: above zero; a number, `[1]` or `[n]`.

    Sums beyond 2^42 standard deviations are on the coarser grid of float64 itself.
    """
    # A large number is added and subtracted again: float64 rounds off the bits that do not fit. Both are single
    # operations of IEEE 754, so that NumPy and PyTorch give the same bits on any device.
    shift = stds * _SHIFT
    noise += values
    noise += shift
    noise -= shift
    return noise
