"""What tests rely on: a port that was chosen is free when it is used."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support import ports as module
from support.ports import free_ports

ROOT = Path(__file__).parents[2]
OF_ANOTHER_PROCESS = """
import sys
from support import ports

ports._outside_connections = lambda: [int(word) for word in sys.argv[1:]]
print(*ports.free_ports(1))
"""


def test_no_connection_is_given_a_port_that_was_chosen() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = free_ports(200)
    assert len({*ports, *free_ports(3)}) == 203
    assert not [port for port in ports if lowest <= port <= highest]


def test_another_process_of_tests_is_given_others() -> None:
    ports = free_ports(4)
    spare = ports.pop()
    command = [sys.executable, "-c", OF_ANOTHER_PROCESS, *map(str, [*ports, spare])]
    fcntl.lockf(module._claims, fcntl.LOCK_UN, 1, spare)
    there = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == [str(spare)]


def test_a_port_on_which_something_listens_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    used, free = free_ports(2)
    monkeypatch.setattr(module, "_claimed", set())
    with socket.create_server(("127.0.0.1", used)):
        monkeypatch.setattr(module, "_outside_connections", lambda: [used, free])
        assert free_ports(1) == [free]
