"""Limits a client process to the memory of its board, by RLIMIT_AS: no privilege is needed.

The limit counts address space, which is more than memory: mapped code that is never read, and stacks of 8 MiB of which
a few pages are used. The difference is measured once, in a process that has loaded the client's code; a client with
M MiB gets M MiB plus this difference. If memory runs out, the result is the same as on a board without swap: a failed
allocation. (On a board with overcommitted memory, the process may be killed instead.)
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
"""Environment of limited processes: glibc reserves 64 MiB of address space for each further thread's heap."""

START_MIB = 16
"""Memory that a client needs to start, beyond the measured memory: store, connection, agent. Found by trying: 6 was not
enough, 12 was."""

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

    :param resident_mib: resident memory of a process that has loaded the client's code.
    :param overhead_mib: address space beyond `resident_mib`.
    """

    resident_mib: int
    overhead_mib: int


@cache
def client_memory() -> ClientMemory | None:
    """Measures once per process; returns None if this is not Linux. Raises `HushfleetError` if measuring fails."""
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
    """Returns the limit of a process that may use `memory_mib`.

    It is always enough for a client to start: otherwise it would be restarted forever without any message. A client
    with less memory than that reads `memory_mib` in its configuration, and declines its rounds.
    """
    return (max(memory_mib, memory.resident_mib + START_MIB) + memory.overhead_mib) << 20


def limited(command: Sequence[str], size: int) -> list[str]:
    """Returns the command, limited to `size` bytes of address space. It keeps its process id: each step is an exec."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(size), *command]
