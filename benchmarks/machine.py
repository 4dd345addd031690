"""The machine that a benchmark runs on: what it is, and its own limits."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LARGE_BYTES = 256 << 20
"""Far above any cache, so that a copy of it is limited by the memory itself."""


def machine() -> dict[str, Any]:
    """For the head of every JSON file: figures of different machines, or of a busy one, do not compare."""
    return {
        "cpu": cpu_model(),
        "cores": cores(),
        "gpu": gpu_name(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def described() -> str:
    """The processor in words."""
    return f"{cpu_model()}, {cores()} core{'s' * (cores() != 1)}"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def quickest_s(work: Callable[[], object], *, turns: int = 20) -> float:
    """The least wall time of `turns` calls: what else the machine does only ever adds to it."""
    return min(_timed(work) for _ in range(turns))


def memory_copy_gb_s(size_bytes: int = LARGE_BYTES, *, turns: int = 10) -> float:
    """10^9 bytes copied a second by one core; by default so many that no cache holds them."""
    source = np.ones(size_bytes // 4, np.float32)
    target = np.zeros_like(source)
    return 1e-9 * source.nbytes / quickest_s(lambda: np.copyto(target, source), turns=turns)


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
