"""Does the work of `hushfleet reproduce`: chooses cells, shows the progress, and writes the results at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hushfleet.aggregator.observe.console import Console
from hushfleet.aggregator.observe.progress import show_progress
from hushfleet.aggregator.results.result import write_whole
from hushfleet.progress import Work, doing
from hushfleet.simulator.studies.reproduce import table as tables
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.draw import draw
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import load_paper
from hushfleet.simulator.studies.reproduce.report import write_report
from hushfleet.simulator.studies.reproduce.show import print_table


def to_run(cells: Sequence[Cell], kept: Kept, missing: Mapping[str, str]) -> list[Cell]:
    """Chooses the cells that are neither finished nor open and have their data; only one of cells that share a run."""
    waiting: dict[str, Cell] = {}
    for cell in cells:
        if kept.of(cell) is None and not cell.open and cell.data_set not in missing:
            waiting.setdefault(cell.digest, cell)
    return list(waiting.values())


@contextmanager
def show_cells(waiting: Sequence[Cell], jobs: int, console: Console) -> Iterator[Work]:
    """Shows how many cells have ended, and the remaining time if all are of one kind (one row of one group).

    :param jobs: how many run at a time.
    """
    kinds = {(cell.group.id, cell.row.id) for cell in waiting}
    if waiting:
        console.print(f"{len(waiting)} cells to run, {jobs} at a time", highlight=False)
    with show_progress(console), doing("cells", total=len(waiting), alike=len(kinds) == 1) as work:
        yield work


def under_way(cells: Sequence[tuple[Cell, int]]) -> str:
    """Returns a text with the first running cell, its closed rounds, and the number of the other running cells."""
    names = [f"{cell.label} ({at}/{cell.rounds})" for cell, at in cells[:1]]
    return " ".join(["cells:", *names, *([f"and {len(cells) - 1} more"] * (len(cells) > 1))])


def write_page(kept: Kept, page: Path, console: Console) -> None:
    """Writes the page of all results."""
    write_report(kept, page)
    console.print(f"page    {page}", highlight=False, markup=False)


def report(table: tables.PaperTable, out: Path, console: Console) -> None:
    """Prints the table, writes it as JSON, and draws it as a figure if a cell is finished."""
    recipe = table.recipe
    print_table(console, table, load_paper(recipe.paper).name)
    path = out / recipe.paper / (f"{recipe.name}-quick" if table.quick else recipe.name)
    write_whole(path.with_suffix(".json"), json.dumps(table.to_plain(), indent=1, allow_nan=False) + "\n")
    console.print(f"result  {path.with_suffix('.json')}", highlight=False, markup=False)
    if table.done:
        draw(table, path.with_suffix(".svg"))
        console.print(f"figure  {path.with_suffix('.svg')}", highlight=False, markup=False)
