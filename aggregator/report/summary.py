"""Makes the summary of a run for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from hushfleet.aggregator.report.readable import percent
from hushfleet.aggregator.report.sweeps import noise_table, seed_table
from hushfleet.aggregator.report.tables import Table, terminal_table
from hushfleet.aggregator.report.verdict import gain_cell, judge
from hushfleet.aggregator.report.words import Words, sentences
from hushfleet.aggregator.results.result import Result
from hushfleet.losses import ACCURACY


def summary_table(result: Result) -> RenderableType:
    """Returns the summary of a run for a terminal: federated against alone, the two epsilons, and their meaning."""
    headline = judge(result)
    rows = [
        (
            row.name,
            percent(row.found.federated),
            "" if row.found.local_only is None else percent(row.found.local_only),
            gain_cell(row.found.gain, row.verdict, " points", missing=""),
        )
        for row in headline.rows
    ]
    title = f"{result.method} on {result.dataset}, {result.devices} devices, {len(result.rounds)} rounds"
    heads = (_measure_or_score(result), "federated", "alone", "difference")
    table = terminal_table(Table(heads, rows), title=title)
    sweeps = [
        terminal_table(table, title=title)
        for table, title in (
            (seed_table(result), "the same run with other seeds (*: this run)"),
            (noise_table(result), "the same run at other noise (*: this run)"),
        )
        if table.rows
    ]
    return Group(
        *([table] if result.statistic is None else []),
        *sweeps,
        Text(Words(result, headline).told("facts")),
        *(Text(words, "bold" * (name == "answer")) for name, words in sentences(result, headline).items()),
    )


def _measure_or_score(result: Result) -> str:
    """Returns the head of the column of tests: the score that an accuracy counts, or else the measure."""
    detail = result.details
    return detail.score if detail.score and detail.measure == ACCURACY else detail.measure
