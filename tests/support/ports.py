"""Ports for tests: each is free when it is used."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_claims = (Path(tempfile.gettempdir()) / f"hushfleet-test-ports-{os.getuid()}").open("ab")
_claimed: set[int] = set()


def free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, and that stay so until a test uses them, and between two uses.

    The system chooses none of them for any program's connection, and no other process of tests gets one while this one
    lives: it holds a lock on the byte of that number.
    """
    candidates, found = _outside_connections(), list[int]()
    while len(found) < count:
        port = candidates.pop(random.randrange(len(candidates)))
        if port not in _claimed and _is_claimed(port) and _is_free(port):
            _claimed.add(port)
            found.append(port)
    return found


def _outside_connections() -> list[int]:
    lowest, highest = map(int, _PORTS_OF_CONNECTIONS.read_text().split())
    return [port for port in range(10_000, 65_536) if not lowest <= port <= highest]


def _is_claimed(port: int) -> bool:
    """Whether this process holds the port's lock now, which ends with it."""
    try:
        fcntl.lockf(_claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
