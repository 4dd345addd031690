"""Makes the table: the paper's numbers and ours, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import pandas as pd

from hushfleet.plain_json import to_json
from hushfleet.simulator.studies.reproduce.cells import Cell
from hushfleet.simulator.studies.reproduce.kept import Kept, KeptCell, View
from hushfleet.simulator.studies.reproduce.recipe import WINDOWS, Axis, Recipe, RowGroup, TableColumn

NOT_RUN = "not run yet"
_PLACE = ["block", "group", "reading", "row", "column", "nth", "title", "metric"]
_NOT_IN_JSON = [
    *("block", "group", "reading", "nth", "title", "metric", "data", "meaning", "only_order", "other_data"),
    *("method", "at", "runs", "least_server", "least_release", "private"),
]


@dataclass(frozen=True)
class PaperTable:
    """The whole table, with the labels that must be shown with it.

    :param places: a line for each row and column of the paper's table, under each reading of each group; both together
        are a `block` (its number; `title`). Accuracies are in percent, None or NaN if there is no number: `paper`,
        `ours` (mean over seeds), `spread` (standard deviation, with two seeds or more), `difference`, `values` (by
        seed), `seeds` (the finished ones out of `asked`), `stale` (how many of them older code has run), `runs` (their
        digests), `chance` (by guessing), `outside` (not in the order),
        `private` (with noise), `median` (epsilon against the server of the median device), `paper_epsilon`,
        `epsilon_server`, `epsilon_release`, `raw_values` (what the method sends without noise, in words: then both
        epsilons are infinite, and `noised_server` and `noised_release` are the epsilons of the noised values alone,
        as papers count), `open` (the reason if there is no number). `group`, `reading`, `row` and `column` are ids,
        `data`, `meaning`, `method` and `at` their titles; `nth` is the number of the column.
    """

    recipe: Recipe
    quick: bool
    labels: tuple[str, ...]
    places: pd.DataFrame

    @property
    def blocks(self) -> list[pd.DataFrame]:
        """The places of each group and reading."""
        return [places for _, places in self.places.groupby("block")]

    @property
    def finished(self) -> pd.DataFrame:
        """The places with a number of ours, column by column."""
        return self.places[self.places.ours.notna()].sort_values(["block", "nth"], kind="stable")

    @property
    def raw_values(self) -> list[str]:
        """The values that methods of the table send without noise, in words."""
        return list(dict.fromkeys(words for several in self.places.raw_values for words in several))

    @property
    def done(self) -> int:
        return sum(len(seeds) for seeds in self.places.seeds)

    @property
    def asked(self) -> int:
        return int(self.places.asked.sum())

    def groups(self) -> list[RowGroup]:
        """Returns the groups that it shows."""
        return [group for group in self.recipe.groups if group.id in set(self.places.group)]

    def window(self, groups: Sequence[RowGroup]) -> str:
        """Returns the rounds whose accuracy the groups show, in words."""
        return "after the printed round" if any(group.rounds for group in groups) else WINDOWS[self.recipe.window]

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values for JSON."""
        substitutions, blocks = {group.id: list(group.substitutions) for group in self.recipe.groups}, []
        for places in self.blocks:
            first = places.iloc[0]
            blocks.append(
                {
                    "dataset": first.group,
                    "title": first.title,
                    "reading": first.reading or None,
                    "metric": first.metric,
                    "substitutions": substitutions[first.group],
                    "cells": to_json(places.drop(columns=_NOT_IN_JSON).to_dict("records")),
                }
            )
        return {
            "schema": 1,
            "paper": self.recipe.paper,
            "table": self.recipe.name,
            "title": self.recipe.title,
            "claim": self.recipe.claim,
            "window": self.recipe.window,
            "quick": self.quick,
            "labels": list(self.labels),
            "readings": self.recipe.readings_text,
            "blocks": blocks,
        }


@dataclass(frozen=True)
class CellProgress:
    """The state of the cells.

    :param missing: the reason why a data set is missing, by name.
    :param failures: the errors of cells that failed, by key.
    """

    kept: Kept
    missing: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    def why_open(self, cell: Cell) -> str:
        if error := self.failures.get(cell.key):
            return f"failed: {error}"
        return cell.open or self.missing.get(cell.data_set) or NOT_RUN


def make_table(recipe: Recipe, cells: Sequence[Cell], progress: CellProgress, *, quick: bool) -> PaperTable:
    """Makes the table of these cells."""
    blocks: list[pd.DataFrame] = []
    for group in recipe.groups:
        for reading in recipe.readings or (None,):
            those = [cell for cell in cells if cell.group.id == group.id and cell.reading == reading]
            if those:
                blocks.append(_block(recipe, group, reading, those, progress).assign(block=len(blocks)))
    places = pd.concat(blocks, ignore_index=True) if blocks else pd.DataFrame(columns=[*_PLACE, *_COMBINED])
    return PaperTable(recipe, quick, tuple(_labels(recipe, cells, progress.kept, quick=quick)), places)


def _block(
    recipe: Recipe, group: RowGroup, reading: Axis | None, cells: Sequence[Cell], progress: CellProgress
) -> pd.DataFrame:
    columns = _columns(recipe, group, cells)
    runs = pd.DataFrame([line for cell in cells for line in _runs(cell, columns, progress)])
    order = {"row": [row.id for row in recipe.rows], "column": [column.id for column in columns]}
    for name, ids in order.items():
        runs[name] = pd.Categorical(runs[name], ids)
    places = runs.groupby(["row", "column"], observed=True).agg(**_COMBINED).reset_index()
    places["nth"] = places.column.cat.codes
    places = places.astype({"row": str, "column": str, "paper": float})
    places["difference"] = places.ours - places.paper
    raw = places.raw_values.map(bool)
    for view in ("server", "release"):
        places[f"epsilon_{view}"] = places[f"noised_{view}"].mask(raw, math.inf)
        places[f"noised_{view}"] = places[f"noised_{view}"].where(raw)
    meaning = reading.title if reading else ""
    return places.assign(
        group=group.id,
        reading=reading.id if reading else "",
        data=group.title,
        meaning=meaning,
        title=", ".join(filter(None, (group.title, meaning))),
        metric=recipe.metric_of(group),
        only_order=group.only_order,
        other_data=group.other_data,
    )


def _columns(recipe: Recipe, group: RowGroup, cells: Sequence[Cell]) -> list[TableColumn]:
    """Returns the columns with cells of their own. If there is none, returns those with different printed numbers."""
    columns = recipe.columns_of(group)
    if asked := [column for column in columns if any(cell.column == column for cell in cells)]:
        return asked
    rows = sorted({cell.row.id for cell in cells})
    printed: dict[tuple[float | None, ...], TableColumn] = {}
    for column in columns:
        printed.setdefault(tuple(recipe.paper_value(group, row, column.id) for row in rows), column)
    return list(printed.values())


def _runs(cell: Cell, columns: Sequence[TableColumn], progress: CellProgress) -> Iterator[dict[str, Any]]:
    """Yields the values of a cell for each column that it is in."""
    recipe, one = cell.recipe, progress.kept.shown(cell)
    for column in columns if cell.column is None else (cell.column,):
        value = one.value_of(cell, column.id) if one else None
        yield {
            "row": cell.row.id,
            "column": column.id,
            "method": cell.row.title,
            "at": column.title,
            "paper": recipe.paper_value(cell.group, cell.row.id, column.id),
            "paper_epsilon": None if cell.row.same_in_all_columns else column.paper_epsilon,
            "seed": cell.seed if one else None,
            "stale": one is not None and one.digest != cell.digest,
            "run": _run(cell, one) if one else None,
            "value": None if value is None else 100 * value,
            **{view: one.epsilon(view, cell) if one else None for view in get_args(View)},
            "private": one is not None and one.noise_multiplier > 0,
            "raw": one.raw_values if one else (),
            "chance": cell.chance,
            "outside": bool(cell.row.outside),
            "open": "" if one else progress.why_open(cell),
        }


def _run(cell: Cell, kept: KeptCell) -> str:
    """Returns what tells the runs of a table apart: one that stops at a budget is another one."""
    stop = kept.stop(cell)
    return cell.digest if stop is None else f"{cell.digest} until {stop}"


def _first(values: pd.Series) -> Any:
    return values.iloc[0]


def _why(reasons: pd.Series) -> str:
    """Returns one reason. A failure has priority, because it says more than that another seed was not run."""
    return max((reason for reason in reasons if reason), key=lambda reason: reason.startswith("failed"), default="")


_COMBINED: dict[str, tuple[str, Any]] = {
    **{name: (name, _first) for name in ("method", "at", "paper")},
    "ours": ("value", "mean"),
    "spread": ("value", "std"),
    "values": ("value", lambda values: tuple(values.dropna())),
    "seeds": ("seed", lambda seeds: tuple(int(seed) for seed in seeds.dropna())),
    "runs": ("run", lambda runs: tuple(runs.dropna())),
    "stale": ("stale", "sum"),
    "asked": ("seed", "size"),
    **{f"noised_{view}": (view, "max") for view in ("server", "release")},
    "median": ("median", "max"),
    "private": ("private", "any"),
    **{f"least_{view}": (view, "min") for view in ("server", "release")},
    "raw_values": ("raw", lambda raw: tuple(dict.fromkeys(words for each in raw for words in each))),
    **{name: (name, _first) for name in ("paper_epsilon", "chance", "outside")},
    "open": ("open", _why),
}


def _labels(recipe: Recipe, cells: Sequence[Cell], kept: Kept, *, quick: bool) -> Iterator[str]:
    """Yields the differences from the paper, the most important ones first."""
    if quick and recipe.quick:
        yield recipe.quick.label
    for group in recipe.groups:
        if any(cell.group.id == group.id for cell in cells):
            yield from (f"{group.title}: {words}" for words in group.substitutions)
    if seeds := {cell.seed for cell in cells if kept.shown(cell)}:
        yield "one seed" if len(seeds) == 1 else f"up to {len(seeds)} seeds"
