"""A recipe: one table or figure of a paper as data, in TOML.

A recipe has a base task, groups of rows (mostly a data set each), rows (methods or variants), columns (a privacy
budget, a degree of heterogeneity) and perhaps readings, that is, what a sentence of the paper may mean. Each of them
changes keys of the base task; `docs/reproducing.md` describes the file. A table that cannot be run has `open`, the
reason, and no task.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hushfleet.errors import BadInput

Metric = Literal["accuracy_own_common", "accuracy_own_local", "accuracy_global"]
Window = Literal["last", "mean-last-10", "best"]
METRICS: dict[str, str] = {
    "accuracy_own_common": "mean over devices of each one's own model on the common test set",
    "accuracy_own_local": "mean over devices of each one's own model on test images with its own mix of labels",
    "accuracy_global": "the global model on the common test set",
}
WINDOWS: dict[str, str] = {
    "last": "after the last round",
    "mean-last-10": "mean of the last 10 rounds",
    "best": "the best round",
}
LAST_ROUNDS = 10
_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=True)


class Change(_Part):
    """What a row, a column, ... does to the base task.

    :param set: values by key, such as `"privacy.epsilon"`.
    :param unset: keys that go back to their defaults.
    """

    set: dict[str, Any] = {}
    unset: tuple[str, ...] = ()


class Axis(Change):
    """A row, a column, a group or a reading.

    :param note: what is to be known about it; shown below the table.
    :param open: why it cannot be run, or empty.
    """

    id: _Name
    title: str
    note: str = ""
    open: str = ""


class Row(Axis):
    """:param same_in_all_columns: the columns do not touch it (no noise), so one cell serves them all.
    :param passes: gradients that the method takes for each sample and epoch, for the estimate of time.
    :param metric: where it is not the group's, such as for a method without own models.
    """

    same_in_all_columns: bool = False
    passes: Annotated[float, Field(gt=0)] = 1.0
    metric: Metric | None = None


class Column(Axis):
    """:param paper_epsilon: what the paper prints, or none."""

    paper_epsilon: Annotated[float, Field(gt=0)] | None = None


class Group(Axis):
    """Rows that share a data set; `metric` where it is not the table's.

    :param substitutions: where the task is not the paper's: "Fashion-MNIST instead of SVHN".
    :param values: the paper's numbers in percent, by row: one for each column, NaN where the paper has none.
    :param quoted: rows whose numbers are not in the table but in the text, or follow from it; and where.
    :param columns: those that the group has; empty for all.
    :param gpu: the network is too large for processor cores.
    """

    metric: Metric | None = None
    values: dict[str, tuple[float, ...]] = {}
    quoted: dict[str, str] = {}
    substitutions: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    gpu: bool = False


class Special(Change):
    """A change of some cells only; a name that is left out stands for all.

    :param same: rows that have the same in this column.
    """

    group: str | None = None
    row: str | None = None
    column: str | None = None
    reading: str | None = None
    open: str = ""


class Quick(Change):
    """What `--quick` changes, and `label`, which every output then carries."""

    label: str


class Recipe(_Part):
    """One table or figure.

    :param label: what the paper calls it, where that is not "Table 1".
    :param claim: what the paper says about it, in one sentence.
    :param readings_text: what the paper leaves open, and what is taken here.
    :param first: cells in the order in which they are run, as `group/row/column` with `*`; the others follow.
    """

    title: str
    label: str = ""
    claim: str = ""
    readings_text: str = ""
    open: str = ""
    needs: tuple[str, ...] = ()
    metric: Metric = "accuracy_global"
    window: Window = "last"
    task: dict[str, Any] = {}
    groups: Annotated[tuple[Group, ...], Field(alias="group")] = ()
    rows: Annotated[tuple[Row, ...], Field(alias="row")] = ()
    columns: Annotated[tuple[Column, ...], Field(alias="column")] = ()
    readings: Annotated[tuple[Axis, ...], Field(alias="reading")] = ()
    specials: Annotated[tuple[Special, ...], Field(alias="special")] = ()
    first: tuple[str, ...] = ()
    quick: Quick | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if bool(self.open) == bool(self.task):
            raise ValueError("a recipe has either a [task] with rows and columns, or `open`, the reason why not")
        rows, columns = [row.id for row in self.rows], [column.id for column in self.columns]
        for name, ids in (
            ("group", [group.id for group in self.groups]),
            ("row", rows),
            ("column", columns),
            ("reading", [reading.id for reading in self.readings]),
        ):
            if len(set(ids)) != len(ids):
                raise ValueError(f"{name}: an id stands there twice: {ids}")
            if self.task and not ids and name != "reading":
                raise ValueError(f"there is no [[{name}]]")
        for group in self.groups:
            if unknown := set(group.columns) - set(columns):
                raise ValueError(f"group {group.id}: there is no column {', '.join(sorted(unknown))}")
            for row, values in group.values.items():
                if row not in rows:
                    raise ValueError(f"group {group.id}: values of {row!r}, which is no row")
                if len(values) != len(group.columns or columns):
                    raise ValueError(f"group {group.id}, row {row}: {len(values)} values for its columns")
        return self

    def metric_of(self, group: Group, row: Row | None = None) -> Metric:
        return (row.metric if row else None) or group.metric or self.metric

    def columns_of(self, group: Group) -> tuple[Column, ...]:
        return tuple(column for column in self.columns if not group.columns or column.id in group.columns)

    def paper_value(self, group: Group, row: str, column: str) -> float | None:
        """In percent; None where the paper prints none."""
        values = group.values.get(row)
        if values is None:
            return None
        at = [each.id for each in self.columns_of(group)].index(column)
        return None if values[at] != values[at] else values[at]


@dataclass(frozen=True)
class Entry:
    """A recipe and its place: paper `fedglp-adp`, name `table-1`."""

    paper: str
    name: str
    recipe: Recipe

    @property
    def label(self) -> str:
        """As the paper calls it: "Table 1"."""
        kind, _, number = self.name.partition("-")
        return self.recipe.label or f"{kind.capitalize()} {number}"


class Paper(_Part):
    """`paper.toml`: what all its tables share."""

    name: str
    source: str
    method: str = ""


def recipes_folder() -> Traversable:
    return resources.files("hushfleet.simulator.studies.reproduce") / "recipes"


def paper_names(folder: Traversable | Path | None = None) -> list[str]:
    folder = folder or recipes_folder()
    return sorted(each.name for each in folder.iterdir() if each.is_dir() and (each / "paper.toml").is_file())


def load_paper(name: str, folder: Traversable | Path | None = None) -> Paper:
    """Raises `BadInput` for a paper that is not there, and names those that are."""
    names = paper_names(folder)
    if name not in names:
        raise BadInput(f"there is no paper {name!r}; there are {', '.join(names)} (`hushfleet reproduce --list`)")
    path = (folder or recipes_folder()) / name / "paper.toml"
    return _parsed(Paper, _read(path), path)


def load_entries(paper: str, folder: Traversable | Path | None = None) -> list[Entry]:
    """All tables and figures of a paper, tables first. Raises `BadInput`."""
    load_paper(paper, folder)
    files = [each for each in ((folder or recipes_folder()) / paper).iterdir() if each.name.endswith(".toml")]
    names = sorted((each.name.removesuffix(".toml") for each in files if each.name != "paper.toml"), key=_table_order)
    return [Entry(paper, name, load_recipe((folder or recipes_folder()) / paper, name)) for name in names]


def load_entry(paper: str, kind: str, number: str, folder: Traversable | Path | None = None) -> Entry:
    """:param number: as the paper prints it: 1, or II. Raises `BadInput` with what there is."""
    entries = load_entries(paper, folder)
    wanted = f"{kind}-{_arabic(number)}"
    for entry in entries:
        if entry.name == wanted:
            return entry
    there = ", ".join(entry.label for entry in entries)
    raise BadInput(f"{paper} has no {kind} {number} here; it has {there}")


def load_recipe(folder: Traversable | Path, name: str) -> Recipe:
    """A recipe file. With `like`, what it lacks of task, readings, metric and `quick` comes from that one."""
    path = folder / f"{name}.toml"
    plain = _read(path)
    if like := plain.pop("like", ""):
        plain = {key: value for key, value in _read(folder / f"{like}.toml").items() if key in _SHARED} | plain
    return _parsed(Recipe, plain, path)


_SHARED = ("task", "reading", "metric", "window", "quick")


def _read(path: Traversable | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read the recipe {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} does not parse: {error}") from error


def _parsed(kind: type[Any], plain: dict[str, Any], path: Traversable | Path) -> Any:
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise BadInput(f"{path}: " + "; ".join(lines)) from error


def _table_order(name: str) -> tuple[int, int, str]:
    kind, _, number = name.partition("-")
    return {"table": 0, "figure": 1}.get(kind, 2), int(number) if number.isdigit() else 0, name


_ROMAN = {"i": 1, "ii": 2, "iii": 3, "iv": 4, "v": 5, "vi": 6}


def _arabic(number: str) -> str:
    number = re.sub(r"^(table|tab|figure|fig)[. -]*", "", number.strip().lower())
    return str(_ROMAN.get(number, number))


def changed(task: Mapping[str, Any], changes: Sequence[Change]) -> dict[str, Any]:
    """A deep copy of the base task with each change in turn."""
    plain = _copy(task)
    for change in changes:
        for key in change.unset:
            section, name = _place(plain, key)
            section.pop(name, None)
        for key, value in change.set.items():
            section, name = _place(plain, key)
            section[name] = _copy(value)
    return plain


def _place(plain: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *path, name = key.split(".")
    for part in path:
        plain = plain.setdefault(part, {})
    return plain, name


def _copy(value: Any) -> Any:
    return {name: _copy(each) for name, each in value.items()} if isinstance(value, Mapping) else value
