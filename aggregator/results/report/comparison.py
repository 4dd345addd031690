"""Runs side by side: what a device gained, and what it gave away. One table for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hushfleet.aggregator.results.report import charts, page
from hushfleet.aggregator.results.report.charts import PERCENT, line, over
from hushfleet.aggregator.results.report.verdict import answer, final_by_device, judge, privacy_answer
from hushfleet.aggregator.results.report.words import number, percent, points, size
from hushfleet.aggregator.results.result import Result, write_whole


def comparison_rows(runs: Mapping[str, Result]) -> list[list[str]]:
    """A heading row with the runs' names, then a row for each thing that is compared."""
    rows = [["", *runs]]

    def row(name: str, values: list[str]) -> None:
        rows.append([name, *values])

    results = list(runs.values())
    headlines = [judge(result) for result in results]
    row("method", [f"{r.method}, {r.model.parameters:,} parameters" for r in results])
    row("devices, rounds", [f"{r.devices}, {len(r.rounds)}" for r in results])
    row("accounting", [r.accounting for r in results])
    row("epsilon_server (delta)", [f"{number(h.epsilon_server)} ({number(h.delta)})" for h in headlines])
    for name, of in (("common test", lambda h: h.common), ("own data", lambda h: h.local)):
        row(f"own models, {name}", [percent(of(h).federated) for h in headlines])
        row(f"alone, {name}", [percent(of(h).alone) for h in headlines])
        row(f"gained, {name}", [points(of(h).gain) for h in headlines])
    row("sent up by a device, a round", [size(_bytes_a_round(r)) for r in results])
    return rows


def write_comparison(title: str, runs: Mapping[str, Result], reports: Mapping[str, Path], path: Path) -> None:
    """The page, whole or not at all.

    :param reports: of each run, where its own report is.

    Raises `StoreError`.
    """
    head, *rows = comparison_rows(runs)
    table = page.Table(head, rows)
    sections = [page.Section("table", "Side by side", "What a device gained, and what it gave away.", [table])]
    for name, result in runs.items():
        sections.append(_of_run(name, result, reports[name]))
    answers = [f"{name}: {answer(judge(result))}" for name, result in runs.items()]
    write_whole(path, page.page(title, sections, answer=answers))


def _of_run(name: str, result: Result, report: Path) -> page.Section:
    headline, xs, detail = judge(result), [row.round for row in result.rounds], result.details
    alone = headline.common.alone
    series = [
        line("own models, common test", xs, [row.accuracy_own_common for row in result.rounds], 0),
        line("global model, common test", xs, [row.accuracy_global for row in result.rounds], 2),
        *([] if alone is None else [line("alone, common test", xs, [alone] * len(xs), 0, dashed=True)]),
    ]
    parts: list[page.PagePart] = [over("Accuracy", series, "No accuracy was measured.", **PERCENT)]
    final = final_by_device(detail.accuracy_own_common, len(detail.devices))
    compared = zip(detail.devices, final, detail.local_only_common, strict=False)
    gains = {device: own - a for device, own, a in compared if own is not None and a is not None}
    if gains:
        parts.append(
            charts.sorted_gains("Gain of each device, common test", list(gains), list(gains.values()), note="")
        )
    parts.append(page.Prose([privacy_answer(headline, devices=result.devices), f"Its own report: {report}"]))
    return page.Section(f"run-{name.replace(' ', '-')}", name.capitalize(), answer(headline), parts)


def _bytes_a_round(result: Result) -> float | None:
    updates = sum(row.participants for row in result.rounds)
    return result.uplink_bytes / updates if updates else None
