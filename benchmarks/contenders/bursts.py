"""Work and memory copies in turns, in one process: so both meet the same machine. NumPy is all that is needed."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COPY_BYTES = 64 << 20
BURST_S = 0.05


@dataclass
class Bursts:
    """:param value_bytes: float32 bytes that one update stands for.
    :param rates: updates a second of each burst; :param copies_gb_s: of the memory copy right after it.
    """

    value_bytes: int
    rates: list[float] = field(default_factory=list)
    copies_gb_s: list[float] = field(default_factory=list)
    updates: int = 0

    def figures(self) -> dict[str, Any]:
        gb_s = [1e-9 * self.value_bytes * rate for rate in self.rates]
        return {
            "updates": self.updates,
            "updates_per_s": statistics.median(self.rates),
            "float32_gb_s": statistics.median(gb_s),
            "copy_gb_s": statistics.median(self.copies_gb_s),
            "of_copy": statistics.median(ours / copy for ours, copy in zip(gb_s, self.copies_gb_s, strict=True)),
        }


class Copy:
    """A copy of so many bytes that no cache holds them."""

    def __init__(self) -> None:
        self._source, self._target = (np.full(COPY_BYTES // 4, x, np.float32) for x in (1, 2))

    def gb_s(self) -> float:
        """The better of two: the first brings the memory back that the work has pushed out of reach."""
        return 1e-9 * COPY_BYTES / min(self._timed_s() for _ in range(2))

    def _timed_s(self) -> float:
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - began


def in_turns(
    work: Callable[[int, int], float],
    *,
    updates: int,
    value_bytes: int,
    box_s: float,
    copy: Copy,
    burst: int | None = None,
) -> Bursts:
    """Runs `work(first, count)`, which takes so many updates and returns the seconds that count, until all are taken.

    :param box_s: no burst is begun after so many seconds; :param burst: updates in each, by default some 50 ms of them.
    """
    bursts, ends_at, count = Bursts(value_bytes), time.monotonic() + box_s, burst or 1
    while bursts.updates < updates and time.monotonic() < ends_at:
        count = min(count, updates - bursts.updates)
        seconds = work(bursts.updates, count)
        bursts.updates += count
        bursts.rates.append(count / seconds)
        bursts.copies_gb_s.append(copy.gb_s())
        if burst is None:
            count = max(1, round(BURST_S * count / seconds))
    if len(bursts.rates) > 2 and burst is None:
        del bursts.rates[0], bursts.copies_gb_s[0]  # whatever happens once, at first
    return bursts


def forget_peak() -> None:
    """Gives freed memory back and begins `VmHWM` anew; where the system does not let it, setting up counts as well."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def memory_mib(what: str, pid: int | None = None) -> float:
    """`VmRSS`, what a process (by default this one) has resident, or `VmHWM`, the most that it ever had."""
    for line in Path(f"/proc/{pid or 'self'}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"there is no {what}")
