"""`hushfleet reproduce`: a paper's table beside its own numbers, by one command."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hushfleet.aggregator.results.result import write_whole
from hushfleet.errors import BadInput
from hushfleet.simulator.cli import interrupted
from hushfleet.simulator.studies.reproduce import table as tables
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of, missing_data
from hushfleet.simulator.studies.reproduce.estimate import Estimator
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import Recipe, find_recipe, load_paper, load_recipes, paper_names
from hushfleet.simulator.studies.reproduce.report import write_report
from hushfleet.simulator.studies.reproduce.run import Failure, jobs_here, run_cells
from hushfleet.simulator.studies.reproduce.show import listed, print_table, render_page
from hushfleet.simulator.units import shown_time

FAILED = 1
OUT, RUNS = Path("runs/reproduce"), Path("runs/reproduce-cells")
PAGE = Path("docs/reproduction.md")
_REASON_LENGTH = 100

HELP = """Reproduce a paper's table: its cells are run here, and stand beside the paper's own numbers.

Finished cells are kept in OUT/cells and never run again; an interrupted one goes on where it stopped. Published cells
in --results are taken too. The report is OUT/PAPER/TABLE.html, with TABLE.json beside it.

Examples:

`hushfleet reproduce --list --data-dir DIR`

`hushfleet reproduce fedglp-adp --table 1 --dataset fashion-mnist --seeds 1 --data-dir DIR`

`hushfleet reproduce fedglp-adp --table 1 --method fedglp-adp --column eps-2 --quick --data-dir DIR`

`hushfleet reproduce --report`
"""


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
        report: Annotated[bool, typer.Option("--report", help="Write the page of all published cells: --out, by default docs/reproduction.md.")] = False,
        out: Annotated[Path | None, typer.Option(help="Where cells and reports go; default: runs/reproduce.")] = None,
        results: Annotated[Path, typer.Option(help="Published cells, which count as finished.")] = Path("docs/results"),
        runs: Annotated[Path, typer.Option(help="Where cells are while they run.")] = RUNS,
        jobs: Annotated[int, typer.Option(min=0, help="Cells at a time; 0: by cores and free memory.")] = 0,
        max_cells: Annotated[int | None, typer.Option(min=0, help="Run at most so many; 0 only makes the report.")] = None,
        runtime: Annotated[str, typer.Option(help="Instead of the quickest here.")] = "",
        show_task: Annotated[bool, typer.Option("--show-task", help="Print the first cell's task file and stop.")] = False,
    ) -> None:  # fmt: skip
        console = Console()
        if report:
            _write_page(Kept(results), out or PAGE, console)
            return
        out = out or OUT
        kept = Kept(out, results)
        if list_all or paper is None:
            console.print(listed(_listed([paper] if paper else paper_names(), kept, seeds, quick, data_dir, console)))
            return
        recipe = find_recipe(paper, table=table, figure=figure)
        if recipe.open:
            claim = f" The paper says: {recipe.claim}" if recipe.claim else ""
            raise BadInput(f"{paper}, {recipe.label} ({recipe.title}) cannot be run: {recipe.open}.{claim}")
        only = {"datasets": dataset or (), "methods": method or (), "columns": column or (), "readings": reading or ()}
        cells = cells_of(recipe, seeds=seeds, quick=quick, **only)
        if not cells:
            raise BadInput("there is no such cell")
        if show_task:
            typer.echo(json.dumps(cells[0].plain, indent=1))
            return
        missing = missing_data({cell.data_set for cell in cells}, data_dir)
        for name, why in missing.items():
            console.print(f"[yellow]{name} is not here[/]: {escape(why)}", highlight=False)
        failures: dict[str, str] = {}
        waiting = to_run(cells, kept, missing)[:max_cells]
        try:
            jobs = min(jobs_here(jobs), max(1, len(waiting)))
            with _Shown(waiting, kept, jobs, console) as shown:
                for cell, outcome in run_cells(
                    waiting, kept, runs=runs, jobs=jobs, data_dir=data_dir, runtime=runtime, watch=shown.watch
                ):
                    if isinstance(outcome, Failure):
                        failures[cell.key] = outcome.error
                        shown.ended(cell, f"[red]failed[/] {escape(cell.label)}: {escape(outcome.error)}")
                    else:
                        value = outcome.value(cell.metric, recipe.window)
                        reached = "not measured" if value is None else f"{100 * value:.2f} %"
                        shown.ended(cell, f"{escape(cell.label)}: {reached} after {shown_time(outcome.seconds)}")
        except KeyboardInterrupt:
            raise interrupted(console, shlex.join(["hushfleet", *sys.argv[1:]])) from None
        finally:
            progress = tables.Progress(kept, missing, _estimates(cells, kept), failures)
            _report(tables.make_table(recipe, cells, progress, quick=quick), out, console)
        if failures:
            raise typer.Exit(FAILED)


def to_run(cells: Sequence[Cell], kept: Kept, missing: Mapping[str, str]) -> list[Cell]:
    """Those that are neither finished nor open; one of several that are the same run."""
    waiting: dict[str, Cell] = {}
    for cell in cells:
        if kept.of(cell) is None and not cell.open and cell.data_set not in missing:
            waiting.setdefault(cell.digest, cell)
    return list(waiting.values())


class _Shown:
    """The bar, with the time that is left, and a line for each cell that has ended.

    :param waiting: all cells that will be run, `jobs` at a time.
    """

    def __init__(self, waiting: Sequence[Cell], kept: Kept, jobs: int, console: Console) -> None:
        self._console, self._jobs = console, jobs
        with console.status("how quick is this machine?"):
            estimator = Estimator(kept)
            self._expected = {cell.key: estimator.seconds(cell) or 0.0 for cell in waiting}
        self._total, self._done = max(sum(self._expected.values()), 1e-9), 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not waiting)
        self._task = self._bar.add_task("", total=self._total)
        self._began = time.monotonic()
        if waiting:
            about = shown_time(self._total / jobs)
            console.print(f"{len(waiting)} cells to run, {jobs} at a time: about {about}", highlight=False)

    def __enter__(self) -> _Shown:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def watch(self, under_way: Sequence[tuple[Cell, int]]) -> None:
        done = self._done + sum(self._expected[cell.key] * min(1.0, at / cell.rounds) for cell, at in under_way)
        gone, share = time.monotonic() - self._began, done / self._total
        # The estimate until there is something to judge it by.
        left = gone * (1 - share) / share if share > 0.02 else self._total * (1 - share) / self._jobs
        names = "; ".join(f"{cell.label} ({at}/{cell.rounds})" for cell, at in under_way[:2])
        self._bar.update(self._task, completed=done, description=f"{names}; {shown_time(left)} left")

    def ended(self, cell: Cell, words: str) -> None:
        self._done += self._expected[cell.key]
        self._console.print(words, highlight=False)


def _write_page(kept: Kept, page: Path, console: Console) -> None:
    for sentence, reason in write_report(kept, page).left_out:
        console.print(f"[yellow]left out[/], since {escape(reason)}: {escape(sentence)}", highlight=False)
    console.print(f"page    {page}", highlight=False)


def _report(table: tables.PaperTable, out: Path, console: Console) -> None:
    recipe, paper = table.recipe, load_paper(table.recipe.paper)
    print_table(console, table, paper.name)
    path = out / recipe.paper / (f"{recipe.name}-quick" if table.quick else recipe.name)
    write_whole(path.with_suffix(".json"), json.dumps(table.to_plain(), indent=1, allow_nan=False) + "\n")
    write_whole(path.with_suffix(".html"), render_page(table, paper))
    console.print(f"report  {path.with_suffix('.html')}\nresult  {path.with_suffix('.json')}", highlight=False)


def _estimates(cells: Iterable[Cell], kept: Kept) -> dict[str, float]:
    estimator = Estimator(kept)
    waiting = [cell for cell in cells if kept.of(cell) is None]
    return {cell.digest: seconds for cell in waiting if (seconds := estimator.seconds(cell)) is not None}


def _listed(
    papers: Sequence[str], kept: Kept, seeds: int, quick: bool, data_dir: Path | None, console: Console
) -> list[tuple[str, list[list[str]]]]:
    def line(recipe: Recipe) -> list[str]:
        if recipe.open:
            return [recipe.label, recipe.title, "", "", recipe.open]
        cells = cells_of(recipe, seeds=seeds, quick=quick)
        missing = missing_data({cell.data_set for cell in cells}, data_dir)
        left = [cell for cell in cells if kept.of(cell) is None]
        seconds = sum(_estimates(to_run(left, kept, missing), kept).values())
        lacking = [*recipe.needs, *(f"{name}: not at hand" for name in missing)]
        lacking += [_short(cell.open) for cell in left if cell.open]
        done, time_left = f"{len(cells) - len(left)}/{len(cells)}", shown_time(seconds) if seconds else ""
        return [recipe.label, recipe.title, done, time_left, "; ".join(dict.fromkeys(lacking))]

    with console.status("how quick is this machine?"):
        return [(f"{name}: {load_paper(name).source}", [line(each) for each in load_recipes(name)]) for name in papers]


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 3] + "..."
