"""The machine under a process: what was synced survives a power cut, what was not may be lost; disks fill, clocks jump.

These are the tests of the instrument: a store that does not sync must be seen to lose what it has committed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.needs("compiler")]

COMMIT = """
import os, signal, sqlite3, sys
store = sqlite3.connect(sys.argv[1] + "/store.sqlite", isolation_level=None)
store.execute("PRAGMA journal_mode = WAL")
store.execute("PRAGMA synchronous = FULL")
store.execute("CREATE TABLE kept (value)")
os.fsync(os.open(sys.argv[1], os.O_RDONLY))
store.execute("PRAGMA synchronous = " + sys.argv[2])
for value in range(20):
    store.execute("INSERT INTO kept VALUES (?)", (value,))
os.kill(os.getpid(), signal.SIGKILL)
"""
COUNT = """
import sqlite3, sys
print(*sqlite3.connect(sys.argv[1] + "/store.sqlite").execute("SELECT COUNT(*) FROM kept").fetchone())
"""
WHOLE_FILE = """
import os, sys
from pathlib import Path
from hushfleet.atomic_file import write_whole
write_whole(Path(sys.argv[1]) / "model", b"old" * 1000, durable=True)
write_whole(Path(sys.argv[1]) / "model", b"new" * 2000, durable=sys.argv[2] == "synced")
"""
FULL = """
import sqlite3, sys
store = sqlite3.connect(sys.argv[1] + "/store.sqlite", isolation_level=None)
store.execute("CREATE TABLE IF NOT EXISTS kept (value)")
try:
    store.execute("INSERT INTO kept VALUES (?)", (bytes(10_000),))
    print("written")
except sqlite3.OperationalError as error:
    print(error)
"""
CLOCKS = "import datetime, time; print(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"


KEYS = {
    "the aggregator's key": """
import sys
from pathlib import Path
from hushfleet.aggregator.storage.identity_file import load_or_create
print(load_or_create(Path(sys.argv[1]) / "key").public_key.hex())
""",
    "a device's key": """
import sys
from pathlib import Path
from hushfleet.edge_client.storage.store import DeviceStore
store = DeviceStore(Path(sys.argv[1]) / "store.sqlite", device="one")
print(store.identity.public_key.hex())
""",
    "the run's id": """
import os, sys
from pathlib import Path
from hushfleet.aggregator.storage.store import AggregatorStore
store = AggregatorStore(Path(sys.argv[1]))
if store.get("run_id") is None:
    store.put("run_id", os.urandom(8))
print(store.get("run_id").hex())
""",
}


@pytest.fixture
def machine(library: Path | None, tmp_path: Path) -> Machine:
    assert library is not None
    return Machine(tmp_path / "disk", tmp_path / "beside", library=library)


def run(machine: Machine, source: str, *arguments: str) -> str:
    command = [sys.executable, "-c", source, str(machine.disk), *arguments]
    return subprocess.run(
        command, env=os.environ | machine.environment, capture_output=True, text=True, check=False
    ).stdout.strip()


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
def test_a_synced_transaction_survives(machine: Machine, kept: float) -> None:
    run(machine, COMMIT, "FULL")
    machine.cut_power(random.Random(1), kept=kept)
    assert run(machine, COUNT) == "20"


def test_a_transaction_that_was_not_synced_is_lost(machine: Machine) -> None:
    run(machine, COMMIT, "OFF")
    assert len(list(machine.disk.iterdir())) == 3, "the death of the process alone loses nothing"
    machine.cut_power(random.Random(1), kept=0.0)
    assert run(machine, COUNT) == "0"


def test_a_torn_log_is_read_up_to_the_tear(machine: Machine) -> None:
    run(machine, COMMIT, "OFF")
    machine.cut_power(random.Random(3), kept=0.9)
    assert 0 <= int(run(machine, COUNT)) < 20


@pytest.mark.parametrize(("how", "expected"), [("synced", b"new" * 2000), ("not-synced", b"old" * 1000)])
def test_a_file_is_replaced_once_its_folder_is_synced(machine: Machine, how: str, expected: bytes) -> None:
    run(machine, WHOLE_FILE, how)
    machine.cut_power(random.Random(1), kept=0.0)
    assert (machine.disk / "model").read_bytes() == expected
    assert [path.name for path in machine.disk.iterdir()] == ["model"]


@pytest.mark.parametrize("what", KEYS)
def test_what_others_remember_is_not_forgotten(machine: Machine, what: str) -> None:
    """Devices pin the first key of an aggregator that they meet, and obey no other: it must outlive any power cut."""
    before = run(machine, KEYS[what] + "sys.stdout.flush(); import os; os._exit(0)")
    machine.cut_power(random.Random(1), kept=0.0)
    assert before
    assert run(machine, KEYS[what]) == before


def test_power_cuts_one_after_the_other(machine: Machine) -> None:
    for number in range(3):
        run(machine, WHOLE_FILE, "synced")
        machine.cut_power(random.Random(number), kept=0.5)
        assert (machine.disk / "model").read_bytes() == b"new" * 2000


def test_what_the_simulator_put_there_is_not_touched(library: Path | None, tmp_path: Path) -> None:
    assert library is not None
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "train.npz").write_bytes(b"images")
    machine = Machine(tmp_path / "disk", tmp_path / "beside", library=library, not_its_own=("log.txt",))
    (machine.disk / "log.txt").write_text("from the simulator")
    (machine.disk / "metrics").write_text("from the device, never synced")
    machine.cut_power(random.Random(1), kept=0.0)
    assert {path.name for path in machine.disk.iterdir()} == {"train.npz", "log.txt"}


def test_a_full_disk_refuses_what_would_grow(machine: Machine) -> None:
    assert run(machine, FULL) == "written"
    machine.fill_disk(True)
    assert run(machine, FULL) == "database or disk is full"
    machine.fill_disk(False)
    assert run(machine, FULL) == "written"


def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(machine: Machine) -> None:
    def clocks() -> list[float]:
        return [float(word) for word in run(machine, CLOCKS).split()]

    before = clocks()
    machine.move_clock(-7200.25)
    after = clocks()
    assert after[0] < before[0] - 7000
    assert after[1] < before[1] - 7000
    assert after[2] > before[2]
