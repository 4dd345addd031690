"""Does the work of `hushfleet reproduce`: chooses cells, shows the progress, and writes the results at the end."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.progress import show_progress
from hushfleet.aggregator.report.readable import format_seconds
from hushfleet.aggregator.results.result import write_whole
from hushfleet.errors import BadInput
from hushfleet.progress import doing
from hushfleet.simulator.command import interrupted
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of, missing_data
from hushfleet.simulator.studies.reproduce.draw import draw
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.options import ReproduceOptions
from hushfleet.simulator.studies.reproduce.recipe import Recipe, load_paper
from hushfleet.simulator.studies.reproduce.report import write_report
from hushfleet.simulator.studies.reproduce.run import Failure, Shares, run_cells
from hushfleet.simulator.studies.reproduce.show import print_table
from hushfleet.simulator.studies.reproduce.table import CellProgress, PaperTable, make_table

FAILED = 1


def run_table(recipe: Recipe, out: Path, options: ReproduceOptions) -> None:
    """Runs the chosen cells of a table that are not finished, and shows the table, also after an interruption."""
    cells = cells_of(
        recipe,
        seeds=options.seeds,
        quick=options.quick,
        datasets=options.dataset,
        methods=options.method,
        columns=options.column,
        readings=options.reading,
    )
    if not cells:
        raise BadInput("there is no such cell")
    if options.show_task:
        typer.echo(json.dumps(cells[0].plain, indent=1))
        return
    console = Console()
    kept, missing = Kept(out, options.published), missing_data({cell.data_set for cell in cells}, options.data_dir)
    for name, why in missing.items():
        console.print(f"[yellow]{name} is not here[/]: {escape(why)}", highlight=False)
    failures: dict[str, str] = {}
    waiting = to_run(cells, kept, missing)[: options.max_cells]
    try:
        _run(waiting, kept, options, failures, console)
    except KeyboardInterrupt:
        raise interrupted(console, shlex.join(["hushfleet", *sys.argv[1:]])) from None
    finally:
        progress = CellProgress(kept, missing, failures)
        report(make_table(recipe, cells, progress, quick=options.quick), out, console)
    if failures:
        raise typer.Exit(FAILED)


def to_run(cells: Sequence[Cell], kept: Kept, missing: Mapping[str, str]) -> list[Cell]:
    """Chooses the cells that are neither finished nor open and have their data; only one of cells that share a run."""
    waiting: dict[str, Cell] = {}
    for cell in cells:
        if kept.of(cell) is None and not cell.open and cell.data_set not in missing:
            waiting.setdefault(cell.digest, cell)
    return list(waiting.values())


def _run(
    waiting: Sequence[Cell], kept: Kept, options: ReproduceOptions, failures: dict[str, str], console: Console
) -> None:
    """Runs cells, and shows how many have ended, and the remaining time if all are of one kind (one row of one group).

    :param failures: gets the errors of cells that fail, by key.
    """
    shares = Shares.of(len(waiting), asked=options.jobs)
    if waiting:
        console.print(f"{len(waiting)} cells to run, {shares.jobs} at a time", highlight=False)
    alike = len({(cell.group.id, cell.row.id) for cell in waiting}) == 1
    with show_progress(console), doing("cells", total=len(waiting), alike=alike) as work:

        def watch(running: Sequence[tuple[Cell, int]]) -> None:
            names = [f"{cell.label} ({at}/{cell.rounds})" for cell, at in running[:1]]
            work.what = " ".join(["cells:", *names, *([f"and {len(running) - 1} more"] * (len(running) > 1))])

        how: Any = {"runs": options.runs, "shares": shares, "data_dir": options.data_dir, "runtime": options.runtime}
        for cell, outcome in run_cells(waiting, kept, **how, watch=watch):
            if isinstance(outcome, Failure):
                failures[cell.key] = outcome.error
                words = f"[red]failed[/] {escape(cell.label)}: {escape(outcome.error)}"
            else:
                value = outcome.value_of(cell)
                reached = "not measured" if value is None else f"{100 * value:.2f} %"
                words = f"{escape(cell.label)}: {reached} after {format_seconds(outcome.seconds)}"
            work.count()
            console.print(words, highlight=False)


def write_page(results: Path, page: Path) -> None:
    """Writes the page of all published cells."""
    write_report(Kept(results), page)
    Console().print(f"page    {page}", highlight=False, markup=False)


def report(table: PaperTable, out: Path, console: Console) -> None:
    """Prints the table, writes it as JSON, and draws it as a figure if a cell is finished."""
    recipe = table.recipe
    print_table(console, table, load_paper(recipe.paper).name)
    path = out / recipe.paper / (f"{recipe.name}-quick" if table.quick else recipe.name)
    write_whole(path.with_suffix(".json"), json.dumps(table.to_plain(), indent=1, allow_nan=False) + "\n")
    console.print(f"result  {path.with_suffix('.json')}", highlight=False, markup=False)
    if table.done:
        draw(table, path.with_suffix(".svg"))
        console.print(f"figure  {path.with_suffix('.svg')}", highlight=False, markup=False)
