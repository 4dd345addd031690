"""Runs side by side: what a device gained, and what it gave away. One table for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hushfleet.aggregator.results.report import page, sections
from hushfleet.aggregator.results.report.verdict import (
    answer,
    judge,
    own_head_answer,
    privacy_answer,
    trade_answer,
    trust_answer,
)
from hushfleet.aggregator.results.report.words import gained, number, percent, size
from hushfleet.aggregator.results.result import Result, write_whole
from hushfleet.config.spec import TRUST


def comparison_rows(runs: Mapping[str, Result]) -> list[list[str]]:
    """A heading row with the runs' names, then a row for each thing that is compared."""
    results = list(runs.values())
    headlines = [judge(result) for result in results]
    rows = [
        ["", *runs],
        ["method", *(result.method for result in results)],
        ["parameters", *(f"{result.model.parameters:,}" for result in results)],
        ["devices, rounds", *(f"{result.devices}, {len(result.rounds)}" for result in results)],
        ["trust model", *(result.trust or TRUST[result.accounting] for result in results)],
        ["epsilon_server (delta)", *(f"{number(h.epsilon_server)} ({number(h.delta)})" for h in headlines)],
    ]
    for where, each in (
        ("common test", [headline.common for headline in headlines]),
        ("own data", [headline.local for headline in headlines]),
    ):
        rows.append([f"federated, {where}", *(percent(comparison.federated) for comparison in each)])
        rows.append([f"alone, {where}", *(percent(comparison.alone) for comparison in each)])
        rows.append([f"gained, {where}", *(gained(comparison.gain) for comparison in each)])
    rows.append(["sent up by a device, a round", *(size(_bytes_a_round(result)) for result in results)])
    return rows


def write_comparison(title: str, runs: Mapping[str, Result], reports: Mapping[str, str], path: Path) -> None:
    """The page, whole or not at all.

    :param reports: of each run, where its own report is.

    Raises `StoreError`.
    """
    head, *rows = comparison_rows(runs)
    lead = "What a board gained, and what it gave away."
    parts = [page.Section("table", "Side by side", lead, [page.Table(head, rows)])]
    answers = []
    for number_of_run, (name, result) in enumerate(runs.items()):
        headline = judge(result)
        verdict = answer(result, headline)
        answers.append(f"{name}: {verdict}")
        told = (
            own_head_answer(result),
            privacy_answer(headline, devices=result.devices),
            trust_answer(result),
            trade_answer(result, headline),
            f"All of it: {reports[name]}",
        )
        charts = (sections.accuracy(result, headline), sections.devices_against_alone(result, headline))
        shown = [section.parts[0] for chart in charts if (section := page.present(chart)) is not None]
        prose = page.Prose([words for words in told if words])
        parts.append(page.Section(f"run-{number_of_run}", name, verdict, [*shown, prose]))
    write_whole(path, page.page(title, parts, answer=answers))


def _bytes_a_round(result: Result) -> float | None:
    updates = sum(row.participants for row in result.rounds)
    return result.uplink_bytes / updates if updates else None
