"""`hushfleet reproduce`: run a paper's table, and show it beside the paper's own numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.report.options import Option, with_options
from hushfleet.errors import BadInput
from hushfleet.schema import AtLeast1, Count
from hushfleet.simulator.options import DataDir

OUT, RUNS = Path("runs/reproduce"), Path("runs/reproduce-cells")
PAGE = Path("docs/reproduction.md")


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    """Which cells of a paper are run, and how."""

    # fmt: off
    list_all: Annotated[bool, Option("--list", help="List all tables and figures with their cells, run times and gaps.")] = False
    table: Annotated[str | None, Option(help="Number of the table in the paper.")] = None
    figure: Annotated[str | None, Option(help="Number of a figure instead.")] = None
    dataset: Annotated[list[str] | None, Option(help="Only this row group; may be repeated.")] = None
    method: Annotated[list[str] | None, Option(help="Only this row; may be repeated.")] = None
    column: Annotated[list[str] | None, Option(help="Only this column; may be repeated.")] = None
    reading: Annotated[list[str] | None, Option(help="Only this reading of the paper; may be repeated.")] = None
    seeds: Annotated[AtLeast1, Option(help="Number of seeds: 0, 1, ...")] = 3
    quick: Annotated[bool, Option("--quick", help="Fewer rounds and less data; labelled so, and never mixed with the others.")] = False
    data_dir: DataDir = None
    whole_page: Annotated[bool, Option("--report", help="Write the page of all published cells: --out, by default docs/reproduction.md.")] = False
    out: Annotated[Path | None, Option(help="Folder of cells and reports; default: runs/reproduce.")] = None
    results: Annotated[Path, Option(help="Folder of published cells, which count as finished.")] = Path("docs/results")
    runs: Annotated[Path, Option(help="Folder of running cells.")] = RUNS
    jobs: Annotated[Count, Option(help="Number of parallel cells; 0: by cores and free memory.")] = 0
    max_cells: Annotated[Count | None, Option(help="Largest number of cells to run; 0 only makes the report.")] = None
    runtime: Annotated[str, Option(help="Runtime that computes gradients; default: the quickest here.")] = ""
    show_task: Annotated[bool, Option("--show-task", help="Print the first cell's task file and stop.")] = False
    # fmt: on


@with_options
def reproduce(
    options: ReproduceOptions, paper: Annotated[str | None, typer.Argument(help="Paper, as in --list.")] = None
) -> None:
    """Run the cells of a paper's table, and show them beside the paper's own numbers.

    Finished cells are kept in OUT/cells and never run again; an interrupted one goes on where it stopped. Published cells
    in --results are taken too. The table is also in OUT/PAPER/TABLE.json, and as a figure in TABLE.svg.

    Examples:

    `hushfleet reproduce --list`

    `hushfleet reproduce fedglp-adp --table 1 --dataset fashion-mnist --seeds 1`

    `hushfleet reproduce fedglp-adp --table 1 --method fedglp-adp --column eps-2 --quick`

    `hushfleet reproduce --report`
    """
    from hushfleet.simulator.studies.reproduce.recipe import find_recipe, paper_names
    from hushfleet.user_files import checked_file, checked_folder

    if options.whole_page:
        page = checked_file(options.out or PAGE)
        from hushfleet.simulator.studies.reproduce.command import write_page

        write_page(options.results, page)
        return
    out, _ = checked_folder(options.out or OUT), checked_folder(options.runs, "--runs")
    if options.list_all or paper is None:
        of_one = ("table", "figure", "dataset", "method", "column", "reading", "runtime", "show_task")
        for option in (f"--{name.replace('_', '-')}" for name in of_one if getattr(options, name)):
            raise BadInput(f"{option} does nothing in a list: name a PAPER and its table, without --list")
        from hushfleet.simulator.studies.reproduce.listing import show_list

        show_list([paper] if paper else paper_names(), out, options)
        return
    # refuses an unknown table before PyTorch is imported
    recipe = find_recipe(paper, table=options.table, figure=options.figure)
    if recipe.open:
        claim = f" The paper says: {recipe.claim}" if recipe.claim else ""
        raise BadInput(f"{paper}, {recipe.label} ({recipe.title}) cannot be run: {recipe.open}.{claim}")
    from hushfleet.simulator.studies.reproduce.command import run_table

    run_table(recipe, out, options)
