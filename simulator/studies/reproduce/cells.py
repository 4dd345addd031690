"""A cell of a table: one run of the simulator, with one seed."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from hushfleet.aggregator.config.task import Task, parse_task
from hushfleet.data.sets import SOURCES
from hushfleet.errors import BadInput
from hushfleet.learning import personalized_head
from hushfleet.losses import LOSSES
from hushfleet.methods import METHODS
from hushfleet.simulator.studies.reproduce.recipe import (
    LAST_ROUNDS,
    Axis,
    Metric,
    PaperReading,
    Recipe,
    RowGroup,
    Special,
    TableColumn,
    TableRow,
    changed,
)
from hushfleet.user_files import user_data_dir

ALL_COLUMNS = "all"
AS_A_PAPER = {"accounting": "as-published"}
"""The accounting of cells whose recipe does not name one: it was the default when the committed results were run."""
CLASSES = {"cifar100": 100, "emnist": 26}
"""The number of classes of a data set, if it is not ten."""
WIRE_EPOCH = 1
"""Cells of epoch 0 were run with the quantised wire: their noise has 1.034 times the variance that is stated, and rows
without noise are compressed with loss."""
AnyAxis = TypeVar("AnyAxis", bound=Axis)


@dataclass(frozen=True)
class Cell:
    """One run of a table.

    :param column: None if one cell is used for all columns.
    :param reading: None if the recipe has no readings.
    """

    recipe: Recipe
    group: RowGroup
    row: TableRow
    column: TableColumn | None
    reading: PaperReading | None
    seed: int
    quick: bool

    @property
    def key(self) -> str:
        """The path among the results, without `.json`: `fedglp-adp/table-1/fashion-mnist/dp-fedavg/eps-2/...`."""
        last = [self.reading.id] if self.reading else []
        last += [f"seed{self.seed}"] + ["quick"] * self.quick
        return "/".join((self.recipe.paper, self.recipe.name, self.place, "-".join(last)))

    @property
    def place(self) -> str:
        """`group/row/column`, as `first` of a recipe names it."""
        return f"{self.group.id}/{self.row.id}/{self.column_id}"

    @property
    def column_id(self) -> str:
        return self.column.id if self.column else ALL_COLUMNS

    @property
    def label(self) -> str:
        """The cell's name for people."""
        titles = [axis.title for axis in (self.group, self.row, self.column, self.reading) if axis]
        return ", ".join([*titles, f"seed {self.seed}"] + ["quick"] * self.quick)

    @property
    def metric(self) -> Metric:
        return self.recipe.metric_of(self.group, self.row)

    @property
    def stop_epsilon(self) -> float | None:
        """The budget of the median device that ends the run for the table; see `PaperReading`."""
        return self.reading.stop_epsilon if self.reading else None

    @property
    def data_set(self) -> str:
        return str(self.plain["data"]["name"])

    @property
    def chance(self) -> float:
        """The accuracy of guessing in percent: among a device's classes if only they are tested, else among all."""
        data = self.plain["data"]
        own = self.metric in ("accuracy_own_local", "accuracy_next_local")
        return 100 / ((own and data.get("classes_per_device")) or CLASSES.get(self.data_set, 10))

    @property
    def rounds(self) -> int:
        return int(self.plain["round"]["rounds"])

    @cached_property
    def _specials(self) -> list[Special]:
        reading = self.reading.id if self.reading else ""
        here = {"group": self.group.id, "row": self.row.id, "column": self.column_id, "reading": reading}
        return [special for special in self.recipe.specials if special.applies(**here)]

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The task in the form of a task file."""
        quick = self.recipe.quick if self.quick else None
        changes = (self.group, self.column, self.row, self.reading, *self._specials, quick)
        plain = changed(self.recipe.task, (change for change in changes if change))
        name = "-".join((self.recipe.paper, self.recipe.name, self.group.id, self.row.id))
        return plain | {"name": name[:63].rstrip("-._"), "seed": self.seed}

    @cached_property
    def digest(self) -> str:
        """The digest of the settings and the code that are run. Cells with the same digest share a result, also across
        tables."""
        return self.digest_at(self.epochs)

    @cached_property
    def epochs(self) -> dict[str, int]:
        """The epochs of the code that determines the result; those that are 0 are left out."""
        method, model = self.plain.get("method", {}).get("name"), self.plain.get("model", {})
        found = {
            "data": SOURCES[self.data_set].epoch,
            "loss": LOSSES[model.get("loss", "cross-entropy")].epoch,
            "method": METHODS[method].epoch if method in METHODS else 0,
            "own head": personalized_head.EPOCH if model.get("name") == "linear" else 0,
            "wire": 0 if self.row.alone else WIRE_EPOCH,
        }
        return {name: epoch for name, epoch in found.items() if epoch}

    def digest_at(self, epochs: Mapping[str, int]) -> str:
        """Returns the digest of the same settings with code of these epochs."""
        plain = {name: value for name, value in self.plain.items() if name != "name"}
        if self.row.alone:
            plain["alone"] = True
        if epochs:
            plain["epochs"] = epochs
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:20]

    def task(self) -> Task:
        """Returns the task to run. Raises `BadInput`, also for a method that does not exist yet."""
        plain = copy.deepcopy(self.plain)
        # A quantised wire adds variance to the noise that a table states (`WIRE_EPOCH`).
        plain["wire"] = {"codec": "float32", **plain.get("wire", {})}
        # The papers also use Rényi accountants for their noise and for the epsilons that they print.
        plain["privacy"] = {"accountant": "rdp", **AS_A_PAPER, **plain.get("privacy", {})}
        return parse_task(plain, where=self.key)

    @property
    def evaluate_last(self) -> int:
        """The number of last rounds in which the devices' personalized models are tested."""
        return LAST_ROUNDS if self.recipe.window == "mean-last-10" else 1

    @property
    def left_open(self) -> str:
        """The recipe's reason why no run counts for it, even one shared with another place; empty if one may count."""
        return next(
            (given.open for given in (self.group, self.row, self.column, *self._specials) if given and given.open), ""
        )

    @property
    def open_by_recipe(self) -> str:
        """The reason why it cannot be run, if the recipe or this machine shows one; see `open`."""
        if self.left_open:
            return self.left_open
        if self.group.gpu and not _has_gpu():
            return "its network wants a GPU, and there is none here"
        method = self.plain.get("method", {}).get("name")
        if method not in METHODS:
            return f"the method {method} is not in this version of Hushfleet"
        return ""

    @cached_property
    def open(self) -> str:
        """The reason why it cannot be run, apart from missing data; empty if it can. This parses the whole task."""
        if self.open_by_recipe:
            return self.open_by_recipe
        try:
            self.task()
        except BadInput as error:
            return f"this version of Hushfleet cannot run it: {error}"
        return ""


def cells_of(
    recipe: Recipe,
    *,
    seeds: int,
    quick: bool,
    datasets: Collection[str] | None = None,
    methods: Collection[str] | None = None,
    columns: Collection[str] | None = None,
    readings: Collection[str] | None = None,
) -> list[Cell]:
    """Returns the cells in the order in which they are run: seed by seed, the most informative ones first.

    :param datasets: only these groups, by id or title; None for all. Likewise `methods` (rows), `columns`, `readings`.

    Raises `BadInput` for one that the recipe does not have.
    """
    groups = _chosen("--dataset", recipe.groups, datasets)
    rows = _chosen("--method", recipe.rows, methods)
    wanted = _chosen("--column", recipe.columns, columns)
    meant: Sequence[PaperReading | None] = _chosen("--reading", recipe.readings, readings) or [None]

    def columns_of(group: RowGroup, row: TableRow) -> Sequence[TableColumn | None]:
        own = [column for column in recipe.columns_of(group) if column in wanted]
        return [None] if own and row.same_in_all_columns else own

    cells = [
        Cell(recipe, group, row, column, reading, seed, quick)
        for seed in range(seeds)
        for reading in meant
        for group in groups
        for row in rows
        for column in columns_of(group, row)
    ]
    return sorted(cells, key=lambda cell: (cell.seed, _rank(cell)))


def _rank(cell: Cell) -> int:
    patterns = cell.recipe.first
    return next((at for at, pattern in enumerate(patterns) if fnmatchcase(cell.place, pattern)), len(patterns))


def _chosen(option: str, axes: tuple[AnyAxis, ...], wanted: Collection[str] | None) -> list[AnyAxis]:
    names = {name.lower() for name in wanted or ()}
    if unknown := names - {name.lower() for axis in axes for name in (axis.id, axis.title)}:
        there = ", ".join(axis.id for axis in axes) or "none"
        raise BadInput(f"{option} {', '.join(sorted(unknown))}: this table has {there}")
    return [axis for axis in axes if not names or {axis.id.lower(), axis.title.lower()} & names]


def missing_data(names: Collection[str], data_dir: Path | None) -> dict[str, str]:
    """Returns the data sets that are missing here, each with its source and the folder to put it into."""
    return {name: words for name in sorted(names) if (words := _missing(name, data_dir or user_data_dir()))}


@cache
def _missing(name: str, where: Path) -> str:
    source = SOURCES[name]
    if source.is_at_hand(where) or source.torchvision is None:
        return ""
    return f"fetch it from {source.torchvision.origin} and put it into {where}: {source.looked_for}"


@cache
def _has_gpu() -> bool:
    """Returns whether PyTorch sees a GPU. Its import takes seconds, so it is asked only if there is a device file."""
    if not any(any(Path("/dev").glob(name)) for name in ("nvidia*", "nvhost*", "dxg")):
        return False
    import torch

    return torch.cuda.is_available()
