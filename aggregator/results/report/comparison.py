"""Runs side by side: what a device gained, and what it gave away. One table for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table as TerminalTable

from hushfleet.aggregator.results.gains import Comparison, Gain
from hushfleet.aggregator.results.report import page, sections
from hushfleet.aggregator.results.report.page import Cell, Table
from hushfleet.aggregator.results.report.terminal import terminal_table
from hushfleet.aggregator.results.report.verdict import (
    VERDICTS,
    answer,
    further_answers,
    judge,
)
from hushfleet.aggregator.results.report.words import gained, number, percent, size
from hushfleet.aggregator.results.result import Result, write_whole
from hushfleet.errors import BadInput
from hushfleet.privacy.protection import protection
from hushfleet.privacy.terms import TRUST

MOST_DIFFERENCES = 8
"""Tasks that differ in more keys are different tasks."""


def load_runs(folders: Sequence[Path]) -> dict[str, Result]:
    """The results of run folders, by their folders' names, or whole paths where two have the same name.

    Raises `BadInput`, also for a run that is given twice.
    """
    places = [folder.resolve() for folder in folders]
    if len(set(places)) < len(places):
        raise BadInput(f"{', '.join(map(str, folders))}: give each run once")
    names = [place.name for place in places]
    unique = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    return {name: Result.load(folder / "result.json") for name, folder in zip(unique, folders, strict=True)}


def comparison_rows(runs: Mapping[str, Result]) -> list[list[str]]:
    """A heading row with the runs' names, then a row for each thing that is compared.

    Runs that differ by their seed alone have a column more: the mean over seeds, and of gains its standard error.
    """
    results = list(runs.values())
    headlines = [judge(result) for result in results]
    alike, differences = differ_by_seed(results), task_differences(results)
    if len({result.method for result in results}) > 1:
        differences.pop("method.name", None)  # has a row of its own, without the path of a method in a file
    rows: list[list[str]] = [
        ["", *runs],
        ["method", *(result.method for result in results)],
        ["parameters", *(f"{result.model.parameters:,}" for result in results)],
        ["devices, rounds", *(f"{result.devices}, {len(result.rounds)}" for result in results)],
        ["trust model", *(result.trust or TRUST[result.accounting] for result in results)],
        ["epsilon_server (delta)", *(f"{number(h.epsilon_server)} ({number(h.delta)})" for h in headlines)],
        ["against the server", *(_protection(h.epsilon_server) for h in headlines)],
        *([f"task: {key}", *values] for key, values in differences.items() if len(differences) <= MOST_DIFFERENCES),
    ]
    for where, each in (
        ("common test", [headline.common for headline in headlines]),
        ("own data", [headline.local for headline in headlines]),
    ):
        federated, alone = ([getattr(one, name) for one in each] for name in ("federated", "alone"))
        gains = [one.gain.mean if one.gain else None for one in each]
        for name, cells, values, form in (
            ("federated", [percent(value) for value in federated], federated, _percent),
            ("alone", [percent(value) for value in alone], alone, _percent),
            ("gained", [Cell(gained(one.gain), one.verdict or "") for one in each], gains, gained),
        ):
            mean = Gain.of([value for value in values if value is not None])
            rows.append([f"{name}, {where}", *cells, *([form(mean)] if alike else [])])
        rows.append([f"verdict, {where}", *(Cell(VERDICTS[one.verdict], one.verdict or "") for one in each)])
    rows.append(["sent up by a device, a round", *(size(_bytes_a_round(result)) for result in results)])
    if alike:
        rows[0].append(f"mean of {len(results)} seeds")
    return [[*row, *[""] * (len(rows[0]) - len(row))] for row in rows]


def comparison_table(runs: Mapping[str, Result], *, title: str) -> TerminalTable:
    """The rows for a terminal."""
    head, *rows = comparison_rows(runs)
    return terminal_table(Table(head, rows, names=len(head)), title=title)


def comparison_json(runs: Mapping[str, Result]) -> dict[str, Any]:
    """For scripts; what was not measured is None, an infinite epsilon is infinite."""
    found = {}
    for name, result in runs.items():
        headline = judge(result)
        tests = {"common_test": headline.common, "own_data": headline.local}
        found[name] = {
            "task": result.task,
            "method": result.method,
            "seed": result.seed,
            "devices": result.devices,
            "rounds": len(result.rounds),
            "epsilon_server": headline.epsilon_server,
            "epsilon_release": headline.epsilon_release,
            "delta": headline.delta,
            "uplink_bytes": result.uplink_bytes,
            **{where: _plain(each) for where, each in tests.items()},
        }
    return {"runs": found, "task_differences": task_differences(list(runs.values()))}


def task_differences(results: Sequence[Result]) -> dict[str, list[str]]:
    """The keys of the tasks in which runs differ, and each run's value; empty where a file does not say its task."""
    tasks = [_keys(result) for result in results]
    if not all(tasks):
        return {}
    values = {
        key: [task.get(key, "\N{EN DASH}") for task in tasks] for key in dict.fromkeys(k for t in tasks for k in t)
    }
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def differ_by_seed(results: Sequence[Result]) -> bool:
    """Whether these are repetitions of one run with other seeds."""
    return (
        len(results) > 1
        and task_differences(results).keys() == {"seed"}
        and (len({result.seed for result in results}) == len(results))
    )


def _keys(result: Result) -> dict[str, str]:
    lines = result.rerun.task.splitlines() if result.rerun else []
    return {key: value for key, _, value in (line.partition(" = ") for line in lines)}


def _percent(mean: Gain | None) -> str:
    return percent(None if mean is None else mean.mean)


def _protection(epsilon: float | None) -> str:
    return "" if epsilon is None else protection(epsilon)


def _plain(each: Comparison) -> dict[str, Any]:
    gain = each.gain
    return {
        "federated": each.federated,
        "alone": each.alone,
        "gain": gain.mean if gain else None,
        "standard_error": gain.standard_error if gain else None,
        "chance": each.chance,
        "verdict": each.verdict,
    }


def write_comparison(
    title: str, runs: Mapping[str, Result], reports: Mapping[str, str], path: Path, *, seen: Path | None = None
) -> None:
    """The page, whole or not at all.

    :param reports: of each run, where its own report is.
    :param seen: the picture of `hushfleet invert`, where there is one.

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
        charts = (sections.accuracy(result, headline), sections.devices_against_alone(result, headline))
        shown = [section.parts[0] for chart in charts if (section := page.present(chart)) is not None]
        prose = page.Prose([*further_answers(result, headline), f"All of it: {reports[name]}"])
        parts.append(page.Section(f"run-{number_of_run}", name, verdict, [*shown, prose]))
    if png := sections.read_picture(seen):
        parts.insert(1, sections.seen(png))
    write_whole(path, page.page(title, parts, answer=answers))


def _bytes_a_round(result: Result) -> float | None:
    updates = sum(row.participants for row in result.rounds)
    return result.uplink_bytes / updates if updates and result.uplink_bytes else None
