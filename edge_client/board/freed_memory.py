"""Freed vectors go back to the system, where glibc would keep them for later.

After the first large array is freed, glibc's malloc takes all later ones from its heap, and what is free there stays
with the process: 30 MiB of it after a round of the Fashion-MNIST network, on boards where 512 MB are all there is.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGE_BYTES = 1 << 20  # model vectors; what a training step takes and frees stays below, and in the heap
_KEPT_BYTES = 8 << 20  # free at the heap's end: less, and each step would pay for fresh pages


def give_back() -> None:
    """For this process from now on; does nothing where the C library is another."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
