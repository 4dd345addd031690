"""Seasons with real processes: `hushfleet fleet up`, two boards, and an aggregator as systemd runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hushfleet.aggregator.commands.field_run import REPLACED
from hushfleet.aggregator.fleet.tasks.next_task import set_task
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.units import write_units
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.schema import read_file
from support.desk import TASK, Board, make_folder, served, until
from support.processes import ENVIRONMENT, rounds_closed, running, start_board

SEASON = '\n[season]\nevery = "1h"\nlifetime = 1000.0\n'
FIRST, SECOND = "greenhouse-01", "greenhouse-02"
# The fleet service, a grandchild of the test, looks for a season that is due twice a second, not twice a minute.
LOOKS_OFTEN = """
import sys
if "serve" in sys.orig_argv:
    from hushfleet.aggregator.fleet.tasks.seasons import SeasonStarter
    SeasonStarter.every_s = 0.5
"""


def pass_an_hour(folder: FleetFolder) -> None:
    """Moves the first round's opening, and what boards were charged, an hour back: a season is at least so long."""
    with closing(sqlite3.connect(folder.aggregator / "devices.sqlite")) as register, register:
        register.execute("UPDATE charges SET at = at - 3600")
    file = folder.run / "events.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps({**each, "at": each["at"] - 3600}) + "\n" for each in events))


def without_limits(board: Board) -> Board:
    """Its period has not ended, because no hour has passed for it."""
    text = re.sub(r"(?m)^(per|epsilon_lifetime) = .*\n", "", board.file.read_text())
    board.file.write_text(re.sub(r"(?m)^epsilon_server = .*$", "epsilon_server = inf", text))
    return board


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
def test_a_fleet_goes_from_one_season_to_the_next_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(LOOKS_OFTEN)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", os.pathsep.join((str(tmp_path), ENVIRONMENT["PYTHONPATH"])))
    folder = make_folder(tmp_path / "greenhouse", task=TASK + SEASON)
    cards = [without_limits(start_board(folder, tmp_path / name, name)) for name in (FIRST, SECOND)]
    client, log = ("-m", "hushfleet.edge_client"), tmp_path / "up.log"
    up = running("-m", "hushfleet.aggregator.commands", "fleet", "up", str(folder.path), log=log)
    with up as fleet, running(*client, str(cards[0].file), log=tmp_path / "1.log"):
        with running(*client, str(cards[1].file), log=tmp_path / "2.log"):
            until(lambda: "waits for the next season" in log.read_text())
            pass_an_hour(folder)
            until(lambda: folder.run.name == "small-2" and rounds_closed(folder) == 2)
        assert fleet.poll() is None
    task = read_file(folder.task)
    assert (task["model"]["start"], task["season"]["number"]) == ("runs/small", 2)
    for card in cards:
        with DeviceStore(card.config.store_path, device=card.device, inspect=True) as store:
            tasks = [entry.task.rpartition("-")[0] for entry in store.ledger.entries()]
        assert tasks == ["small", "small", "small-2", "small-2"]


@pytest.mark.slow
@pytest.mark.needs("mosquitto")
def test_an_aggregator_ends_where_the_fleet_has_another_task_and_its_unit_starts_it_again(tmp_path: Path) -> None:
    folder, following = make_folder(tmp_path / "greenhouse"), tmp_path / "next.toml"
    following.write_text(TASK.replace('"small"', '"next"'))
    command = [sys.executable, "-m", "hushfleet.aggregator.commands", "aggregator", "--fleet", str(folder.path)]
    (unit,) = [file for file in write_units(folder) if file.stem.endswith("aggregator")]
    with served(folder), (tmp_path / "aggregator.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        try:
            until(lambda: (folder.run / "events.jsonl").exists())
            set_task(folder, following)
            assert process.wait(60) == REPLACED
            assert f"RestartForceExitStatus={REPLACED}" in unit.read_text()
            process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
            until(lambda: (folder.path / "runs/next/events.jsonl").exists())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    assert "the fleet has another task" in (tmp_path / "aggregator.log").read_text()
