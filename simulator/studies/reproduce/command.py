"""What `hushfleet reproduce` does when it is called."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hushfleet.aggregator.observe.progress import shown
from hushfleet.aggregator.results.result import write_whole
from hushfleet.progress import counted, doing
from hushfleet.simulator.studies.reproduce import table as tables
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of, missing_data
from hushfleet.simulator.studies.reproduce.estimate import Estimator
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import Recipe, load_paper, load_recipes
from hushfleet.simulator.studies.reproduce.report import write_report
from hushfleet.simulator.studies.reproduce.run import Shares
from hushfleet.simulator.studies.reproduce.show import print_table, render_page
from hushfleet.simulator.units import shown_time

_REASON_LENGTH = 100
SPEED = "how quick is this machine?"


def to_run(cells: Sequence[Cell], kept: Kept, missing: Mapping[str, str]) -> list[Cell]:
    """Those that are neither finished nor open; one of several that are the same run."""
    waiting: dict[str, Cell] = {}
    for cell in cells:
        if kept.of(cell) is None and not cell.open and cell.data_set not in missing:
            waiting.setdefault(cell.digest, cell)
    return list(waiting.values())


class Shown(AbstractContextManager["Shown"]):
    """What is being run, with the time that is left, and a line for each cell that has ended.

    :param waiting: all cells that will be run.
    :param shares: how many at a time, on how many processes.
    """

    def __init__(self, waiting: Sequence[Cell], kept: Kept, shares: Shares, console: Console) -> None:
        self._console, self._processes = console, shares.processes
        self._expected = _expected(waiting, kept, console)
        self._total, self._done = max(sum(self._expected.values()), 1e-9), 0.0
        self._open = ExitStack()
        if waiting:
            about = shown_time(self._total / shares.processes)
            console.print(f"{len(waiting)} cells to run, {shares.jobs} at a time: about {about}", highlight=False)

    def __enter__(self) -> Shown:
        self._open.enter_context(shown(self._console))
        self._work = self._open.enter_context(doing("cells"))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def watch(self, under_way: Sequence[tuple[Cell, int]]) -> None:
        done = self._done + sum(self._expected[cell.key] * min(1.0, at / cell.rounds) for cell, at in under_way)
        gone, share = self._work.elapsed_s, done / self._total
        # The estimate until there is something to judge it by.
        left = gone * (1 - share) / share if share > 0.02 else self._total * (1 - share) / self._processes
        self._work.about_s = gone + left
        self._work.what = "; ".join(f"{cell.label} ({at}/{cell.rounds})" for cell, at in under_way[:2])

    def ended(self, cell: Cell, words: str) -> None:
        self._done += self._expected[cell.key]
        self._console.print(words, highlight=False)


def write_page(kept: Kept, page: Path, console: Console) -> None:
    """The page of all results; sentences that the cells do not carry are named."""
    for sentence, reason in write_report(kept, page).left_out:
        console.print(f"[yellow]left out[/], since {escape(reason)}: {escape(sentence)}", highlight=False)
    console.print(f"page    {page}", highlight=False)


def report(table: tables.PaperTable, out: Path, console: Console) -> None:
    recipe, paper = table.recipe, load_paper(table.recipe.paper)
    print_table(console, table, paper.name)
    path = out / recipe.paper / (f"{recipe.name}-quick" if table.quick else recipe.name)
    write_whole(path.with_suffix(".json"), json.dumps(table.to_plain(), indent=1, allow_nan=False) + "\n")
    write_whole(path.with_suffix(".html"), render_page(table, paper))
    console.print(f"report  {path.with_suffix('.html')}\nresult  {path.with_suffix('.json')}", highlight=False)


def estimates(cells: Iterable[Cell], kept: Kept) -> dict[str, float]:
    estimator = Estimator(kept)
    waiting = [cell for cell in cells if kept.of(cell) is None]
    return {cell.digest: seconds for cell in waiting if (seconds := estimator.seconds(cell)) is not None}


def what_there_is(
    papers: Sequence[str], kept: Kept, seeds: int, quick: bool, data_dir: Path | None, console: Console
) -> list[tuple[str, list[list[str]]]]:
    def line(recipe: Recipe) -> list[str]:
        if recipe.open:
            return [recipe.label, recipe.title, "", "", recipe.open]
        cells = cells_of(recipe, seeds=seeds, quick=quick)
        missing = missing_data({cell.data_set for cell in cells}, data_dir)
        left = [cell for cell in cells if kept.of(cell) is None]
        seconds = sum(estimates(to_run(left, kept, missing), kept).values())
        lacking = [*recipe.needs, *(f"{name}: not at hand" for name in missing)]
        lacking += [_short(cell.open) for cell in left if cell.open]
        done, time_left = f"{len(cells) - len(left)}/{len(cells)}", shown_time(seconds) if seconds else ""
        return [recipe.label, recipe.title, done, time_left, "; ".join(dict.fromkeys(lacking))]

    recipes = [(name, recipe) for name in papers for recipe in load_recipes(name)]
    lines: dict[str, list[list[str]]] = {name: [] for name in papers}
    with shown(console):
        for name, recipe in counted(recipes, SPEED, total=len(recipes)):
            lines[name].append(line(recipe))
    return [(f"{name}: {load_paper(name).source}", lines[name]) for name in papers]


def _expected(cells: Sequence[Cell], kept: Kept, console: Console) -> dict[str, float]:
    """Seconds of each cell, by its key."""
    with shown(console), doing(SPEED):
        estimator = Estimator(kept)
        return {cell.key: estimator.seconds(cell) or 0.0 for cell in cells}


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_LENGTH else reason[: _REASON_LENGTH - 3] + "..."
