"""Runs side by side: every row has a value of each run, and the page holds the table that the terminal shows."""

from __future__ import annotations

from pathlib import Path

from hushfleet.aggregator.results.report.comparison import comparison_rows, write_comparison
from support.report_samples import sample

RUNS = {
    "paper": sample(own=0.75, alone=0.70, epsilon_server=4417.0),
    "sums": sample(own=0.60, alone=0.70, epsilon_server=2.0),
}


def row(name: str) -> list[str]:
    (found,) = [values for first, *values in comparison_rows(RUNS) if first == name]
    return found


def test_a_row_has_a_value_of_each_run() -> None:
    assert {len(values) for values in comparison_rows(RUNS)} == {3}
    assert row("") == ["paper", "sums"]
    assert [value.partition(" ")[0] for value in row("epsilon_server (delta)")] == ["4,417", "2"]
    gains = row("gained, common test")
    assert gains[0].startswith("+5.0")
    assert gains[1].startswith("\N{MINUS SIGN}10.0")


def test_the_page_holds_the_table_and_says_where_the_whole_reports_are(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_comparison("Two fleets", RUNS, {"paper": "paper/report.html", "sums": "sums/report.html"}, path)
    text = path.read_text()
    for values in comparison_rows(RUNS):
        for value in values:
            assert value in text
    assert "paper/report.html" in text
    assert "sums/report.html" in text
