"""A long vector in pieces that fit the cache.

An elementwise chain over a million entries is bound by memory traffic: ten passes over 5 MB each miss the
cache ten times. The same chain over one piece after the other misses it once, and its temporaries stay
small, on a board's 512 MB as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hushfleet import array_api

BLOCK = 1 << 15


def blocks(array: Any) -> Iterator[slice]:
    """Slices of the trailing axis; one slice for an accelerator, whose kernels want it whole."""
    size = array.shape[-1]
    on_host = array_api.is_numpy_array(array) or array.device.type == "cpu"
    step = BLOCK if on_host else max(size, 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
