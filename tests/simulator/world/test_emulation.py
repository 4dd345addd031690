"""What is emulated of a board: its figures by hand, this machine's measured, and limits that the kernel really sets."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.firmware_profiles import Quantity, board_names, load_board
from hushfleet.simulator.world import emulation
from hushfleet.simulator.world.emulation import SERVICE_MEMORY, describe_emulation, emulation_of, machine_speed
from hushfleet.simulator.world.link_model import LinkConditions
from hushfleet.simulator.world.memory_limit import (
    START_MIB,
    ClientMemory,
    address_space_bytes,
    client_memory,
    limited,
)

UNIT = Path(__file__).parents[4] / "firmware_profiles" / "cards" / "kit" / "units" / "hushfleet-client.service"


def test_a_board_by_hand() -> None:
    zero = emulation_of(load_board("raspberry-pi-zero-2-w"), machine_speed=1.2)
    assert zero.slowdown == pytest.approx(1.2 / 0.05)
    assert zero.memory_mib == 409
    assert zero.write_mb_s == 20
    assert zero.link == LinkConditions(up_mbit_s=35, down_mbit_s=35, latency_ms=5)
    assert not zero.too_fast


def test_a_link_has_two_directions() -> None:
    board = replace(
        load_board("jetson-orin-nano"), network_up_mbit_s=Quantity(2.0, "x"), network_down_mbit_s=Quantity(8.0, "x")
    )
    assert emulation_of(board, machine_speed=1.0).link == LinkConditions(up_mbit_s=2, down_mbit_s=8, latency_ms=1)


def test_a_board_that_is_faster_than_this_machine_runs_at_full_speed_and_this_is_said() -> None:
    x86 = load_board("generic-x86")
    assert emulation_of(x86, machine_speed=1.0).slowdown == 1.0
    assert not emulation_of(x86, machine_speed=1.0).too_fast
    slow = emulation_of(x86, machine_speed=0.5)
    assert slow.slowdown == 1.0
    assert slow.too_fast
    (line,) = [line for line in describe_emulation([x86], machine_speed=0.5) if line.startswith("generic-x86:")]
    assert "faster than this machine, which cannot be emulated" in line
    assert "stretched" not in line


def test_every_profile_can_be_emulated_and_shown() -> None:
    boards = [load_board(name) for name in board_names()]
    lines = describe_emulation([*boards, *boards], machine_speed=1.3)
    for board in boards:
        of_this = emulation_of(board, machine_speed=1.3)
        assert 1 <= of_this.slowdown < 1000
        (line,) = [line for line in lines if line.startswith(f"{board.name}:")]
        assert f"{of_this.slowdown:.1f} times" in line
        assert f"{of_this.memory_mib} MiB" in line


def test_the_share_of_memory_is_that_of_the_service() -> None:
    found = re.search(r"^MemoryMax=(\d+)%$", UNIT.read_text(), re.MULTILINE)
    assert found is not None
    assert int(found[1]) == round(100 * SERVICE_MEMORY)


def test_the_speed_of_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_speed.cache_clear()
    speed = machine_speed()
    assert 0.01 < speed < 20
    monkeypatch.setattr(emulation.subprocess, "run", None)
    assert machine_speed() == speed


def test_speed_is_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_speed.cache_clear()
    # 2 * 512^3 operations in 2.796 ms are 96 GFLOP/s; what was disturbed does not count.
    lines = "\n".join(["0.0027962", "0.0027962", "9.0", "0.0027962", "0.001"])
    result = subprocess.CompletedProcess([], 0, stdout=lines, stderr="")
    monkeypatch.setattr(emulation.subprocess, "run", lambda *_, **__: result)
    try:
        assert machine_speed() == pytest.approx(1.0, rel=1e-4)
    finally:
        machine_speed.cache_clear()


def test_the_limit_is_the_memory_and_what_address_space_takes_beyond_it() -> None:
    memory = ClientMemory(resident_mib=70, overhead_mib=110)
    assert address_space_bytes(400, memory) == 510 << 20
    assert address_space_bytes(40, memory) == (70 + START_MIB + 110) << 20, "a client can at least start"


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux only")
def test_a_clients_memory_is_measured() -> None:
    memory = client_memory()
    assert memory is not None
    assert 20 < memory.resident_mib < 400
    assert 0 < memory.overhead_mib < 2000


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux only")
def test_a_limited_process_is_limited_and_keeps_its_id_and_its_arguments() -> None:
    program = (
        "import json, os, resource, sys\n"
        "try:\n"
        "    block = bytearray(600 << 20)\n"
        "except MemoryError:\n"
        "    print(json.dumps([os.getpid(), resource.getrlimit(resource.RLIMIT_AS), sys.argv[1:]]))\n"
    )
    command = limited([sys.executable, "-c", program, "a b", "--c"], 500 << 20)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        output = process.communicate()[0]
    assert json.loads(output) == [process.pid, [500 << 20, 500 << 20], ["a b", "--c"]]
    assert process.pid != os.getpid()
