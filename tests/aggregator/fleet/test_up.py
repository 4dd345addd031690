"""`hushfleet fleet up` with boards as they are in the field: processes, kills, and a card that is written anew."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.tasks.task_check import first_charge
from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.fleet.watching.round_numbers import change
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.privacy.spending import rounds_left
from hushfleet.schema import pack
from support.desk import TASK, make_folder, until
from support.processes import rounds_closed, running, start_board

FIRST, SECOND, THIRD = "greenhouse-01", "greenhouse-02", "greenhouse-03"


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
    folder = make_folder(tmp_path / "greenhouse", task=TASK.replace("rounds = 2", "rounds = 6\nmin_updates = 1"))
    file = folder.path / FILE_NAME  # the aggregator counts with it, too
    file.write_text(file.read_text().replace("epsilon_server = 8.0", "epsilon_server = inf"))
    folder = FleetFolder(folder.path)
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
        with ActivityStore(folder.aggregator) as register:
            noted = {(task, number) for task, number, _ in register.charges(FIRST)}
            assert ledger.keys() <= noted
    assert "Traceback" not in (tmp_path / "up.log").read_text() + (tmp_path / "new.log").read_text()


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
@pytest.mark.usefixtures("logs")
def test_no_round_opens_that_boards_cannot_pay_for_until_the_operator_sets_the_numbers(tmp_path: Path) -> None:
    """F4 with processes: two of three boards have spent what their cards allow, as far as the aggregator knows."""
    task = TASK.replace("min_devices = 2\n", "").replace("devices = 2\n", "devices = 3\n")
    folder = make_folder(tmp_path / "greenhouse", boards=3, task=task)
    assert "epsilon_server = 8.0" in (folder.path / FILE_NAME).read_text()
    charge = first_charge(load_task(folder.task))
    rounds = rounds_left([], charge, delta=1e-5, limit=8.0, at_most=50)
    assert rounds
    with ActivityStore(folder.aggregator) as register:
        for number in range(1, rounds + 1):
            register.note_charges("earlier", number, dict.fromkeys((SECOND, THIRD), pack(charge)), certain=True)
    cards = [start_board(folder, tmp_path / name, name) for name in (FIRST, SECOND, THIRD)]
    client, events = ("-m", "hushfleet.edge_client"), folder.run / "events.jsonl"

    def told() -> list[tuple[int, int, int]]:
        found = [event for event in iterate_events(events) if event["event"] == "waits"] if events.exists() else []
        return [(event["able"], event["spent_for_good"], event["min_devices"]) for event in found]

    up = running("-m", "hushfleet.aggregator.commands", "fleet", "up", str(folder.path), log=tmp_path / "up.log")
    with up, ExitStack() as boards:
        for card in cards:
            boards.enter_context(running(*client, str(card.file), log=tmp_path / f"{card.device}.log"))
        until(lambda: (1, 2, 3) in told())
        assert rounds_closed(folder) == 0
        with ActivityStore(folder.aggregator) as register:
            assert not register.charges(FIRST), "nobody pays"
        change(folder, ["round.min_devices=1", "round.min_updates=1"])
        until(lambda: rounds_closed(folder) >= 1)
        with ActivityStore(folder.aggregator) as register:
            assert register.charges(FIRST)
    log = (tmp_path / "up.log").read_text()
    assert "round 1 waits: 1 of 3 needed boards can take part; 2 have spent all that their cards allow" in log
    assert "Traceback" not in log
