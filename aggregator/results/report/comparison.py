"""Compares runs: what a device gained, and what it revealed. The terminal and the page show the same table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table as TerminalTable

from hushfleet.aggregator.results.gains import Gain, GainVerdict, MeanAccuracies
from hushfleet.aggregator.results.report import page, sections
from hushfleet.aggregator.results.report.page import PageCell, Table
from hushfleet.aggregator.results.report.readable import epsilon_number, from_to, gained, number, size, spread
from hushfleet.aggregator.results.report.terminal import terminal_table
from hushfleet.aggregator.results.report.verdict import (
    VERDICTS,
    ComparedRow,
    answer,
    further_answers,
    judge,
)
from hushfleet.aggregator.results.result import Result, write_whole
from hushfleet.errors import BadInput
from hushfleet.privacy.protection import protection
from hushfleet.privacy.terms import TRUST

MOST_DIFFERENCES = 8
"""Tasks that differ in more keys count as different tasks, and their differences are not listed."""


def run_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """Returns the run folders by name, or by whole path if two have the same name, and the other seeds in each.

    Raises `BadInput` for a run that is given twice.
    """
    places = [folder.resolve() for folder in folders]
    if len(set(places)) < len(places):
        raise BadInput(f"{', '.join(map(str, folders))}: give each run once")
    names = [place.name for place in places]
    unique = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    found = {}
    for name, folder in zip(unique, folders, strict=True):
        found[name] = folder
        seeds = sorted(folder.glob("seeds/*/result.json"), key=lambda path: (len(path.parent.name), path.parent.name))
        found |= {
            f"{name}, seed {path.parent.name}": path.parent for path in seeds if path.parent.resolve() not in places
        }
    return found


def load_runs(folders: Sequence[Path]) -> dict[str, Result]:
    """Returns the results in `run_folders`. Raises `BadInput`."""
    return {name: Result.load(folder / "result.json") for name, folder in run_folders(folders).items()}


def configurations(runs: Mapping[str, Result]) -> list[dict[str, Result]]:
    """Groups runs that differ only by their seed, in the order of each group's first run."""
    found: list[dict[str, Result]] = []
    for name, result in runs.items():
        for group in found:
            if differ_by_seed([*group.values(), result]):
                group[name] = result
                break
        else:
            found.append({name: result})
    return found


def comparison_rows(runs: Mapping[str, Result]) -> list[list[str]]:
    """Returns a heading row with the runs' names, then a row for each quantity that is compared.

    If all runs differ only by their seed, there is one more column, their mean. If some do, each configuration is one
    column. A mean accuracy has the standard deviation over seeds, a mean gain its standard error.
    """
    groups = configurations(runs)
    if len(groups) == 1 < len(runs):
        columns = [*({name: result} for name, result in runs.items()), dict(runs)]
        names = [*runs, f"mean of {len(runs)} seeds"]
    else:
        columns = groups
        names = [next(iter(each)) + (f", {len(each)} seeds" if len(each) > 1 else "") for each in columns]
    firsts = [next(iter(each.values())) for each in columns]
    headlines = [[judge(result) for result in each.values()] for each in columns]
    shown = [each for each in columns if len(columns) == len(groups) or len(each) == 1]
    differences = task_differences([next(iter(each.values())) for each in shown])
    if any(len(each) > 1 for each in shown):
        differences.pop("seed", None)
    if len({result.method for result in firsts}) > 1:
        differences.pop("method.name", None)  # it has a row of its own, without the path of a method's file
    epsilons = [
        max((h.epsilon_server for h in each if h.epsilon_server is not None), default=None) for each in headlines
    ]
    rows: list[list[str]] = [
        ["", *names],
        ["method", *(result.method for result in firsts)],
        ["parameters", *(f"{result.model.parameters:,}" for result in firsts)],
        ["devices, rounds", *(f"{next(iter(each.values())).devices}, {_rounds(each)}" for each in columns)],
        ["trust model", *(result.trust or TRUST[result.accounting] for result in firsts)],
        [
            "epsilon_server (delta)",
            *(f"{epsilon_number(e)} ({number(each[0].delta)})" for e, each in zip(epsilons, headlines, strict=True)),
        ],
        ["against the server", *map(_protection, epsilons)],
        *([f"task: {key}", *values] for key, values in differences.items() if len(differences) <= MOST_DIFFERENCES),
    ]
    if any(each[0].own_heads for each in headlines):
        rows.append(["tested, common test", *(each[0].rows[0].model for each in headlines)])
    for where, tests in (
        ("common test", [[h.common for h in each] for each in headlines]),
        ("own data", [[h.local for h in each] for each in headlines]),
    ):
        gains = [_gain(each) for each in tests]
        verdicts = [_verdict(each) for each in tests]
        rows.append([f"federated, {where}", *(spread([one.federated for one in each]) for each in tests)])
        rows.append([f"alone, {where}", *(spread([one.alone for one in each]) for each in tests)])
        cells = (PageCell(gained(gain), verdict or "") for gain, verdict in zip(gains, verdicts, strict=True))
        rows.append([f"gained, {where}", *cells])
        rows.append([f"verdict, {where}", *(PageCell(VERDICTS[verdict], verdict or "") for verdict in verdicts)])
    sent = [[count for result in each.values() if (count := _bytes_a_round(result))] for each in columns]
    rows.append(["sent up by a device, a round", *(size(fmean(each) if each else None) for each in sent)])
    return [[*row, *[""] * (len(rows[0]) - len(row))] for row in rows]


def _rounds(seeds: Mapping[str, Result]) -> str:
    """Returns the number of rounds, which may differ between seeds, for example with `patience`."""
    return from_to([len(result.rounds) for result in seeds.values()])


def _gain(seeds: Sequence[MeanAccuracies]) -> Gain | None:
    """Returns the gain of one run with the spread over its devices, or of several with the spread over seeds."""
    if len(seeds) == 1:
        return seeds[0].gain
    return Gain.of([each.gain.mean for each in seeds if each.gain])


def _verdict(seeds: Sequence[MeanAccuracies]) -> GainVerdict | None:
    verdicts, gain = {each.verdict for each in seeds}, _gain(seeds)
    if len(seeds) == 1 or gain is None or "nothing" in verdicts:
        return "nothing" if "nothing" in verdicts else seeds[0].verdict
    return gain.outcome


def comparison_table(runs: Mapping[str, Result], *, title: str) -> TerminalTable:
    """Returns the rows for a terminal."""
    head, *rows = comparison_rows(runs)
    return terminal_table(Table(head, rows, names=len(head)), title=title)


def comparison_json(runs: Mapping[str, Result]) -> dict[str, Any]:
    """Returns the comparison for scripts; values that were not measured are None, an infinite epsilon is infinite."""
    found = {}
    for name, result in runs.items():
        headline = judge(result)
        tests = {"common_test": headline.rows[0], "own_data": headline.rows[1]}
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
    groups = [each for each in configurations(runs) if len(each) > 1]
    return {
        "runs": found,
        "seeds": [_seeds(group) for group in groups],
        "task_differences": task_differences(list(runs.values())),
    }


def _seeds(group: Mapping[str, Result]) -> dict[str, Any]:
    """Summarises runs that differ only by their seed: means, deviations, and the mean gain's standard error."""
    headlines = [judge(result) for result in group.values()]
    found: dict[str, Any] = {"runs": list(group)}
    for where, tests in (("common_test", [h.common for h in headlines]), ("own_data", [h.local for h in headlines])):
        gain = _gain(tests)
        known = [each.federated for each in tests if each.federated is not None]
        found[where] = {
            "federated": fmean(known) if known else None,
            "deviation": stdev(known) if len(known) > 1 else None,
            "gain": gain.mean if gain else None,
            "standard_error": gain.standard_error if gain else None,
            "verdict": _verdict(tests),
        }
    return found


def task_differences(results: Sequence[Result]) -> dict[str, list[str]]:
    """Returns the task keys in which runs differ, and each run's value; empty if a result does not contain its task."""
    tasks = [_keys(result) for result in results]
    if not all(tasks):
        return {}
    values = {
        key: [task.get(key, "\N{EN DASH}") for task in tasks] for key in dict.fromkeys(k for t in tasks for k in t)
    }
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def differ_by_seed(results: Sequence[Result]) -> bool:
    """Returns whether these are repetitions of one run with other seeds."""
    return (
        len(results) > 1
        and task_differences(results).keys() == {"seed"}
        and (len({result.seed for result in results}) == len(results))
    )


def _keys(result: Result) -> dict[str, str]:
    lines = result.rerun.task.splitlines() if result.rerun else []
    return {key: value for key, _, value in (line.partition(" = ") for line in lines)}


def _protection(epsilon: float | None) -> str:
    return "" if epsilon is None else protection(epsilon)


def _plain(row: ComparedRow) -> dict[str, Any]:
    each, gain = row.found, row.found.gain
    return {
        "models": row.model,
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
    """Writes the page completely or not at all.

    :param reports: the place of each run's own report.
    :param seen: the picture of `hushfleet invert`, if there is one.

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
    # includes rounds with too few updates for a model, because their bytes are counted
    updates = sum(result.details.rounds_accepted) or sum(row.participants for row in result.rounds)
    return result.uplink_bytes / updates if updates and result.uplink_bytes else None
