"""The table: the paper's numbers and ours, side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from hushfleet.simulator.studies.reproduce.cells import ALL_COLUMNS, Cell
from hushfleet.simulator.studies.reproduce.kept import Kept, KeptCell
from hushfleet.simulator.studies.reproduce.recipe import METRICS, WINDOWS, Axis, Column, Entry, Group, Row


@dataclass(frozen=True)
class Square:
    """What stands in one place of the table; accuracies in percent.

    :param paper: None where the paper prints none.
    :param ours: mean over seeds; None where no cell is finished; :param spread: standard deviation, None for one seed.
    :param seeds: those that are finished, of `asked`.
    :param open: why nothing is there, or that it was not run yet.
    :param raw_values: what the method sends without noise, in words: then both epsilons are infinite, and
        `noised_server` and `noised_release` are what the noised values alone cost, as papers count.
    :param estimate_s: of what is not finished, on one core; None where it cannot be run or was not estimated.
    """

    row: str
    column: str
    paper: float | None
    ours: float | None
    spread: float | None
    seeds: tuple[int, ...]
    asked: int
    paper_epsilon: float | None
    epsilon_server: float | None
    epsilon_release: float | None
    open: str
    estimate_s: float | None
    values: tuple[float, ...] = ()
    raw_values: tuple[str, ...] = ()
    noised_server: float | None = None
    noised_release: float | None = None

    @property
    def difference(self) -> float | None:
        return None if self.ours is None or self.paper is None else self.ours - self.paper


@dataclass(frozen=True)
class Ranking:
    """The rows of one column from best to worst, where both sides have a number.

    :param agreement: Kendall's tau-b between them: 1 is the same order, -1 the reverse; None for fewer than two rows.
    """

    column: str
    paper: tuple[str, ...]
    ours: tuple[str, ...]
    agreement: float | None


@dataclass(frozen=True)
class Block:
    """The squares of one group under one reading."""

    group: Group
    reading: Axis | None
    metric: str
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    squares: Mapping[tuple[str, str], Square]
    rankings: tuple[Ranking, ...]

    @property
    def title(self) -> str:
        return self.group.title + (f", {self.reading.title}" if self.reading else "")

    @property
    def begun(self) -> bool:
        """Whether any of its cells is finished."""
        return any(square.seeds for square in self.squares.values())


@dataclass(frozen=True)
class PaperTable:
    """All of it, with the labels that have to stand beside it."""

    entry: Entry
    quick: bool
    labels: tuple[str, ...]
    blocks: tuple[Block, ...]

    @property
    def done(self) -> int:
        return sum(len(square.seeds) for square in self.squares)

    @property
    def asked(self) -> int:
        return sum(square.asked for square in self.squares)

    @property
    def squares(self) -> list[Square]:
        return [square for block in self.blocks for square in block.squares.values()]

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        recipe = self.entry.recipe
        blocks = [
            {
                "dataset": block.group.id,
                "title": block.title,
                "reading": block.reading.id if block.reading else None,
                "metric": block.metric,
                "substitutions": list(block.group.substitutions),
                "cells": [_plain(asdict(each) | {"difference": each.difference}) for each in block.squares.values()],
                "rankings": [asdict(ranking) for ranking in block.rankings],
            }
            for block in self.blocks
        ]
        return {
            "schema": 1,
            "paper": self.entry.paper,
            "table": self.entry.name,
            "title": recipe.title,
            "claim": recipe.claim,
            "window": recipe.window,
            "quick": self.quick,
            "labels": list(self.labels),
            "readings": recipe.readings_text,
            "blocks": blocks,
        }


def make_table(
    entry: Entry,
    cells: Sequence[Cell],
    kept: Kept,
    *,
    quick: bool,
    missing: Mapping[str, str],
    estimates: Mapping[str, float],
    failures: Mapping[str, str] | None = None,
) -> PaperTable:
    """The table of these cells.

    :param missing: why a data set cannot be had, by name.
    :param estimates: seconds on one core, by the digest of cells that are not finished.
    :param failures: the errors of cells that failed, by key.
    """
    recipe = entry.recipe
    meant = {cell.reading.id for cell in cells if cell.reading}
    readings = [each for each in recipe.readings if each.id in meant] or [None]
    blocks = []
    for group in recipe.groups:
        for reading in readings:
            block = _block(entry, group, reading, cells, kept, missing, estimates, failures or {})
            if block.squares:
                blocks.append(block)
    return PaperTable(entry, quick, tuple(_labels(entry, cells, kept, quick=quick)), tuple(blocks))


def _block(
    entry: Entry,
    group: Group,
    reading: Axis | None,
    cells: Sequence[Cell],
    kept: Kept,
    missing: Mapping[str, str],
    estimates: Mapping[str, float],
    failures: Mapping[str, str],
) -> Block:
    squares = {}
    here = [
        cell
        for cell in cells
        if cell.group.id == group.id and (cell.reading is None or reading is None or cell.reading.id == reading.id)
    ]
    shown = {cell.column_id for cell in here if cell.column}
    for row in entry.recipe.rows:
        for column in entry.recipe.columns_of(group):
            these = [cell for cell in here if cell.row.id == row.id and cell.column_id in (column.id, ALL_COLUMNS)]
            if these and (column.id in shown or not shown):
                squares[row.id, column.id] = _square(
                    entry, group, row, column, these, kept, missing, estimates, failures
                )
    rows = tuple(row for row in entry.recipe.rows if any(key[0] == row.id for key in squares))
    columns = tuple(column for column in entry.recipe.columns if any(key[1] == column.id for key in squares))
    metric = entry.recipe.metric_of(group)
    rankings = tuple(ranking for column in columns if (ranking := _ranking(rows, column, squares)))
    return Block(group, reading, metric, rows, columns, squares, rankings)


def _square(
    entry: Entry,
    group: Group,
    row: Row,
    column: Column,
    cells: Sequence[Cell],
    kept: Kept,
    missing: Mapping[str, str],
    estimates: Mapping[str, float],
    failures: Mapping[str, str],
) -> Square:
    found: list[tuple[int, KeptCell]] = [(cell.seed, one) for cell in cells if (one := kept.of(cell))]
    values = tuple(
        100 * value for _, one in found if (value := one.value(cells[0].metric, entry.recipe.window)) is not None
    )
    waiting = [cell for cell in cells if kept.of(cell) is None]
    reason = ""
    if waiting:
        failed = next((failures[cell.key] for cell in waiting if cell.key in failures), "")
        data = missing.get(waiting[0].plain["data"]["name"], "")
        reason = f"failed: {failed}" if failed else waiting[0].open or data or "not run yet"
    can_run = [cell for cell in waiting if not cell.open and cell.digest in estimates]
    raw = tuple(dict.fromkeys(words for _, one in found for words in one.raw_values))
    server = max((one.epsilon_server for _, one in found), default=None)
    release = max((one.epsilon_release for _, one in found), default=None)
    return Square(
        row=row.id,
        column=column.id,
        paper=entry.recipe.paper_value(group, row.id, column.id),
        ours=fmean(values) if values else None,
        spread=stdev(values) if len(values) > 1 else None,
        seeds=tuple(seed for seed, _ in found),
        asked=len(cells),
        paper_epsilon=None if row.same_in_all_columns else column.paper_epsilon,
        epsilon_server=math.inf if raw else server,
        epsilon_release=math.inf if raw else release,
        open=reason,
        estimate_s=math.fsum(estimates[cell.digest] for cell in can_run) if can_run else None,
        values=values,
        raw_values=raw,
        noised_server=server if raw else None,
        noised_release=release if raw else None,
    )


def _ranking(rows: Sequence[Row], column: Column, squares: Mapping[tuple[str, str], Square]) -> Ranking | None:
    both = [
        (row.title, square.paper, square.ours)
        for row in rows
        if (square := squares.get((row.id, column.id))) and square.paper is not None and square.ours is not None
    ]
    if len(both) < 2:
        return None
    paper = tuple(name for name, _, _ in sorted(both, key=lambda each: -(each[1] or 0)))
    ours = tuple(name for name, _, _ in sorted(both, key=lambda each: -(each[2] or 0)))
    return Ranking(column.id, paper, ours, kendall([p for _, p, _ in both if p], [o for _, _, o in both if o]))


def kendall(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b; None where one side has no order at all."""
    pairs = [(a2 - a1, b2 - b1) for (a1, b1), (a2, b2) in combinations(zip(first, second, strict=True), 2)]
    agree = sum((x * y > 0) - (x * y < 0) for x, y in pairs)
    scale = math.sqrt(sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs))
    return agree / scale if scale else None


def _labels(entry: Entry, cells: Sequence[Cell], kept: Kept, *, quick: bool) -> list[str]:
    """What differs from the paper, in the order of weight."""
    recipe = entry.recipe
    labels = [recipe.quick.label] if quick and recipe.quick else []
    for group in recipe.groups:
        if any(cell.group.id == group.id for cell in cells):
            labels += [f"{group.title}: {words}" for words in group.substitutions]
    seeds = Counter(cell.seed for cell in cells if kept.of(cell))
    if seeds:
        labels.append("one seed" if len(seeds) == 1 else f"up to {len(seeds)} seeds")
    return labels


def measured_as(entry: Entry, metric: str) -> str:
    return f"{METRICS[metric]}, {WINDOWS[entry.recipe.window]}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    return value
