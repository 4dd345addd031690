"""Measures work and memory copies in turns, in one process, so that both have the same load. It only needs NumPy."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.processes import memory_mib

COPY_BYTES = 64 << 20
BURST_S = 0.05


def copy_gb_s(size_bytes: int = COPY_BYTES) -> Callable[[], float]:
    """Returns a function that measures a copy of so many bytes that no cache holds them. The faster of two copies
    counts: the first one loads memory again that the work has evicted."""
    source, target = (np.full(size_bytes // 4, fill, np.float32) for fill in (1, 2))

    def once_s() -> float:
        began = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began

    return lambda: 1e-9 * size_bytes / min(once_s(), once_s())


def in_turns(
    work: Callable[[int, int], float],
    copy: Callable[[], float],
    *,
    updates: int,
    value_bytes: int,
    box_s: float,
    burst: int | None = None,
) -> dict[str, Any]:
    """Runs `work(first, count)`, which takes `count` updates and returns the measured seconds, until all are taken.

    :param value_bytes: size of one update as float32.
    :param box_s: no burst starts after this many seconds.
    :param burst: updates in each burst, by default as many as take about 50 ms.
    """
    ends_at, count, taken = time.monotonic() + box_s, burst or 1, 0
    rates: list[float] = []
    copies: list[float] = []
    while taken < updates and time.monotonic() < ends_at:
        count = min(count, updates - taken)
        seconds = work(taken, count)
        taken += count
        rates.append(count / seconds)
        copies.append(copy())
        count = burst or max(1, round(BURST_S * count / seconds))
    first = 1 if len(rates) > 2 and not burst else 0  # leaves out one-time work of the first burst
    gb_s = [1e-9 * value_bytes * rate for rate in rates]
    return {
        "updates": taken,
        "updates_per_s": statistics.median(rates[first:]),
        "float32_gb_s": statistics.median(gb_s[first:]),
        "copy_gb_s": statistics.median(copies[first:]),
        "of_copy": statistics.median(ours / other for ours, other in list(zip(gb_s, copies, strict=True))[first:]),
    }


@contextmanager
def growth(figures: dict[str, Any]) -> Iterator[None]:
    """Adds the process's peak memory, and its growth over the memory before."""
    with contextlib.suppress(OSError, AttributeError):  # if the peak cannot be reset, setup counts too
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    start_mib = memory_mib("VmRSS")
    yield
    figures["peak_mib"] = memory_mib("VmHWM")
    figures["grown_mib"] = figures["peak_mib"] - start_mib
