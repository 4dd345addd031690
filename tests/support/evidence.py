"""Finds finished cells by their address, and fills their numbers into prose.

An address is `paper/table/group/row/column`, with `/reading` if the table has readings; within a table's own recipe
the first two parts are left out. In prose, braces are replaced by a number:

- `{A}`: our accuracy in percent, as in the table, mean over seeds
- `{field: A}`: another number of the cell, see `FIELDS`
- `{paper: A}`, `{paper: A - B}`: the paper's number or difference; the cell need not be finished
- `{A - B}`: the difference of the two, over the seeds that both have; with `spread` its standard deviation
- `{A > B}`: both numbers over those seeds, if the comparison holds; likewise `<`
- `{if: A > B}`: no text, if the comparison holds
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import sub
from statistics import fmean, stdev
from typing import get_args

from hushfleet.errors import BadInput
from hushfleet.simulator.studies.reproduce.cells import Cell, cells_of
from hushfleet.simulator.studies.reproduce.kept import Kept, KeptCell
from hushfleet.simulator.studies.reproduce.recipe import Metric, Recipe, Window, load_recipes
from hushfleet.simulator.studies.reproduce.report import SEEDS

REFERENCE = re.compile(r"\{(?:(?P<field>[a-z_]+): )?(?P<one>[^{} ]+)(?: (?P<sign>[-<>]) (?P<other>[^{} ]+))?\}")


class Unsupported(LookupError):
    """The finished cells do not support a sentence. The error names the cell that is open or contradicts it."""


@dataclass(frozen=True)
class Finished:
    """The finished seeds of one place in a table."""

    cells: tuple[Cell, ...]
    kept: tuple[KeptCell, ...]

    @property
    def cell(self) -> Cell:
        """The cell of the first seed, which has everything that the seeds share."""
        return self.cells[0]

    def accuracies(self, metric: Metric | None = None, window: Window | None = None) -> list[float]:
        """Returns the accuracies in percent, by seed. Raises `Unsupported` if one was not measured."""
        # for a named window, the whole run counts
        taken = metric or self.cell.metric, window or self.cell.recipe.window
        values = [one.value(*taken, None if window else one.round_of(self.cell)) for one in self.kept]
        measured = [100 * value for value in values if value is not None]
        if len(measured) < len(values):
            raise Unsupported(f"{self.cell.key} has no {metric}")
        return measured

    def shared_with(self, other: Finished) -> Finished:
        """Keeps the seeds that the other place has too: a seed determines each device's images and the first model."""
        theirs = {cell.seed for cell in other.cells}
        both = [(cell, one) for cell, one in zip(self.cells, self.kept, strict=True) if cell.seed in theirs]
        if not both:
            raise Unsupported(f"{self.cell.key} and {other.cell.key} have no seed in common")
        return Finished(*zip(*both, strict=True))


def _printed(cell: Cell) -> float:
    column = cell.column or cell.recipe.columns_of(cell.group)[0]
    value = cell.recipe.paper_value(cell.group, cell.row.id, column.id)
    if value is None:
        raise BadInput(f"the paper prints no number for {cell.key}")
    return value


def _stretch(place: Finished) -> float:
    found = [one.largest_stretch for one in place.kept if one.largest_stretch is not None]
    if not found:
        raise Unsupported(f"{place.cell.key} does not keep the largest T_s / b")
    return max(found)


def _round(place: Finished, one: KeptCell) -> int:
    """Returns the round whose accuracy the table shows, from 1."""
    return one.round_of(place.cell) or one.rounds


def _mean_of(metric: Metric) -> Callable[[Finished], float]:
    """Makes a field of another accuracy than the table's: after the last round if the table shows the best one."""
    return lambda place: fmean(place.accuracies(metric, "last" if place.cell.recipe.window == "best" else None))


FIELDS: dict[str, tuple[str, Callable[[Finished], float]]] = {
    "ours": ("{:.1f}", lambda place: fmean(place.accuracies())),
    "paper": ("{:.1f}", lambda place: _printed(place.cell)),
    "difference": ("{:+.1f}", lambda place: fmean(place.accuracies()) - _printed(place.cell)),
    "spread": ("{:.1f}", lambda place: stdev(place.accuracies())),
    "seeds": ("{:.0f}", lambda place: len(place.kept)),
    "last": ("{:.1f}", lambda place: fmean(place.accuracies(window="last"))),
    "least_server": ("{:.4g}", lambda place: min(one.epsilon_server for one in place.kept)),
    "server": ("{:.4g}", lambda place: max(one.epsilon_server for one in place.kept)),
    "release": ("{:.4g}", lambda place: max(one.epsilon_release for one in place.kept)),
    "median": ("{:.4g}", lambda place: max(one.epsilon_server_median or 0.0 for one in place.kept)),
    "spent": ("{:.1f}", lambda place: max(one.by_round["median"][_round(place, one) - 1] for one in place.kept)),
    "stop": ("{:.0f}", lambda place: max(_round(place, one) for one in place.kept)),
    "multiplier": ("{:.4g}", lambda place: place.kept[0].noise_multiplier),
    "stretch": ("{:,.0f}", _stretch),
    "noise": ("{:.1f}", lambda place: place.kept[0].noise(place.cell)),
    **{metric.removeprefix("accuracy_"): ("{:.1f}", _mean_of(metric)) for metric in get_args(Metric)},
}
"""The fields that prose may name: format and function. `server` and `release` are epsilons of the noised values;
`median` is of the median device, `spent` too, until the round that the table shows, which is `stop` where a reading
stops at a budget; all three are the most over seeds. `noise` is `KeptCell.noise`; `stretch` is DP-FedSim's largest
T_s / b; `own_common` and similar names are the other accuracies."""


class Evidence:
    """All finished cells of all recipes."""

    def __init__(self, kept: Kept, papers: Iterable[str]) -> None:
        self.kept = kept
        self.recipes = {paper: load_recipes(paper) for paper in papers}
        found = defaultdict[str, list[tuple[Cell, KeptCell]]](list)
        self._cells = dict[str, Cell]()
        for recipe in (each for those in self.recipes.values() for each in those if not each.open):
            for cell in cells_of(recipe, seeds=SEEDS, quick=False):
                self._cells.setdefault(address := _address(cell), cell)
                if one := kept.shown(cell):
                    found[address].append((cell, one))
        self._finished = {address: Finished(*zip(*those, strict=True)) for address, those in found.items()}

    def places(self) -> Iterable[tuple[str, Finished]]:
        """Returns all finished places, by address."""
        return self._finished.items()

    def at(self, address: str, *, within: Recipe | None = None) -> Finished:
        """Finds a place. Raises `Unsupported` if its cell is not finished, `BadInput` if no recipe has it."""
        whole = self._whole(address, within)
        if whole not in self._finished:
            raise Unsupported(f"{whole} is open")
        return self._finished[whole]

    def printed(self, address: str, *, within: Recipe | None = None) -> float:
        """Returns the printed number in percent; the cell need not be finished. Raises `BadInput`."""
        return _printed(self._cells[self._whole(address, within)])

    def _whole(self, address: str, within: Recipe | None) -> str:
        if within and address.count("/") < 4:
            address = f"{within.paper}/{within.name}/{address}"
        if address not in self._cells:
            raise BadInput(f"no recipe has a cell {address}")
        return address

    def filled(self, prose: str, *, within: Recipe | None = None) -> str:
        """Returns the prose with numbers in place of its references.

        Raises `Unsupported` if a cell is not finished or contradicts the prose, `BadInput` for a wrong reference.
        """

        def number(match: re.Match[str]) -> str:
            field, silent = match["field"] or "ours", match["field"] == "if"
            if silent and match["sign"] in ("<", ">"):
                field = "ours"
            if field not in FIELDS:
                raise BadInput(f"{match[0]}: there is no {field}; there are {', '.join(FIELDS)}")
            form, taken = FIELDS[field]
            if field == "paper" and match["sign"] in (None, "-"):
                printed = [self.printed(each, within=within) for each in (match["one"], match["other"]) if each]
                return form.format(printed[0] - sum(printed[1:]))
            place = self.at(match["one"], within=within)
            if not match["sign"]:
                return form.format(taken(place))
            beside = self.at(match["other"], within=within)
            both = place.shared_with(beside), beside.shared_with(place)
            if field == "spread" and match["sign"] == "-":
                return form.format(stdev(map(sub, *(each.accuracies() for each in both))))
            one, other = map(taken, both)
            if match["sign"] == "-":
                return form.format(one - other)
            if not (one < other if match["sign"] == "<" else one > other):
                raise Unsupported(f"{match[0]} does not hold: {form.format(one)} and {form.format(other)}")
            return "" if silent else f"{form.format(one)} against {form.format(other)}"

        filled = REFERENCE.sub(number, prose)
        filled = re.sub(r"\d\.\d+e\+0[45]", lambda each: f"{float(each[0]):,.0f}", filled)
        if "{" in filled:
            raise BadInput(f"a reference that cannot be read: {filled}")
        return filled


def _address(cell: Cell) -> str:
    parts = (cell.recipe.paper, cell.recipe.name, cell.place, *([cell.reading.id] if cell.reading else []))
    return "/".join(parts)
