"""`hushfleet fleet set`: with how many boards rounds open and make a model, changed while the task runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.thresholds import RunningThresholds
from hushfleet.errors import BadInput
from support.command import hushfleet
from support.desk import TASK, make_folder

OF_FOURTEEN = TASK.replace("min_devices = 2\n", "").replace("devices = 2\n", "devices = 14\n")
SECURE = OF_FOURTEEN.replace("[privacy]", '[privacy]\naccounting = "secure"')


fleet = partial(hushfleet, "fleet")


def set_numbers(folder: FleetFolder, *settings: str) -> str:
    return fleet("set", str(folder.path), *settings)


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    return make_folder(tmp_path / "fleet", boards=14, task=OF_FOURTEEN)


def test_the_numbers_and_their_sources_are_shown(folder: FleetFolder) -> None:
    assert set_numbers(folder) == (
        "round.min_devices = 12 (from 80 % of 14 boards): a round opens when so many boards can take part\n"
        "round.min_updates = 9 (from 60 % of 14 boards): so many updates make a model\n"
    )
    said = set_numbers(folder, "round.min_devices=13", "round.min_updates=10")
    assert "round.min_devices = 13 (from fleet set)" in said
    assert "round.min_updates = 10 (from fleet set)" in said
    assert "round.min_devices = 12 (from 80 % of 14 boards)" in set_numbers(folder, "round.min_devices=default")
    assert "round.min_updates = 10 (from fleet set)" in set_numbers(folder), "what was not named stays"


def test_the_numbers_follow_the_boards_that_are_enrolled(folder: FleetFolder) -> None:
    with FleetRegistry(folder.path) as registry:
        for board in registry.boards()[:10]:
            registry.write("UPDATE boards SET standing = 'enrolled' WHERE id = ?", (board.device,))
        registry.block(registry.boards()[0].device, "stolen")
    assert "80 % of 13 boards" in set_numbers(folder), "before the first round others may be on their way"
    with EventLog(folder.run / "events.jsonl") as log:
        log.write("run", task="small-1", method="m", unit="device", delta=1e-5, rounds=2, devices=14)
        log.write("round_open", round=1, cohort=["a"])
        log.write("round_close", round=1, participants=9, uplink_bytes=8)
    assert "round.min_devices = 8 (from 80 % of 9 boards)" in set_numbers(folder)


def test_a_running_aggregator_reads_what_the_command_wrote(folder: FleetFolder) -> None:
    task = load_task(folder.task)
    running = RunningThresholds(task, folder.round, folder.task)
    assert running.now(boards=14, blocked=0, begun=True).devices == 12
    set_numbers(folder, "round.min_devices=9", "round.min_updates=9")
    found = running.now(boards=14, blocked=0, begun=True)
    assert (found.devices, found.updates, found.is_fixed) == (9, 9, True)
    folder.round.write_text("min_devices = [")
    assert running.now(boards=14, blocked=0, begun=True).devices == 9, "a damaged file changes nothing"
    folder.round.unlink()
    assert running.now(boards=14, blocked=0, begun=True).devices == 12


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["round.rounds=5"], r"'round.rounds=5': round.min_devices and round.min_updates can be changed.*fleet task"),
        (["round.min_devices"], r"'round.min_devices': write round.min_devices=12"),
        (["round.min_devices=0"], r"a number of boards from 1 on"),
        (["round.min_updates=many"], r"a number of boards from 1 on"),
        (["round.min_devices=15"], r"round.min_devices = 15: the fleet has 14 boards.*take 14 or fewer"),
        (["round.min_updates=20"], r"round.min_updates = 20: the fleet has 14 boards"),
        (["round.min_devices=5", "round.min_updates=9"], r"= 5: a model takes 9 updates.*set round.min_updates=5"),
    ],
)  # fmt: skip
def test_numbers_with_which_no_round_makes_a_model_are_refused(
    folder: FleetFolder, settings: list[str], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        set_numbers(folder, *settings)
    assert not folder.round.exists()


def test_the_noise_of_secure_aggregation_is_no_matter_of_the_command(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", boards=14, task=SECURE)
    assert "round.min_updates = 13 (from what the task's noise relies on)" in set_numbers(folder)
    with pytest.raises(BadInput, match=r"updates = 9: the noise of small relies on sums of 13 boards or more"):
        set_numbers(folder, "round.min_updates=9")
    with pytest.raises(BadInput, match=r"round.min_devices = 9: a model takes 13 updates"):
        set_numbers(folder, "round.min_devices=9")
    set_numbers(folder, "round.min_updates=14", "round.min_devices=14")


def test_the_next_task_begins_with_its_own_numbers(folder: FleetFolder) -> None:
    set_numbers(folder, "round.min_devices=10")
    folder.task.write_text(OF_FOURTEEN.replace('name = "small"', 'name = "next"'))
    assert "round.min_devices = 12 (from 80 % of 14 boards)" in set_numbers(folder)
