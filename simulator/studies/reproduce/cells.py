"""A cell of a table: one run of the simulator, with one seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.errors import BadInput
from hushfleet.methods import METHODS
from hushfleet.simulator.studies.reproduce.recipe import (
    LAST_ROUNDS,
    Axis,
    Change,
    Column,
    Entry,
    Group,
    Metric,
    Row,
    Special,
    changed,
)

ALL_COLUMNS = "all"


@dataclass(frozen=True)
class Cell:
    """:param column: None where one cell serves all columns.
    :param reading: None where the recipe has no readings.
    """

    entry: Entry
    group: Group
    row: Row
    column: Column | None
    reading: Axis | None
    seed: int
    quick: bool

    @property
    def key(self) -> str:
        """Its place among the results, without `.json`: `fedglp-adp/table-1/fashion-mnist/dp-fedavg/eps-2/...`."""
        last = "-".join(
            part
            for part in (self.reading.id if self.reading else "", f"seed{self.seed}", "quick" if self.quick else "")
            if part
        )
        return "/".join(
            (self.entry.paper, self.entry.name, self.group.id, self.row.id, self.column_id, last)
        )

    @property
    def column_id(self) -> str:
        return self.column.id if self.column else ALL_COLUMNS

    @property
    def label(self) -> str:
        """For people."""
        parts = [self.group.title, self.row.title, self.column.title if self.column else ""]
        parts += [self.reading.title if self.reading else "", f"seed {self.seed}", "quick" if self.quick else ""]
        return ", ".join(part for part in parts if part)

    @property
    def metric(self) -> Metric:
        return self.entry.recipe.metric_of(self.group, self.row)

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The task as a task file has it."""
        recipe = self.entry.recipe
        changes: list[Change] = [self.group, *([self.column] if self.column else []), self.row]
        changes += [self.reading] if self.reading else []
        changes += [special for special in recipe.specials if self._meets(special)]
        changes += [recipe.quick] if self.quick and recipe.quick else []
        plain = changed(recipe.task, changes)
        plain["name"] = _task_name(self.entry.paper, self.entry.name, self.group.id, self.row.id)
        plain["seed"] = self.seed
        return plain

    def _meets(self, special: Special) -> bool:
        reading = self.reading.id if self.reading else ""
        wanted = (
            (special.group, self.group.id),
            (special.row, self.row.id),
            (special.column, self.column_id),
            (special.reading, reading),
        )
        return all(name is None or name == here for name, here in wanted)

    @cached_property
    def digest(self) -> str:
        """Of what is run. Two cells with the same one share a result, also across tables."""
        plain = {name: value for name, value in self.plain.items() if name != "name"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:20]

    def task(self) -> Task:
        """Raises `BadInput`, also for a method that does not exist yet."""
        plain = json.loads(json.dumps(self.plain))
        # What the committed results were run with: a digest stands for the same run whatever the defaults become.
        plain["wire"] = {"step": 0.5, "downlink": "full", **plain.get("wire", {})}
        # The papers, too, found their noise and print their epsilons by Rényi accountants.
        plain["privacy"] = {"accountant": "rdp", **plain.get("privacy", {})}
        return parse_task(plain, where=self.key)

    @property
    def evaluate_last(self) -> int:
        """In how many rounds at the end the devices' own models are tested."""
        return LAST_ROUNDS if self.entry.recipe.window == "mean-last-10" else 1

    @cached_property
    def open(self) -> str:
        """Why it cannot be run, whatever data there are; empty if it can."""
        reasons = [self.group.open, self.row.open, self.column.open if self.column else ""]
        reasons += [each.open for each in self.entry.recipe.specials if self._meets(each)]
        given = next((reason for reason in reasons if reason), "")
        if given:
            return given
        if self.group.gpu and not torch.cuda.is_available():
            return "its network wants a GPU, and there is none here"
        method = self.plain.get("method", {}).get("name")
        if method not in METHODS:
            return f"the method {method} is not in this version of Hushfleet"
        try:
            self.task()
        except BadInput as error:
            return f"this version of Hushfleet cannot run it: {error}"
        return ""


def _task_name(*parts: str) -> str:
    return "-".join(parts)[:63].rstrip("-._")


def cells_of(
    entry: Entry,
    *,
    seeds: int,
    quick: bool,
    datasets: Collection[str] = (),
    methods: Collection[str] = (),
    columns: Collection[str] = (),
    readings: Collection[str] = (),
) -> list[Cell]:
    """The cells in the order in which they are run: seed by seed, the most telling ones first.

    :param datasets, methods, columns, readings: only these; by id or title, empty for all. Raises `BadInput` for one
        that the recipe does not have.
    """
    recipe = entry.recipe
    groups = _chosen("--dataset", recipe.groups, datasets)
    rows = _chosen("--method", recipe.rows, methods)
    wanted = _chosen("--column", recipe.columns, columns)
    meant = _chosen("--reading", recipe.readings, readings)
    cells = list(_all(entry, groups, rows, wanted, meant, seeds=seeds, quick=quick))
    order = {cell.key: place for place, cell in enumerate(cells)}
    return sorted(cells, key=lambda cell: (cell.seed, _rank(cell), order[cell.key]))


def _all(
    entry: Entry,
    groups: list[Group],
    rows: list[Row],
    columns: list[Column],
    readings: list[Axis],
    *,
    seeds: int,
    quick: bool,
) -> Iterator[Cell]:
    for seed in range(seeds):
        for reading in readings or [None]:
            for group in groups:
                wanted = {column.id for column in columns}
                own = [column for column in entry.recipe.columns_of(group) if column.id in wanted]
                for row in rows:
                    if row.same_in_all_columns:
                        if own:
                            yield Cell(entry, group, row, None, reading, seed, quick)
                    else:
                        yield from (Cell(entry, group, row, column, reading, seed, quick) for column in own)


def _rank(cell: Cell) -> int:
    place = "/".join((cell.group.id, cell.row.id, cell.column_id))
    patterns = cell.entry.recipe.first
    return next((at for at, pattern in enumerate(patterns) if fnmatchcase(place, pattern)), len(patterns))


def _chosen(option: str, axes: tuple[Any, ...], wanted: Collection[str]) -> list[Any]:
    if not wanted:
        return list(axes)
    by_name = {name.lower(): axis for axis in axes for name in (axis.id, axis.title)}
    unknown = [name for name in wanted if name.lower() not in by_name]
    if unknown:
        there = ", ".join(axis.id for axis in axes) or "none"
        raise BadInput(f"{option} {', '.join(unknown)}: this table has {there}")
    chosen = [by_name[name.lower()] for name in wanted]
    return [axis for axis in axes if axis in chosen]
