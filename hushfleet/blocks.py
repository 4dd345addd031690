"""Splits a long vector into pieces that fit the cache.

Memory traffic limits a chain of elementwise operations over a million entries: ten passes over 5 MB miss
the cache ten times. The same chain over one piece after the other misses it once, and its temporary arrays
stay small, which also suits a board with 512 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hushfleet import array_api

BLOCK = 1 << 15


def blocks(array: Any) -> Iterator[slice]:
    """Yields slices of the last axis; an accelerator gets one slice, because its kernels work best on the whole."""
    size = array.shape[-1]
    on_host = array_api.is_numpy_array(array) or array.device.type == "cpu"
    step = BLOCK if on_host else max(size, 1)
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
