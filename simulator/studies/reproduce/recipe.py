"""Reads recipes: a recipe is one table or figure of a paper as data, in TOML.

A recipe has a base task, groups of rows (usually one per data set), rows (methods or variants), columns (a privacy
budget, a degree of heterogeneity) and sometimes readings: possible meanings of a sentence in the paper. Each of them
changes keys of the base task; `docs/reproducing.md` describes the file. A table that cannot be run has no task; its
`open` gives the reason.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from hushfleet.errors import BadInput
from hushfleet.schema import read_file

Metric = Literal["accuracy_own_common", "accuracy_own_local", "accuracy_next_local", "accuracy_global", "round_time"]
Window = Literal["last", "mean-last-10", "best"]
METRICS: dict[str, str] = {
    "accuracy_own_common": "mean over devices of each one's personalized model on the common test set",
    "accuracy_own_local": "mean over devices of each one's personalized model on test images with its own mix of "
    "labels",
    "accuracy_next_local": "mean over all devices of what each one's next round begins with, its own part in the new "
    "global model, on test images with its own mix of labels",
    "accuracy_global": "the global model on the common test set",
    "round_time": "processor time of rounds, in percent of the first row's, whose rounds alternate with them",
}
WINDOWS: dict[str, str] = {
    "last": "after the last round",
    "mean-last-10": "mean of the last 10 rounds",
    "best": "the best round",
}
LAST_ROUNDS = 10
_Id = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


_SINGULAR = {f"{name}s": name for name in ("group", "row", "column", "reading", "special", "claim", "objection")}
"""The names in a file of fields that have several tables: a `[[row]]` for each of `rows`."""


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a recipe's file."""


class Change(_Table, frozen=True, kw_only=True):
    """The changes that a row, a column, ... makes to the base task.

    :param set: values by key, such as `"privacy.epsilon"`.
    :param unset: keys that go back to their defaults.
    """

    set: dict[str, Any] = {}
    unset: tuple[str, ...] = ()


class Axis(Change, frozen=True, kw_only=True):
    """A row, a column, a group or a reading.

    :param note: a remark that is shown below the table.
    :param open: the reason why it cannot be run, or empty.
    """

    id: _Id
    title: str
    note: str = ""
    open: str = ""


class PaperReading(Axis, frozen=True, kw_only=True):
    """A possible meaning of what the paper does not say.

    :param stop_epsilon: the number is that of the last round in which the median device's epsilon against the server is
        within this budget; None: of the round that the table names.
    """

    stop_epsilon: Annotated[float, Meta(gt=0)] | None = None


class TableRow(Axis, frozen=True, kw_only=True):
    """A method or a variant.

    :param same_in_all_columns: the columns do not change it (no noise), so one cell is used for all of them.
    :param alone: each device trains alone (`train_alone`); the task's method only determines how it trains.
    :param metric: set if it is not the table's, such as for a method without personalized models; a group's has
        priority.
    :param outside: the reason why it is excluded from its column's order, such as noise that is not comparable.
    :param reads: the row with the same printed numbers, if this row only runs it in another way.
    """

    same_in_all_columns: bool = False
    alone: bool = False
    metric: Metric | None = None
    outside: str = ""
    reads: str = ""


class TableColumn(Axis, frozen=True, kw_only=True):
    """A setting that all rows are run with.

    :param paper_epsilon: the epsilon that the paper prints, or None.
    """

    paper_epsilon: Annotated[float, Meta(gt=0)] | None = None


class RowGroup(Axis, frozen=True, kw_only=True):
    """Rows that share a data set; `metric` is set if it is not the table's.

    :param substitutions: differences between the task and the paper's: "Fashion-MNIST instead of SVHN".
    :param values: the paper's numbers in percent, by row: one for each column, NaN if the paper has none.
    :param only_order: the paper's numbers are from another network or other data: only orders can be compared.
    :param other_data: the data set is not the paper's.
    :param quoted: rows whose numbers are in the paper's text, or follow from it, instead of the table; and the place.
    :param columns: the columns that the group has; empty for all.
    :param rounds: the round whose accuracy each column shows, counted from 1; empty for the last round of the run.
    :param gpu: the network is too large for processor cores.
    """

    metric: Metric | None = None
    values: dict[str, tuple[float, ...]] = {}
    quoted: dict[str, str] = {}
    substitutions: tuple[str, ...] = ()
    only_order: bool = False
    other_data: bool = False
    columns: tuple[str, ...] = ()
    rounds: tuple[Annotated[int, Meta(gt=0)], ...] = ()
    gpu: bool = False


class Special(Change, frozen=True, kw_only=True):
    """A change of some cells only; names may contain `*`, and a name that is left out means all."""

    group: str | None = None
    row: str | None = None
    column: str | None = None
    reading: str | None = None
    open: str = ""

    def applies(self, *, group: str, row: str, column: str, reading: str) -> bool:
        here = {"group": group, "row": row, "column": column, "reading": reading}
        return all(fnmatchcase(id, getattr(self, name) or "*") for name, id in here.items())


class Quick(Change, frozen=True, kw_only=True):
    """The changes of `--quick`, and the `label` that every output then shows."""

    label: str


class Recipe(_Table, frozen=True, kw_only=True, rename=_SINGULAR):
    """One table or figure.

    :param paper: the name of its folder, such as `fedglp-adp`; `name` is the name of its file, such as `table-1`.
    :param label: its name in the paper: "Table 1".
    :param claim: what the paper says about it, in one sentence.
    :param readings_text: what the paper does not specify, and what is used here.
    :param findings: sentences about its results, for the page of results.
    :param judged_as: `table/row`: each row here is that row, run in another way, and is compared with the other rows of
        that table.
    :param first: the cells that run first, in this order, as `group/row/column` with `*`; the others follow.
    """

    paper: str
    name: str
    label: str
    title: str
    claim: str = ""
    readings_text: str = ""
    findings: tuple[str, ...] = ()
    open: str = ""
    needs: tuple[str, ...] = ()
    metric: Metric = "accuracy_global"
    window: Window = "last"
    task: dict[str, Any] = {}
    groups: tuple[RowGroup, ...] = ()
    rows: tuple[TableRow, ...] = ()
    columns: tuple[TableColumn, ...] = ()
    readings: tuple[PaperReading, ...] = ()
    specials: tuple[Special, ...] = ()
    judged_as: Annotated[str, Meta(pattern=r"^([a-z0-9-]+/[a-z0-9.-]+)?$")] = ""
    first: tuple[str, ...] = ()
    quick: Quick | None = None

    def __post_init__(self) -> None:
        if bool(self.open) == bool(self.task):
            raise ValueError("a recipe has either a [task] with rows and columns, or `open`, the reason why not")
        ids = {name: [axis.id for axis in getattr(self, f"{name}s")] for name in ("group", "row", "column", "reading")}
        for name, those in ids.items():
            if len(set(those)) != len(those):
                raise ValueError(f"{name}: an id stands there twice: {those}")
            if self.task and not those and name != "reading":
                raise ValueError(f"there is no [[{name}]]")
        for group in self.groups:
            columns = group.columns or ids["column"]
            if unknown := set(columns) - set(ids["column"]):
                raise ValueError(f"group {group.id}: there is no column {', '.join(sorted(unknown))}")
            if unknown := set(group.values) - set(ids["row"]):
                raise ValueError(f"group {group.id}: values of {', '.join(sorted(unknown))}, which is no row")
            for what, values in {"rounds": group.rounds or columns, **group.values}.items():
                if len(values) != len(columns):
                    raise ValueError(f"group {group.id}: {len(values)} of {what} for {len(columns)} columns")

    def metric_of(self, group: RowGroup, row: TableRow | None = None) -> Metric:
        return group.metric or (row.metric if row else None) or self.metric

    def columns_of(self, group: RowGroup) -> list[TableColumn]:
        return [column for column in self.columns if not group.columns or column.id in group.columns]

    def round_of(self, group: RowGroup, column: str) -> int | None:
        """Returns the round whose accuracy a place shows; None for the last round of the run."""
        return dict(zip((each.id for each in self.columns_of(group)), group.rounds, strict=False)).get(column)

    def paper_value(self, group: RowGroup, row: str, column: str) -> float | None:
        """Returns the paper's number in percent; None if the paper prints none."""
        by_column = zip((each.id for each in self.columns_of(group)), group.values.get(row, ()), strict=False)
        value = dict(by_column).get(column)
        return None if value != value else value


class PaperClaim(_Table, frozen=True, kw_only=True):
    """A claim of the paper: a line of the table at the top of the page.

    :param numbers: the pair of numbers that decides it.
    :param obstacle: the reason why no more can be said.
    """

    claim: str
    holds: Literal["yes", "partly", "no", "open"]
    numbers: str
    seeds: str
    obstacle: str


class Objection(_Table, frozen=True, kw_only=True):
    """An objection of the paper's authors, and the answer."""

    objection: str
    answer: str


class Paper(_Table, frozen=True, kw_only=True, rename=_SINGULAR):
    """The content of `paper.toml`, which all tables of the paper share.

    :param summary: what holds of it, in one sentence.
    :param contradictions: contradictions that the paper's text shows without a run.
    """

    name: str
    source: str
    summary: str
    method: str = ""
    claims: Annotated[tuple[PaperClaim, ...], Meta(max_length=5)] = ()
    contradictions: tuple[str, ...] = ()
    objections: tuple[Objection, ...] = ()


def recipes_folder() -> Path:
    return Path(__file__).with_name("recipes")


def paper_names() -> list[str]:
    return sorted(path.parent.name for path in recipes_folder().glob("*/paper.toml"))


def load_paper(name: str) -> Paper:
    """Reads `paper.toml`. Raises `BadInput` for an unknown paper, with the names of the known ones."""
    names = paper_names()
    if name not in names:
        raise BadInput(f"there is no paper {name!r}; there are {', '.join(names)} (`hushfleet reproduce --list`)")
    path = recipes_folder() / name / "paper.toml"
    return _parsed(Paper, read_file(path), path)


def load_recipes(paper: str) -> list[Recipe]:
    """Returns all tables and figures of a paper, tables first. Raises `BadInput`."""
    load_paper(paper)
    paths = [path for path in (recipes_folder() / paper).glob("*.toml") if path.name != "paper.toml"]
    return [load_recipe(path) for path in sorted(paths, key=_table_order)]


def find_recipe(paper: str, *, table: str | None = None, figure: str | None = None) -> Recipe:
    """Finds a table or figure by its printed number (1, or II). If the paper has only one, no number is needed.

    Raises `BadInput` with a list of the tables and figures.
    """
    recipes = load_recipes(paper)
    there = ", ".join(f"--{recipe.name.replace('-', ' ', 1)}" for recipe in recipes)
    if table is None and figure is None and len(recipes) == 1:
        return recipes[0]
    if (table is None) == (figure is None):
        raise BadInput(f"give one of {there}")
    kind, number = ("table", table) if table else ("figure", figure or "")
    found = [recipe for recipe in recipes if recipe.name == f"{kind}-{_arabic(number or '')}"]
    if not found:
        raise BadInput(f"{paper} has no {kind} {number} here; it has {there}")
    return found[0]


def load_recipe(path: Path) -> Recipe:
    """Reads a recipe file. With `like`, the keys of `_SHARED` that it lacks come from the recipe named there."""
    plain: dict[str, Any] = read_file(path)
    if like := plain.pop("like", ""):
        plain = {key: value for key, value in read_file(path.with_stem(like)).items() if key in _SHARED} | plain
    kind, _, number = path.stem.partition("-")
    named = {"label": f"{kind.capitalize()} {number}"} | plain | {"paper": path.parent.name, "name": path.stem}
    return _parsed(Recipe, named, path)


_SHARED = ("task", "reading", "metric", "window", "quick")
_Parsed = TypeVar("_Parsed", bound=_Table)


def _parsed(kind: type[_Parsed], plain: dict[str, Any], path: Path) -> _Parsed:
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"{path}: {error}") from error


def _table_order(path: Path) -> tuple[int, int, str]:
    kind, _, number = path.stem.partition("-")
    digits = re.match(r"\d*", number)
    return {"table": 0, "figure": 1}.get(kind, 2), int(digits[0]) if digits and digits[0] else 0, path.stem


_ROMAN = {"i": 1, "ii": 2, "iii": 3, "iv": 4, "v": 5, "vi": 6}


def _arabic(number: str) -> str:
    number = re.sub(r"^(table|tab|figure|fig)[. -]*", "", number.strip().lower())
    return str(_ROMAN.get(number, number))


def changed(task: Mapping[str, Any], changes: Iterable[Change]) -> dict[str, Any]:
    """Returns a deep copy of the base task, with the changes made in their order."""
    plain = copy.deepcopy(dict(task))
    for change in changes:
        for key in change.unset:
            section, name = _place(plain, key)
            section.pop(name, None)
        for key, value in change.set.items():
            section, name = _place(plain, key)
            section[name] = copy.deepcopy(value)
    return plain


def _place(plain: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *path, name = key.split(".")
    for part in path:
        plain = plain.setdefault(part, {})
    return plain, name
