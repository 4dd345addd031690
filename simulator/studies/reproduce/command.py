"""What `hushfleet reproduce` does when it is called."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape

from hushfleet.aggregator.observe.progress import shown
from hushfleet.aggregator.results.result import write_whole
from hushfleet.progress import doing
from hushfleet.simulator.studies.reproduce import table as tables
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import Kept
from hushfleet.simulator.studies.reproduce.recipe import load_paper
from hushfleet.simulator.studies.reproduce.report import write_report
from hushfleet.simulator.studies.reproduce.show import print_table, render_page


def to_run(cells: Sequence[Cell], kept: Kept, missing: Mapping[str, str]) -> list[Cell]:
    """Those that are neither finished nor open; one of several that are the same run."""
    waiting: dict[str, Cell] = {}
    for cell in cells:
        if kept.of(cell) is None and not cell.open and cell.data_set not in missing:
            waiting.setdefault(cell.digest, cell)
    return list(waiting.values())


class Shown(AbstractContextManager["Shown"]):
    """What is being run, and a line for each cell that has ended.

    The time that is left is said once it is known: when a cell of each kind, a row of a group, has been run to its end.
    Other cells of the kind take as long, whatever their column and seed.

    :param waiting: all cells that will be run.
    :param jobs: how many at a time.
    """

    def __init__(self, waiting: Sequence[Cell], jobs: int, console: Console) -> None:
        self._console, self._jobs, self._count = console, jobs, len(waiting)
        self._waiting = {cell.key: cell for cell in waiting}
        self._began: dict[str, float] = {}
        self._took = defaultdict[tuple[str, str], list[float]](list)
        self._resumed: set[str] = set()
        self._open = ExitStack()
        if waiting:
            console.print(f"{len(waiting)} cells to run, {jobs} at a time", highlight=False)

    def __enter__(self) -> Shown:
        self._open.enter_context(shown(self._console))
        self._work = self._open.enter_context(doing("cells"))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def watch(self, under_way: Sequence[tuple[Cell, int]]) -> None:
        now = time.monotonic()
        for cell, at in under_way:
            if cell.key not in self._began:
                self._began[cell.key] = now
                self._resumed |= {cell.key} if at else set()
        left = self._left_s(now)
        self._work.ends_at = None if left is None else now + left
        names = [f"{cell.label} ({at}/{cell.rounds})" for cell, at in under_way[:1]]
        names += [f"and {len(under_way) - 1} more"] * (len(under_way) > 1)
        self._work.what = f"{self._count - len(self._waiting)} of {self._count} cells; {' '.join(names)}"

    def ended(self, cell: Cell, words: str, *, finished: bool) -> None:
        del self._waiting[cell.key]
        if finished and cell.key in self._began and cell.key not in self._resumed:
            self._took[_kind(cell)].append(time.monotonic() - self._began[cell.key])
        self._console.print(words, highlight=False)

    def _left_s(self, now: float) -> float | None:
        """Seconds; None where a kind of cell has not been measured."""
        left = []
        for cell in self._waiting.values():
            if not (took := self._took[_kind(cell)]):
                return None
            left.append(max(0.0, fmean(took) - (now - self._began.get(cell.key, now))))
        return max(sum(left) / self._jobs, *left, 0.0)


def _kind(cell: Cell) -> tuple[str, str]:
    return cell.group.id, cell.row.id


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
