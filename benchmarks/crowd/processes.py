"""What the kernel says of processes: memory, CPU time, open files."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from hushfleet.errors import BadInput

_TICKS = os.sysconf("SC_CLK_TCK")
_INTERVAL_S = 0.25


def need_descriptors(count: int) -> None:
    """Raises this process's soft limit of open files, which children inherit. Raises `BadInput` above the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and count > hard:
        raise BadInput(
            f"{count} open files are needed in one process, and the hard limit is {hard}: raise it (ulimit -Hn, or "
            "nofile in /etc/security/limits.conf), take fewer devices, or more processes"
        )
    if soft != resource.RLIM_INFINITY and soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def peak_mib(pid: int) -> float:
    """The most memory that was resident so far; 0 for a process that is gone."""
    return _status_kib(pid, "VmHWM") / 1024


def resident_mib(pid: int) -> float:
    return _status_kib(pid, "VmRSS") / 1024


def cpu_s(pid: int) -> float:
    """User and system seconds so far; 0 for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Sample(NamedTuple):
    """At a moment (unix seconds): resident memory, and the CPU time of all processes of that name so far."""

    at: float
    resident_mib: float
    cpu_s: float


@dataclass
class Usage:
    """Of one part of the run, over all processes that had its name one after the other."""

    cpu_s: float = 0.0
    peak_mib: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def at(self, moment: float) -> Sample:
        """The first sample from `moment` on; the last one after the end. Raises IndexError without samples."""
        return next((sample for sample in self.samples if sample.at >= moment), self.samples[-1])


class Meter:
    """Samples the processes of the run; a context manager.

    :param pids: name -> process id, at this moment.
    """

    def __init__(self, pids: Callable[[], dict[str, int]]) -> None:
        self._pids = pids
        self._cpu: dict[tuple[str, int], float] = {}
        self.usages: dict[str, Usage] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="meter", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            for name, pid in self._pids().items():
                self._sample(name, pid)

    def _sample(self, name: str, pid: int) -> None:
        usage = self.usages.setdefault(name, Usage())
        used = cpu_s(pid)
        if not used:
            return
        usage.cpu_s += used - self._cpu.get((name, pid), 0.0)
        self._cpu[name, pid] = used
        resident = resident_mib(pid)
        if resident:  # one that has ended has none, until its parent has heard of it
            usage.peak_mib = max(usage.peak_mib, peak_mib(pid))
            usage.samples.append(Sample(time.time(), resident, usage.cpu_s))


def _status_kib(pid: int, key: str) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
