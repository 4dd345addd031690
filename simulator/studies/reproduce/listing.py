"""`hushfleet reproduce --list`: all tables and figures, without running, measuring or reading data or tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from hushfleet.aggregator.report.console import Console
from hushfleet.aggregator.report.readable import format_seconds
from hushfleet.simulator.studies.reproduce.cells import cells_of, missing_data
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.options import ReproduceOptions
from hushfleet.simulator.studies.reproduce.recipe import Recipe, load_paper, load_recipes

_REASON_LENGTH = 100


def show_list(papers: Sequence[str], out: Path, options: ReproduceOptions) -> None:
    """Prints a table for each paper: what it has, how much of it is finished, and what is missing here."""
    console, kept = Console(), Kept(out, options.published)
    for name in papers:
        console.print(_of_paper(name, kept, options))


def _of_paper(name: str, kept: Kept, options: ReproduceOptions) -> Table:
    title = escape(f"{name}: {load_paper(name).source}")
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, expand=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("what", ratio=3)
    table.add_column("cells", justify="right", no_wrap=True)
    table.add_column("took", justify="right", no_wrap=True)
    table.add_column("what is missing here", ratio=3)
    for recipe in load_recipes(name):
        table.add_row(*map(escape, _line(recipe, kept, options)))
    return table


def _line(recipe: Recipe, kept: Kept, options: ReproduceOptions) -> Iterator[str]:
    yield recipe.label
    yield recipe.title
    if recipe.open:
        yield from ("", "", recipe.open)
        return
    cells = cells_of(recipe, seeds=options.seeds, quick=options.quick)
    finished = [one for cell in cells if (one := kept.of(cell)) is not None]
    left = [cell for cell in cells if kept.of(cell) is None]
    missing = missing_data({cell.data_set for cell in left}, options.data_dir)
    lacking = [*recipe.needs, *(f"{name}: not at hand" for name in missing)]
    of_each_seed = {(cell.place, cell.reading and cell.reading.id): cell for cell in left}
    lacking += [_short(why) for cell in of_each_seed.values() if (why := cell.open_by_recipe)]
    stale = sum(kept.stale(cell) is not None for cell in left)
    yield f"{len(finished)}/{len(cells)}" + (f", {stale} stale" if stale else "")
    yield format_seconds(sum(one.seconds for one in finished)) if finished else ""
    yield "; ".join(dict.fromkeys(lacking))


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 3] + "..."
