"""Emulates the speed, memory, storage and link of a board on this machine.

All figures come from the profile; each has a source there or is marked as an estimate (`firmware_profiles`). No board
was available, so nothing here was compared with one.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from hushfleet.errors import HushfleetError
from hushfleet.firmware_profiles import Board
from hushfleet.simulator.world.link_model import LinkConditions

REFERENCE_GFLOP_S = 96.0
"""Float32 speed of one core of `generic-x86`, the unit of `relative_cpu_speed`: 32 operations per cycle at 3 GHz."""

SERVICE_MEMORY = 0.8
"""The share of a board's memory at which systemd kills the client (MemoryMax in its unit)."""

_SIZE = 512
_TIMES = 15
# Runs in a separate process, because the libraries of this process already have their threads.
_PRODUCTS = f"""
import time
import numpy as np
a = np.random.default_rng(0).random(({_SIZE}, {_SIZE}), dtype=np.float32)
out = np.empty_like(a)
np.matmul(a, a, out=out)
for _ in range({_TIMES}):
    began = time.thread_time()
    np.matmul(a, a, out=out)
    print(time.thread_time() - began)
"""


@dataclass(frozen=True)
class Emulation:
    """A board, as this machine emulates it.

    :param slowdown: work takes this many times its CPU time here; at least 1.
    :param memory_mib: memory that the client's process may use there, `SERVICE_MEMORY` of the board's memory.
    :param write_mb_s: write rate of its storage, 10^6 bytes per second.
    :param too_fast: True if the board is faster than this machine; this cannot be emulated, so `slowdown` is 1.
    """

    slowdown: float
    memory_mib: int
    write_mb_s: float
    link: LinkConditions
    too_fast: bool = False


def emulation_of(board: Board, *, machine_speed: float) -> Emulation:
    """:param machine_speed: speed of one core of this machine, in cores of `generic-x86`.

    Profiles define no jitter and no stalls, so the link has none.
    """
    slowdown = machine_speed / float(board.relative_cpu_speed)
    return Emulation(
        slowdown=max(1.0, slowdown),
        memory_mib=int(SERVICE_MEMORY * float(board.memory_mib)),
        write_mb_s=float(board.storage_write_mb_s),
        link=LinkConditions(
            down_mbit_s=float(board.network_down_mbit_s),
            up_mbit_s=float(board.network_up_mbit_s),
            latency_ms=float(board.network_latency_ms),
        ),
        too_fast=slowdown < 1.0,
    )


@cache
def machine_speed() -> float:
    """Returns one core's speed here at float32 matrix products, in cores of `generic-x86`; measured once per process.

    Raises `HushfleetError` if it cannot be measured.
    """
    environment = {**os.environ, **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}}
    measured = subprocess.run(
        [sys.executable, "-c", _PRODUCTS], env=environment, capture_output=True, text=True, check=False
    )
    if measured.returncode:
        raise HushfleetError(f"the speed of this machine could not be measured: {measured.stderr[-300:]}")
    seconds = statistics.median(float(line) for line in measured.stdout.split())
    return 2 * _SIZE**3 / seconds / 1e9 / REFERENCE_GFLOP_S


def describe_emulation(boards: Iterable[Board], *, machine_speed: float) -> list[str]:
    """Describes how each board is emulated, one line each."""
    lines = [
        f"one core of this machine: {machine_speed:.2f} of generic-x86's {REFERENCE_GFLOP_S:g} GFLOP/s (measured); "
        "boards are emulated with one core each"
    ]
    for board in sorted(set(boards), key=lambda board: board.name):
        emulation = emulation_of(board, machine_speed=machine_speed)
        speed = (
            "faster than this machine, which cannot be emulated: at full speed"
            if emulation.too_fast
            else f"work stretched {emulation.slowdown:.1f} times"
        )
        link = emulation.link
        lines.append(
            f"{board.name}: {speed}, {emulation.memory_mib} MiB, writes {emulation.write_mb_s:g} MB/s, "
            f"link {link.down_mbit_s:g}/{link.up_mbit_s:g} Mbit/s and {link.latency_ms:g} ms each way"
        )
    return lines
