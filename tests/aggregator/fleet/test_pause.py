"""A fleet whose training is paused, or waits for its next window: what its operator types and reads."""

from __future__ import annotations

import io
from datetime import datetime
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from rich.console import Console

from hushfleet.aggregator.fleet.page.render import render_parts
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.watching.metrics import metrics
from hushfleet.aggregator.fleet.watching.table import table
from hushfleet.aggregator.fleet.watching.watch import view_now
from hushfleet.aggregator.report.display import FleetDisplay
from hushfleet.aggregator.results.events import EventLog
from support.command import hushfleet
from support.desk import make_folder

NOW = datetime(2026, 11, 26, 18, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
OPENS = datetime(2026, 11, 27, 1, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
TOLD = "next round: tomorrow 01:00 (Europe/Berlin)"


fleet = partial(hushfleet, "fleet")


def begin(folder: FleetFolder) -> EventLog:
    log = EventLog(folder.run / "events.jsonl", clock=lambda: NOW)
    log.write("run", task="small-1", method="m", unit="device", delta=1e-5, rounds=2, devices=2)
    log.write("round_open", round=1, cohort=["a", "b"])
    return log


def shown(folder: FleetFolder, now: float = NOW) -> tuple[str, str, str]:
    """What terminal, page and metrics say."""
    view = view_now(folder, now)
    console = Console(file=io.StringIO(), width=200)
    console.print(table(view))
    return console.file.getvalue(), render_parts(view)["summary"], metrics(view).decode()  # type: ignore[attr-defined]


def test_the_next_opening_is_told(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    with begin(folder) as log:
        log.write("round_close", round=1, participants=2, uplink_bytes=8)
        log.write("next_round", round=2, opens=OPENS, timezone="Europe/Berlin")
        terminal, page, figures = shown(folder)
        assert TOLD in terminal
        assert TOLD in page
        assert "\nhushfleet_next_round_timestamp_seconds 1.7" in figures
        assert "waits" not in terminal, "boards may come until then"
        later = shown(folder, OPENS + 60)
        assert "next round" not in later[0]
        assert "\nhushfleet_next_round_timestamp_seconds " not in later[2]
        log.write("round_open", round=2, cohort=["a", "b"])
        assert "next round" not in shown(folder)[0]
        log.write("next_round", round=2, opens=OPENS, timezone="Europe/Berlin")
        assert "round 2 goes on: tomorrow 01:00 (Europe/Berlin)" in shown(folder)[0]


def test_pause_and_resume(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    begin(folder).close()
    path = str(folder.path)
    assert "is not paused" in fleet("resume", path)
    assert f"hushfleet fleet resume {path}" in fleet("pause", path)
    assert "paused already" in fleet("pause", path)
    terminal, page, figures = shown(folder)
    assert "training is paused" in terminal
    assert "training is paused" in page
    assert "hushfleet_paused 1.0" in figures
    assert "goes on" in fleet("resume", path)
    assert not folder.paused.exists()
    assert "paused" not in shown(folder)[0]


def test_the_aggregator_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hushfleet.aggregator.report.display.time.time", lambda: NOW)
    display = FleetDisplay(console=Console(file=io.StringIO(), width=200))
    display.apply({"event": "run", "task": "small-1", "rounds": 2, "devices": 2})
    display.apply({"event": "next_round", "round": 1, "opens": OPENS, "timezone": "Europe/Berlin"})
    display.apply({"event": "pause", "state": "on"})
    display.apply({"event": "pause", "state": "off"})
    lines = display.console.file.getvalue().splitlines()[1:]  # type: ignore[attr-defined]
    opening = "round 1 opens tomorrow 01:00 (Europe/Berlin)"
    assert lines == [opening, "training is paused by the operator", opening]


def test_an_aggregator_that_starts_again_after_a_pause_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training was resumed, or the schedule taken out of the task, while it did not run."""
    monkeypatch.setattr("hushfleet.aggregator.report.display.time.time", lambda: NOW)
    display = FleetDisplay(console=Console(file=io.StringIO(), width=200))
    run = {"event": "run", "task": "small-1", "rounds": 2, "devices": 2}
    display.apply(run)
    display.apply({"event": "next_round", "round": 1, "opens": OPENS, "timezone": "Europe/Berlin"})
    display.apply({"event": "pause", "state": "on"})
    display.apply(run)
    assert (display.state.paused, display.state.next_opening) == (False, None)


def test_an_opening_whose_time_has_come_waits_for_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [NOW]
    monkeypatch.setattr("hushfleet.aggregator.report.display.time.time", lambda: now[0])
    display = FleetDisplay(console=Console(file=io.StringIO(), width=200))
    display.apply({"event": "run", "task": "small-1", "rounds": 2, "devices": 2})
    display.apply({"event": "next_round", "round": 1, "opens": OPENS, "timezone": "Europe/Berlin"})
    assert display._under_way() == ""
    now[0] = OPENS + 60
    assert display._under_way() != ""


def test_a_task_that_has_ended_early_has_not_done_all_its_rounds(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet")
    with begin(folder) as log:
        log.write("round_close", round=1, participants=2, uplink_bytes=8)
        log.write("finished", reason="no round opens after 2026-11-26 (schedule.until)")
    assert "small-1: it has ended, and 1 of 2 rounds are done" in shown(folder)[0]
