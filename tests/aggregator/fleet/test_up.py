"""`hushfleet fleet up` with boards as they are in the field: processes, kills, and a card that is written anew."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.fleet.next_task import set_task
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.edge_client.storage.store import DeviceStore
from support.desk import TASK, make_folder, until
from support.processes import rounds_closed, running, start_board

FIRST, SECOND = "greenhouse-01", "greenhouse-02"


def children_of(process: subprocess.Popen[bytes], *words: str) -> list[int]:
    """Process ids of the children with these words in their command line."""
    found = []
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if all(word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() for word in words):
            found.append(int(pid))
    return found


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[None]:
    """How the logs end; pytest shows it where the test has failed."""
    yield
    for file in sorted(tmp_path.rglob("*.log")):
        print(f"{file.name}\n{file.read_text(errors='replace')[-3000:]}")


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
@pytest.mark.usefixtures("logs")
def test_a_fleet_trains_through_kills_and_a_new_card_counts_what_the_old_one_spent(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "greenhouse", task=TASK.replace("rounds = 2", "rounds = 6"))
    cards = [start_board(folder, tmp_path / name, name) for name in (FIRST, SECOND)]
    client = ("-m", "hushfleet.edge_client")
    up = running("-m", "hushfleet.aggregator.commands", "fleet", "up", str(folder.path), log=tmp_path / "up.log")
    with up as fleet, running(*client, str(cards[1].file), log=tmp_path / "second.log"):
        with running(*client, str(cards[0].file), log=tmp_path / "first.log"):
            until(lambda: rounds_closed(folder) >= 2)
            for word in ("serve", "--fleet", "enrolment.conf"):
                (pid,) = children_of(fleet, word)
                os.kill(pid, signal.SIGKILL)
        with DeviceStore(cards[0].config.store_path, device=FIRST, inspect=True) as lost:
            spent = {(entry.task, entry.round): entry.charge for entry in lost.ledger.entries()}
        assert len(spent) >= 2
        with FleetRegistry(folder.path) as registry:
            registry.expect_new_card(FIRST)
        new = start_board(folder, tmp_path / "new-card", FIRST)
        with running(*client, str(new.file), log=tmp_path / "new.log"):
            until(lambda: rounds_closed(folder) == 6)
            until(lambda: (folder.run / "report.html").exists())
            following = tmp_path / "next.toml"
            following.write_text(TASK.replace('name = "small"', 'name = "next"'))
            assert not set_task(folder, following)
            assert folder.run.name == "next"
            until(lambda: rounds_closed(folder) == 2)
            time.sleep(0.5)
        with DeviceStore(new.config.store_path, device=FIRST, inspect=True) as store:
            ledger = {(entry.task, entry.round): entry.charge for entry in store.ledger.entries()}
        assert spent.items() <= ledger.items(), "nothing that the lost card spent is forgotten"
        assert len(ledger) > len(spent), "and the new card takes part"
        assert len({task for task, _ in ledger}) == 2, "in the next task, too, with the same ledger"
        with DeviceRegister(folder.aggregator) as register:
            noted = {(task, number) for task, number, _ in register.charges(FIRST)}
            assert ledger.keys() <= noted
    assert "Traceback" not in (tmp_path / "up.log").read_text() + (tmp_path / "new.log").read_text()
