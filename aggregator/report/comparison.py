"""Compares runs: what a device gained, and what it revealed. The terminal and the page show the same table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

from rich.table import Table as TerminalTable

from hushfleet.aggregator.report import page, sections
from hushfleet.aggregator.report.readable import epsilon_number, from_to, gained, number, size, spread
from hushfleet.aggregator.report.tables import PageCell, Table, terminal_table
from hushfleet.aggregator.report.verdict import VERDICTS, Headline, judge
from hushfleet.aggregator.report.words import sentences
from hushfleet.aggregator.results.gains import Gain, GainVerdict, MeanAccuracies, shared_model
from hushfleet.aggregator.results.result import Result, last_metrics, write_whole
from hushfleet.errors import BadInput
from hushfleet.privacy.protection import protection

TESTS = ("common test", "own data")
"""The tests of a headline's first two rows."""
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


def load_runs(folders: Sequence[Path], held: Mapping[Path, Result] = MappingProxyType({})) -> dict[str, Result]:
    """Returns the results in `run_folders`. Raises `BadInput`.

    :param held: results by folder that are not read: their folders are gone.
    """
    return {
        name: held.get(folder) or Result.load(folder / "result.json") for name, folder in run_folders(folders).items()
    }


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


def comparison(runs: Mapping[str, Result]) -> Table:
    """Returns a row for each quantity that is compared, a column for each configuration.

    If all runs differ only by their seed, each run is a column, and their mean is one more. A mean accuracy has the
    standard deviation over seeds, a mean gain its standard error.
    """
    groups = configurations(runs)
    if len(groups) == 1 < len(runs):
        shown = [{name: result} for name, result in runs.items()]
        columns, names = [*shown, dict(runs)], [*runs, f"mean of {len(runs)} seeds"]
    else:
        columns = shown = groups
        names = [next(iter(each)) + (f", {len(each)} seeds" if len(each) > 1 else "") for each in columns]
    firsts = [next(iter(each.values())) for each in columns]
    headlines = [[judge(result) for result in each.values()] for each in columns]
    differences = task_differences([next(iter(each.values())) for each in shown])
    if any(len(each) > 1 for each in shown):
        differences.pop("seed", None)
    if len({result.method for result in firsts}) > 1:
        differences.pop("method.name", None)  # it has a row of its own, without the path of a method's file
    epsilons = [
        max((h.epsilon_server for h in each if h.epsilon_server is not None), default=None) for each in headlines
    ]
    rounds = [from_to([len(result.rounds) for result in each.values()]) for each in columns]  # `patience` may end it
    rows: dict[str, Iterable[str]] = {
        "method": (result.method for result in firsts),
        "parameters": (f"{result.model.parameters:,}" for result in firsts),
        "devices, rounds": (f"{result.devices}, {count}" for result, count in zip(firsts, rounds, strict=True)),
        "trust model": (each[0].trust for each in headlines),
        "epsilon_server (delta)": (
            f"{epsilon_number(e)} ({number(each[0].delta)})" for e, each in zip(epsilons, headlines, strict=True)
        ),
        "against the server": ("" if epsilon is None else protection(epsilon) for epsilon in epsilons),
    }
    if len(differences) <= MOST_DIFFERENCES:
        rows |= {f"task: {key}": [*values, ""][: len(columns)] for key, values in differences.items()}
    reached = [_global_model(list(each.values())) for each in columns]
    rows[f"global model, {TESTS[0]}"] = (spread(scores) for scores, _ in reached)
    for name in dict.fromkeys(name for _, metrics in reached for name in metrics):
        rows[f"global model, {name}"] = (number(metrics.get(name)) for _, metrics in reached)
    if any(each[0].own_heads for each in headlines):
        rows["tested, common test"] = (each[0].rows[0].model for each in headlines)
    for n, where in enumerate(TESTS):
        tests = [[headline.rows[n].found for headline in each] for each in headlines]
        pooled = [(_gain(each), _verdict(each)) for each in tests]
        rows[f"federated, {where}"] = (spread([one.federated for one in each]) for each in tests)
        rows[f"alone, {where}"] = (spread([one.local_only for one in each]) for each in tests)
        rows[f"gained, {where}"] = [PageCell(gained(gain), verdict or "") for gain, verdict in pooled]
        rows[f"verdict, {where}"] = [PageCell(VERDICTS[verdict], verdict or "") for _, verdict in pooled]
    sent = [[count for result in each.values() if (count := _bytes_a_round(result))] for each in columns]
    rows["sent up by a device, a round"] = (size(fmean(each) if each else None) for each in sent)
    return Table(["", *names], [[name, *values] for name, values in rows.items()])


def _global_model(results: Sequence[Result]) -> tuple[list[float], dict[str, float]]:
    """Returns the last scores of the global model on the common test, and the means of the task's own metrics."""
    scores = [score for result in results if (score := shared_model(result).federated) is not None]
    found: dict[str, list[float]] = {}
    for result in results:
        for name, last in last_metrics(result.rounds).items():
            if last is not None:
                found.setdefault(name, []).append(last)
    return scores, {name: fmean(values) for name, values in found.items()}


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
    """Returns the comparison for a terminal."""
    table = comparison(runs)
    return terminal_table(replace(table, names=len(table.head)), title=title)


def comparison_json(runs: Mapping[str, Result]) -> dict[str, Any]:
    """Returns the comparison for scripts; values that were not measured are None, an infinite epsilon is infinite."""
    headlines = {name: judge(result) for name, result in runs.items()}
    return {
        "runs": {
            name: {
                "task": result.task,
                "method": result.method,
                "seed": result.seed,
                "devices": result.devices,
                "rounds": len(result.rounds),
                "epsilon_server": headlines[name].epsilon_server,
                "epsilon_release": headlines[name].epsilon_release,
                "delta": headlines[name].delta,
                "uplink_bytes": result.uplink_bytes,
                **_tests([headlines[name]]),
            }
            for name, result in runs.items()
        },
        "seeds": [
            {"runs": list(group), **_tests([headlines[name] for name in group])}
            for group in configurations(runs)
            if len(group) > 1
        ],
        "task_differences": task_differences(list(runs.values())),
    }


def _tests(headlines: Sequence[Headline]) -> dict[str, dict[str, Any]]:
    """Returns what one run reached on each test, or means and deviations of runs that differ only by their seed."""
    figures = {}
    for n, where in enumerate(TESTS):
        found = [headline.rows[n].found for headline in headlines]
        means = {key: [v for each in found if (v := getattr(each, name)) is not None] for key, name in _MEANS.items()}
        gain, federated = _gain(found), means["federated"]
        figures[where.replace(" ", "_")] = {
            "models": headlines[0].rows[n].model,
            **{name: fmean(values) if values else None for name, values in means.items()},
            "deviation": stdev(federated) if len(federated) > 1 else None,
            "gain": gain.mean if gain else None,
            "standard_error": gain.standard_error if gain else None,
            "verdict": _verdict(found),
        }
    scores, metrics = _global_model([headline.result for headline in headlines])
    of_global = {"global": fmean(scores) if scores else None, "global_metrics": metrics}
    return figures | {"common_test": {**of_global, **figures["common_test"]}}


_MEANS = {"federated": "federated", "alone": "local_only", "chance": "chance"}


def task_differences(results: Sequence[Result]) -> dict[str, list[str]]:
    """Returns the task keys in which runs differ, and each run's value; empty if a result does not contain its task.

    The same data at another path are no difference: each run of a program has a `data.npz` of its own.
    """
    tasks = [_keys(result) for result in results]
    if not all(tasks):
        return {}
    values = {
        key: [task.get(key, "\N{EN DASH}") for task in tasks] for key in dict.fromkeys(k for t in tasks for k in t)
    }
    data = [_data(result, task) for result, task in zip(results, tasks, strict=True)]
    if data[0] and all(each == data[0] for each in data):
        values.pop("data.path", None)
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _data(result: Result, task: Mapping[str, str]) -> list[Any]:
    """Returns what tells data apart: the digests of samples and, if the data name devices, what each of them holds."""
    names = ("training images", "test images")
    digests = [result.rerun.digests[name] for name in names if result.rerun and name in result.rerun.digests]
    given = digests and task.get("data.partition") == '"given"'
    return [*digests, result.details.label_counts, result.details.local_test_images] if given else digests


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


def write_comparison(
    title: str, runs: Mapping[str, Result], reports: Mapping[str, str], path: Path, *, seen: Path | None = None
) -> None:
    """Writes the page completely or not at all.

    :param reports: the place of each run's own report.
    :param seen: the picture of `hushfleet invert`, if there is one.

    Raises `StoreError`.
    """
    parts = [page.Section("table", "Side by side", "What a board gained, and what it gave away.", [comparison(runs)])]
    if png := sections.read_picture(seen):
        shown = sections.ShownRun(*next((result, judge(result)) for result in runs.values()), seen=png)
        parts += filter(None, [sections.ReportSection("seen", (sections.seen,)).of(shown)])
    answers = []
    for number_of_run, (name, result) in enumerate(runs.items()):
        headline = judge(result)
        verdict, *others = sentences(result, headline).values()
        answers.append(f"{name}: {verdict}")
        shown = sections.ShownRun(result, headline)
        plots = [
            next(part for part in found.parts if isinstance(part, page.Plot))
            for group in (sections.accuracy, sections.devices_against_local_only)
            if (found := sections.ReportSection("", (group,)).of(shown)) is not None
        ]
        prose = page.Prose([*others, f"All of it: {reports[name]}"])
        parts.append(page.Section(f"run-{number_of_run}", name, verdict, [*plots, prose]))
    write_whole(path, page.page(title, parts, answer=answers))


def _bytes_a_round(result: Result) -> float | None:
    # includes rounds with too few updates for a model, because their bytes are counted
    updates = sum(result.details.rounds_accepted) or sum(row.participants for row in result.rounds)
    return result.uplink_bytes / updates if updates and result.uplink_bytes else None
