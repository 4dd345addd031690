"""Measures how busy the GPU was, by `nvidia-smi`: the share of the time in which any kernel ran.

The driver reports means over a sixth of a second to a second, so a measurement should take longer. A kernel that uses
a hundredth of the device counts as much as one that uses the whole device.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from typing import Self

_COMMAND = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100", "-i", "0"]


class GpuUsage:
    """Samples ten times per second while its context is open; without `nvidia-smi`, there are no samples."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None

    def between(self, began: float, ended: float) -> list[float]:
        """Returns the shares in 0..1 that were read from `began` to `ended`, both from `time.monotonic`."""
        return [share for at, share in list(self._samples) if began <= at <= ended]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit():
                self._samples.append((time.monotonic(), int(line) / 100))

    def __enter__(self) -> Self:
        try:
            self._process = subprocess.Popen(_COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return self
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def mean_or_none(shares: list[float]) -> float | None:
    return statistics.mean(shares) if shares else None
