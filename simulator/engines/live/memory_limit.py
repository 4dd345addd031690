"""A client process that gets no more memory than its board has, by RLIMIT_AS: no privilege is needed.

The limit counts address space, which is more than memory: code that is mapped and never read, stacks of 8 MiB of which
a few pages are used. How much more is measured once, on a process that has loaded what a client loads; a client with
M MiB gets M MiB and that. What a process then meets is what it would meet on a board without swap: a failed allocation.
(On a board whose memory is overcommitted it may be killed instead.)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from hushfleet.errors import HushfleetError

ARENAS = {"MALLOC_ARENA_MAX": "1"}
"""For the environment of limited processes: glibc reserves 64 MiB of address space for each further thread's heap."""

START_MIB = 16
"""What a client takes, above what is measured, to come up: store, connection, agent. Found by trying: 6 was not enough,
12 was."""

_LAUNCH = (
    "import os, resource, sys;"
    "size = int(sys.argv[1]);"
    "resource.setrlimit(resource.RLIMIT_AS, (size, size));"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)

_PROBE = """
import json, threading
import hushfleet.edge_client.__main__, hushfleet.edge_client.agent, hushfleet.wire.link.mqtt
threading.Thread(target=lambda: print(json.dumps(
    {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Vm")}
))).start()
"""


class ClientMemory(NamedTuple):
    """The memory of a client process on this machine.

    :param resident_mib: of a process that has loaded a client.
    :param overhead_mib: address space beyond that.
    """

    resident_mib: int
    overhead_mib: int


@cache
def client_memory() -> ClientMemory | None:
    """Measured once a process; None where there is no Linux. Raises `HushfleetError` if it cannot be measured."""
    if sys.platform != "linux":
        return None
    measured = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, **ARENAS, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        kib = json.loads(measured.stdout)
    except json.JSONDecodeError as error:
        raise HushfleetError(f"a client's memory could not be measured: {measured.stderr[-300:]}") from error
    resident_mib = -(-kib["VmHWM"] // 1024)
    return ClientMemory(resident_mib, -(-kib["VmPeak"] // 1024) - resident_mib)


def address_space_bytes(memory_mib: int, memory: ClientMemory) -> int:
    """The limit of a process that may take `memory_mib`.

    It is never so low that a client could not even start: it would say nothing, and be started again for ever. One
    that has less than that is told so in its configuration, and declines its rounds.
    """
    return (max(memory_mib, memory.resident_mib + START_MIB) + memory.overhead_mib) << 20


def limited(command: Sequence[str], size: int) -> list[str]:
    """The command with `size` bytes of address space. The process id stays, since each step is an exec."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(size), *command]
