"""`hushfleet reproduce`: a paper's table beside its own numbers, by one command."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hushfleet.aggregator.results.result import write_whole
from hushfleet.errors import BadInput
from hushfleet.simulator.engines.clock.cli import shown_time
from hushfleet.simulator.studies.reproduce.at_hand import missing_data
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of
from hushfleet.simulator.studies.reproduce.crew import Failure, Job, jobs_here, run_cells
from hushfleet.simulator.studies.reproduce.estimate import Estimator
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.page import render_page
from hushfleet.simulator.studies.reproduce.recipe import Entry, load_entries, load_entry, load_paper, paper_names
from hushfleet.simulator.studies.reproduce.shown import listed, print_table
from hushfleet.simulator.studies.reproduce.table import make_table

INTERRUPTED, FAILED = 130, 1
RUNS = Path("runs/reproduce-cells")

HELP = """Reproduce a paper's table: its cells are run here, and stand beside the paper's own numbers.

Finished cells are kept in OUT/cells and never run again; an interrupted one goes on where it stopped. Published cells
in --results are taken too. The report is OUT/PAPER/TABLE.html, with TABLE.json beside it.

Examples:

`hushfleet reproduce --list --data-dir DIR`

`hushfleet reproduce fedglp-adp --table 1 --dataset fashion-mnist --seeds 1 --data-dir DIR`

`hushfleet reproduce fedglp-adp --table 1 --method fedglp-adp --column eps-2 --quick --data-dir DIR`
"""


@dataclass(frozen=True)
class Wish:
    """Which cells of a table are asked for."""

    seeds: int
    quick: bool
    datasets: Sequence[str] = ()
    methods: Sequence[str] = ()
    columns: Sequence[str] = ()
    readings: Sequence[str] = ()

    def cells(self, entry: Entry) -> list[Cell]:
        return cells_of(
            entry,
            seeds=self.seeds,
            quick=self.quick,
            datasets=self.datasets,
            methods=self.methods,
            columns=self.columns,
            readings=self.readings,
        )


def register(app: typer.Typer) -> None:
    """Adds the command `reproduce`."""

    @app.command("reproduce", help=HELP)
    def reproduce_command(
        paper: Annotated[str | None, typer.Argument(help="See --list.")] = None,
        list_all: Annotated[bool, typer.Option("--list", help="All tables and figures: cells, time, what is missing.")] = False,
        table: Annotated[str | None, typer.Option(help="Its number in the paper.")] = None,
        figure: Annotated[str | None, typer.Option(help="Or a figure's.")] = None,
        dataset: Annotated[list[str] | None, typer.Option(help="Only this row group; may be repeated.")] = None,
        method: Annotated[list[str] | None, typer.Option(help="Only this row; may be repeated.")] = None,
        column: Annotated[list[str] | None, typer.Option(help="Only this column; may be repeated.")] = None,
        reading: Annotated[list[str] | None, typer.Option(help="Only this reading of the paper; may be repeated.")] = None,
        seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ...")] = 3,
        quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds and less data; labelled so, and never mixed with the others.")] = False,
        data_dir: Annotated[Path | None, typer.Option(help="Where the data sets are; default: download.")] = None,
        out: Annotated[Path, typer.Option(help="Where cells and reports go.")] = Path("runs/reproduce"),
        results: Annotated[Path, typer.Option(help="Published cells, which count as finished.")] = Path("docs/results"),
        runs: Annotated[Path, typer.Option(help="Where cells are while they run.")] = RUNS,
        jobs: Annotated[int, typer.Option(min=0, help="Cells at a time; 0: by cores and free memory.")] = 0,
        max_cells: Annotated[int | None, typer.Option(min=0, help="Run at most so many; 0 only makes the report.")] = None,
        runtime: Annotated[str, typer.Option(help="Instead of the quickest here.")] = "",
        show_task: Annotated[bool, typer.Option("--show-task", help="Print the first cell's task file and stop.")] = False,
    ) -> None:  # fmt: skip
        console = Console()
        wish = Wish(seeds, quick, dataset or (), method or (), column or (), reading or ())
        kept = Kept(out, results)
        if list_all or paper is None:
            console.print(listed(_listed(paper, wish, kept, data_dir, console)))
            return
        entry = _entry(paper, table, figure)
        cells = wish.cells(entry)
        if show_task:
            typer.echo(json.dumps(_first(cells).plain, indent=1))
            return
        missing = missing_data({cell.plain["data"]["name"] for cell in cells}, data_dir) if cells else {}
        _tell_missing(console, missing)
        failures: dict[str, str] = {}
        try:
            failures = _run(cells, kept, missing, max_cells, runs, jobs_here(jobs), data_dir, runtime, console)
        except KeyboardInterrupt:
            console.print(
                f"\n[bold]interrupted[/]; nothing is lost. Go on with:\n  {escape(_typed())}",
                highlight=False,
                soft_wrap=True,
            )
            raise typer.Exit(INTERRUPTED) from None
        finally:
            _report(entry, cells, kept, missing, failures, wish, out, console)
        if failures:
            raise typer.Exit(FAILED)


def _entry(paper: str, table: str | None, figure: str | None) -> Entry:
    entries = load_entries(paper)
    if (table is None) == (figure is None):
        if table is None and len(entries) == 1:
            return entries[0]
        raise BadInput(f"give one of --table and --figure; {paper} has {', '.join(e.label for e in entries)}")
    entry = load_entry(paper, "table" if table else "figure", table or figure or "")
    if entry.recipe.open:
        claim = f" The paper says: {entry.recipe.claim}" if entry.recipe.claim else ""
        raise BadInput(f"{paper}, {entry.label} ({entry.recipe.title}) cannot be run: {entry.recipe.open}.{claim}")
    return entry


def _first(cells: Sequence[Cell]) -> Cell:
    if not cells:
        raise BadInput("there is no such cell")
    return cells[0]


def _tell_missing(console: Console, missing: Mapping[str, str]) -> None:
    for name, why in missing.items():
        console.print(f"[yellow]{name} is not here[/]: {escape(why)}", highlight=False)


def _typed() -> str:
    return shlex.join(["hushfleet", *sys.argv[1:]])


def to_run(cells: Sequence[Cell], kept: Kept, missing: Mapping[str, str]) -> list[Cell]:
    """Those that are neither finished nor open; one of several that are the same run."""
    waiting: dict[str, Cell] = {}
    for cell in cells:
        if kept.of(cell) is None and not cell.open and cell.plain["data"]["name"] not in missing:
            waiting.setdefault(cell.digest, cell)
    return list(waiting.values())


def _run(
    cells: Sequence[Cell],
    kept: Kept,
    missing: Mapping[str, str],
    most: int | None,
    runs: Path,
    jobs: int,
    data_dir: Path | None,
    runtime: str,
    console: Console,
) -> dict[str, str]:
    """Runs them; gives the errors of those that failed."""
    waiting = to_run(cells, kept, missing)[:most]
    if not waiting:
        return {}
    with console.status("how quick is this machine?"):
        estimator = Estimator(kept)
        expected = {cell.key: estimator.seconds(cell) or 0.0 for cell in waiting}
    total = sum(expected.values())
    console.print(
        f"{len(waiting)} cells to run, {jobs} at a time: about {shown_time(total / min(jobs, len(waiting)))}",
        highlight=False,
    )
    failures: dict[str, str] = {}
    began, done_s = time.monotonic(), 0.0
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        bar = progress.add_task("", total=max(total, 1e-9))

        def watch(under_way: Sequence[Job]) -> None:
            part = sum(_share(job) * expected[job.cell.key] for job in under_way)
            gone, share = time.monotonic() - began, (done_s + part) / max(total, 1e-9)
            # The estimate until there is something to judge it by.
            left = gone * (1 - share) / share if share > 0.02 else total * (1 - share) / jobs
            names = "; ".join(
                f"{job.cell.label} ({job.rounds_done}/{_rounds(job)})" for job in list(under_way)[:2]
            )
            progress.update(bar, completed=done_s + part, description=f"{names}; {shown_time(left)} left")

        for cell, outcome in run_cells(
            waiting, kept, runs=runs, jobs=jobs, data_dir=data_dir, runtime=runtime, watch=watch
        ):
            done_s += expected[cell.key]
            if isinstance(outcome, Failure):
                failures[cell.key] = outcome.error
                console.print(f"[red]failed[/] {escape(cell.label)}: {escape(outcome.error)}", highlight=False)
            else:
                value = outcome.value(cell.metric, cell.entry.recipe.window)
                shown = "not measured" if value is None else f"{100 * value:.2f} %"
                console.print(
                    f"{escape(cell.label)}: {shown} after {shown_time(outcome.seconds)}", highlight=False
                )
    return failures


def _rounds(job: Job) -> int:
    return int(job.cell.plain["round"]["rounds"])


def _share(job: Job) -> float:
    return min(1.0, job.rounds_done / _rounds(job))


def _report(
    entry: Entry,
    cells: Sequence[Cell],
    kept: Kept,
    missing: Mapping[str, str],
    failures: Mapping[str, str],
    wish: Wish,
    out: Path,
    console: Console,
) -> None:
    estimates = _estimates(cells, kept, missing)
    table = make_table(
        entry, cells, kept, quick=wish.quick, missing=missing, estimates=estimates, failures=failures
    )
    paper = load_paper(entry.paper)
    print_table(console, table, paper.name)
    path = out / entry.paper / (f"{entry.name}-quick" if wish.quick else entry.name)
    write_whole(path.with_suffix(".json"), json.dumps(table.to_plain(), indent=1, allow_nan=False) + "\n")
    write_whole(path.with_suffix(".html"), render_page(table, paper))
    console.print(f"report  {path.with_suffix('.html')}\nresult  {path.with_suffix('.json')}", highlight=False)


def _estimates(cells: Iterable[Cell], kept: Kept, missing: Mapping[str, str]) -> dict[str, float]:
    estimator = Estimator(kept)
    waiting = [cell for cell in cells if kept.of(cell) is None and not cell.open]
    return {cell.digest: seconds for cell in waiting if (seconds := estimator.seconds(cell)) is not None}


def _listed(
    paper: str | None, wish: Wish, kept: Kept, data_dir: Path | None, console: Console
) -> list[tuple[str, list[list[str]]]]:
    names = [paper] if paper else paper_names()
    shown = []
    with console.status("how quick is this machine?"):
        for name in names:
            lines = [_line(entry, wish, kept, data_dir) for entry in load_entries(name)]
            shown.append((f"{name}: {load_paper(name).source}", lines))
    return shown


def _line(entry: Entry, wish: Wish, kept: Kept, data_dir: Path | None) -> list[str]:
    recipe = entry.recipe
    if recipe.open:
        return [entry.label, recipe.title, "", "", recipe.open]
    cells = cells_of(entry, seeds=wish.seeds, quick=wish.quick)
    missing = missing_data({cell.plain["data"]["name"] for cell in cells}, data_dir)
    done = sum(kept.of(cell) is not None for cell in cells)
    waiting = to_run(cells, kept, missing)
    estimates = _estimates(waiting, kept, {})
    lacking = [*recipe.needs, *(f"{name}: not at hand" for name in missing)]
    reasons = dict.fromkeys(cell.open for cell in cells if cell.open and kept.of(cell) is None)
    lacking += [_short(reason) for reason in reasons]
    return [
        entry.label,
        recipe.title,
        f"{done}/{len(cells)}",
        shown_time(sum(estimates.values())) if estimates else "",
        "; ".join(dict.fromkeys(lacking)),
    ]


def _short(reason: str) -> str:
    return reason if len(reason) <= 100 else reason[:97] + "..."
