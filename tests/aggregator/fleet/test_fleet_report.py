"""The report of a fleet over all its tasks, held against what its folder has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.fleet.fleet_report import render_fleet_report
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.registry import FleetRegistry
from hushfleet.aggregator.fleet.watch import FleetWatch
from hushfleet.aggregator.results.events import EventLog
from hushfleet.privacy.charge import Charge
from hushfleet.schema import pack
from support.desk import TASK, make_folder

DAY_S = 86400.0
BEGAN = 1_780_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    return make_folder(tmp_path / "fleet", boards=3)


def run(folder: FleetFolder, name: str, *, at: float, rounds: int, of: int) -> None:
    """Writes the log of a run in which board `a` took part."""
    moment = at
    log = EventLog(folder.path / "runs" / name / "events.jsonl", clock=lambda: moment)
    log.write("run", task=f"{name}-1a2b", method="m", unit="device", delta=1e-5, rounds=of, devices=1)
    for number in range(1, rounds + 1):
        log.write("round_open", round=number, cohort=["a"])
        log.write("update", round=number, device="a", code="accepted", bytes=1)
        log.write("round_close", round=number, participants=1)
        moment += DAY_S
    if rounds == of:
        log.write("finished")
    log.close()


def said(folder: FleetFolder) -> str:
    page = render_fleet_report(folder, now=BEGAN + 100 * DAY_S)
    return " ".join(re.sub(r"<[^>]+>", " ", page[page.index("<body>") :]).split())


def test_the_task_of_the_fleet_goes_on_also_after_a_question(folder: FleetFolder) -> None:
    """A question is the newest run, and has ended; the task goes on. Before a task's first round none goes on."""
    run(folder, "small", at=BEGAN, rounds=2, of=5)
    run(folder, "ask-counts-1", at=BEGAN + 9 * DAY_S, rounds=1, of=1)
    assert re.search(r"small-1a2b .* not measured goes on ask-counts-1-1a2b .* finished", said(folder))
    folder.task.write_text(TASK.replace('"small"', '"next"'))
    assert re.search(r"small-1a2b .* not measured not finished ask-counts", said(folder))
    folder.task.write_text("while it is written")
    assert "not measured not finished ask-counts" in said(folder)


def test_a_task_that_ended_by_its_last_day_goes_on_once_that_is_moved(folder: FleetFolder) -> None:
    run(folder, "small", at=BEGAN, rounds=2, of=5)
    with EventLog(folder.path / "runs" / "small" / "events.jsonl") as log:
        log.write("finished", reason="no round opens after 2026-06-30 (schedule.until)")
        assert "not measured finished" in said(folder)
        log.write("run", task="small-1a2b", method="m", unit="device", delta=1e-5, rounds=5, devices=1)
        log.write("round_open", round=3, cohort=["a"])
    assert "not measured goes on" in said(folder)
    watch = FleetWatch(folder)
    seen = watch.view().run
    assert seen is not None
    assert not seen.finished
    watch.close()


def test_boards_that_are_gone_run_no_release(folder: FleetFolder) -> None:
    with FleetRegistry(folder.path) as registry:
        one, other, gone = (board.device for board in registry.boards())
        keys = {name: bytes([n] * 32) for n, name in enumerate((one, other, gone))}
        for name, key in keys.items():
            registry.write("UPDATE boards SET state = 'enrolled', public_key = ? WHERE id = ?", (key, name))
            row = (name, key, "ready", 1, "0.9.0" if name == one else "0.10.0", BEGAN, None, None)
            registry.write("INSERT INTO sightings VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        registry.block(gone, "stolen")
        for number, version in enumerate(("0.9.0", "0.10.0"), 1):
            registry.write("INSERT INTO rollouts VALUES (?, ?, 'running', '', 2, ?)", (number, version, BEGAN))
        assert "boards with 0.9.0 1 boards with 0.10.0 1" in said(folder)
        registry.write("UPDATE boards SET public_key = ? WHERE id = ?", (b"new card", other))
        assert "boards with 0.9.0 1" in (text := said(folder))
        assert "boards with 0.10.0" not in text, "its new card was not heard yet"
        assert text.index("0.9.0 rolled out") < text.index("0.10.0 rolled out"), "in the order of time"


def test_a_board_that_the_aggregator_has_blocked_is_locked_out(folder: FleetFolder) -> None:
    with FleetRegistry(folder.path) as registry, DeviceRegister(folder.aggregator) as register:
        one, other, _ = (board.device for board in registry.boards())
        register.block(one, "its updates were refused in 3 rounds")
        registry.block(other, "<b>stolen</b>")
    text = said(folder)
    assert "2 locked out" in text
    assert f"{one} locked out: its updates were refused in 3 rounds" in text
    assert f"{other} locked out: &lt;b&gt;stolen&lt;/b&gt;" in text


def test_a_fleet_without_periods_names_the_one_limit_that_there_is(folder: FleetFolder) -> None:
    text = said(folder)
    assert "last one epsilon in all, at most, where cards allow 8 " in text
    assert "no limit" not in text


def test_more_than_cards_allow_is_told_without_a_guess_at_why(folder: FleetFolder) -> None:
    charge = Charge("device", "add-or-remove", "gaussian", 1.0, 1, 1.0, 4)
    with DeviceRegister(folder.aggregator) as register:
        register.note_charges("small", 1, {"a": pack(charge)}, certain=True)
    text = said(folder)
    assert "That is above what cards allow" in text
    assert "or its owner has raised the limit" in text
