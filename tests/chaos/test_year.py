"""A fleet's year, from the first card to December (`chaos.year`): afterwards every ledger is exact."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from chaos.year import Year
from chaos.year_audit import REFLASHED, STOLEN, check_year, play
from hushfleet.aggregator.commands.main import build_app
from hushfleet.aggregator.fleet.fleet_report import TaskHistory, histories, render_fleet_report
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.results.answers import EvaluationRow
from support.desk import make_folder


@pytest.fixture(scope="module")
def small_year(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Year]:
    folder = tmp_path_factory.mktemp("year")
    year = Year(folder, boards=5, every_days=14)
    play(year, folder)
    yield year
    year.close()


def test_after_a_year_every_ledger_is_exact_and_nobody_is_over_a_limit(small_year: Year) -> None:
    check_year(small_year)


def test_the_report_of_the_year_is_one_page(small_year: Year) -> None:
    folder = FleetFolder(small_year.desk.folder.path)
    page = render_fleet_report(folder, now=small_year.wall())
    written = CliRunner().invoke(build_app(), ["report", str(folder.path)])
    assert written.exit_code == 0, written.output
    assert (folder.path / "report.html").read_text().startswith(page[:200])
    assert len(page) < 40_000, "without plots there is no script of plots"
    said = " ".join(re.sub(r"<[^>]+>", " ", page[page.index("<body>") :]).split())
    closed = [task.course.rounds_closed for task in histories(folder)]
    assert f"{sum(closed)} rounds of 3 tasks ran from 202" in said
    assert "5 of 5 boards took part" in said
    stolen, reflashed = small_year.names[STOLEN], small_year.names[REFLASHED]
    assert f"{stolen} locked out: stolen" in said
    assert re.search(rf"{reflashed} since 2027-0[56]-\d\d, with a new card", said)
    assert re.search(rf"{small_year.names[0]} since 202[67]-\d\d-\d\d \d", said)
    assert "0.4.0 for" in said
    assert "broker not reached 1 time, the longest for 4 hours" in said
    assert "Whether it paid is not known here" in said
    assert re.search(
        r"of 2 in these 90 days, which end in [.0-9]+ days, and [34][.0-9]* of 4 in all since January 2027", said
    )


def test_the_report_says_what_a_task_has_measured(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "fleet", boards=1)
    value = {name: {"value": 0.5, "error": 0.02} for name in ("own", "alone", "shared", "gaining")}
    row = EvaluationRow(round=3, devices=20, gain={"value": 0.11, "error": 0.03}, **value)
    with patch.object(TaskHistory, "read", lambda file: evaluated_history(row)):
        (folder.path / "runs" / "one").mkdir(parents=True)
        (folder.path / "runs" / "one" / "events.jsonl").touch()
        assert "+11.0 ± 3.0 points" in render_fleet_report(folder)


def evaluated_history(row: EvaluationRow) -> TaskHistory:
    history = TaskHistory(opened=[1.8e9])
    history.course.task, history.course.evaluation = "one", row
    return history
