"""Reads labelled samples from a CSV file with a header and one line for each sample.

    label,device,ax,ay,az
    walk,anna,0.1,0.2,9.7

The column `label` names the class, and `device` (in a simulation) the device that has the sample; a task may name other
columns, and some of times and records (`hushfleet.data.series`). All other columns, or those of `data.columns`, are
values, in their order: a vector, or C x H x W values for an input shape (C, H, W), the last axis fastest. If a task's
targets are not classes, the columns that its `class_names` name are the targets, by default `label` alone.

A task that learns to reconstruct its input needs no labels: its column `fault` may be missing, and is 0 for a normal
sample. If a file has one column per channel, and the input shape has more values, a line is one step of a series, which
is cut into windows without overlap; a window with a faulty step is a fault. Windows are counted by the lines of the
file: one with an unusable or an empty line is left out whole, and those after it stay what they are. In a simulation
the steps of one device follow each other, and its first window begins at its first line.

Each line is read by itself, so that no sample decides how another is read: what the header and `SampleForm` do not fix,
a line says for itself. No cell below the header may contain a line break.

Files of Excel are accepted too: with semicolons or tabs between columns, then possibly with decimal commas; in UTF-16;
with rows of empty cells.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.data import series
from hushfleet.data.arrays import Data
from hushfleet.data.form import ANY_FORM, SampleForm, one_form
from hushfleet.data.measurements import check_names
from hushfleet.data.records import are_pixels
from hushfleet.errors import BadInput
from hushfleet.paths import no_file

LABEL, DEVICE = "label", "device"
MOST_CHARACTERS = 1 << 23  # in a line: longer ones are not brought into a board's memory
_SEPARATORS = ",;\t"


@dataclass(frozen=True)
class CsvLayout:
    """The content of a CSV file, by the words of a task.

    :param form: what the task, or the owner of a board, has fixed.
    :param input_shape: (C, H, W) of a sample; None: a vector of all columns of values.
    :param outputs: the columns that are the targets; these then replace the labels.
    :param series: for a task without labels: these columns may be missing, and a line may be a step of a series.
    :param cuts: whether a series may be cut; if lines are removed, the windows after them change.
    :param owners: whether the column `device` counts, as in a simulation. On a board all lines are of one device.
    :param in_utf8: whether UTF-16 is refused. There, half a character makes all later lines unreadable.
    """

    form: SampleForm = ANY_FORM
    input_shape: tuple[int, int, int] | None = None
    outputs: Sequence[str] = ()
    series: bool = False
    cuts: bool = True
    owners: bool = False
    in_utf8: bool = False

    @property
    def label(self) -> str:
        """The column of labels."""
        return one_form(self.form.label_column) or LABEL

    @property
    def device(self) -> str:
        """The column of devices."""
        return one_form(self.form.device_column) or DEVICE

    @property
    def arranging(self) -> dict[str, str]:
        """The columns of times and of records, if there are any."""
        named = {"times": self.form.time_column, "records": self.form.record_column}
        return {key: one_form(name) for key, name in named.items() if name}

    @property
    def needed(self) -> Sequence[str]:
        """The columns that a header must name, besides those of values."""
        return (*(() if self.series else self.outputs or (self.label,)), *self.arranging.values())


class CsvTable(NamedTuple):
    """The samples of a file.

    :param values: float32 or, for pixels, uint8 `[n, F]`, or `[n, C, H, W]` for a given shape.
    :param targets: labels, text `[n]`; or the columns of outputs, float32 `[n, outputs]`.
    :param owners: text `[n]`, the device of each sample; None if the file does not name them.
    :param names: the names of the values.
    """

    values: np.ndarray
    targets: np.ndarray
    owners: np.ndarray | None
    names: tuple[str, ...]


ANY_LAYOUT = CsvLayout()


def load_csv_set(path: Path, layout: CsvLayout = ANY_LAYOUT) -> Data:
    """Reads a file, or a folder with `train.csv` and `test.csv`, for a simulation. Raises `BadInput`."""
    one = path.suffix == ".csv" or path.is_file()
    parts = {"train": path} if one else {part: path / f"{part}.csv" for part in ("train", "test")}
    if len(parts) == 2 and not parts["train"].exists():  # an aggregator in the field has a test part alone
        del parts["train"]
    found = {part: read_csv(file, replace(layout, owners=True)) for part, file in parts.items()}
    if len({each.names for each in found.values()}) > 1:
        raise BadInput(f"{parts['test']} must have the columns of values of {parts['train']}, in the same order")
    arrays: dict[str, Any] = {
        f"{part}_{key}": value
        for part, each in found.items()
        for key, value in zip(("x", "y", "device"), each, strict=False)
    }
    return Data(**arrays, column_names=next(iter(found.values())).names, layout="channels-first")


def read_csv(
    path: Path, layout: CsvLayout = ANY_LAYOUT, *, skipped: list[str] | None = None, unfinished: bool = False
) -> CsvTable:
    """Reads a file.

    :param skipped: the list that receives a text for each unusable line, which is left out; None: it is an error.
    :param unfinished: whether the file is still being written: an incomplete last line is then left out.
    :raises BadInput: names the file, the line and the column.
    """
    layout = replace(layout, outputs=list(map(one_form, layout.outputs)))
    if what := no_file(path):
        raise BadInput(f"{path} is {what}, and no CSV file")
    try:
        errors = "strict" if skipped is None and not unfinished else "replace"  # a character may be half written
        with path.open("rb") as raw, io.TextIOWrapper(raw, _encoding(raw), errors) as file:
            if layout.in_utf8 and file.encoding == "utf-16":
                raise BadInput(f"{path} is UTF-16, where a damaged line damages all after it; save it as CSV UTF-8")
            lines = _lines(file, unfinished)
            separator, header, before = _header(path, lines, layout.needed)
            rows = _Rows(header, separator, _columns(path, header, layout), layout, are_alike=skipped is None)
            for number, line in enumerate(lines, before + 1):
                try:
                    rows.add(number, line)
                except BadInput as error:
                    if skipped is None:
                        raise BadInput(f"{path}, line {number}: {error}") from error
                    skipped.append(f"line {number}: {error}")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not {error.encoding.upper()} ({error.reason}); save it as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a CSV file: {error}") from error
    values, targets, owners, names = rows.table()
    if rows.is_step and layout.arranging:
        raise BadInput(
            f"{path}: a line is one step of a series, and data.time_column needs data.record_column beside it"
        )
    if layout.arranging:
        steps = math.prod(layout.input_shape[1:]) if layout.input_shape is not None else None
        values, (targets, owners) = series.arranged(
            values, (targets, owners), **rows.arranging(), where=str(path), steps=steps, skipped=skipped
        )
        names = tuple(name for name in names for _ in range(values.shape[2])) if values.ndim == 3 else names
    elif rows.is_step:
        assert layout.input_shape is not None
        size = math.prod(layout.input_shape)
        if not layout.cuts:
            raise BadInput(
                f"{path}: a line is one step of a series. With data.window write a whole sample of {size} values into "
                "each line: samples that are cut of a series change when lines go, and would come into a second window"
            )
        steps = size // len(names)
        starts, broken = _windows(np.array(rows.numbers, np.int64) - before - 1, owners, steps)
        if skipped is not None:
            skipped += (f"line {before + 1 + line} and those after it: a step is unusable or empty" for line in broken)
        places = starts[:, None] + np.arange(steps)  # [windows, steps]
        values, targets = values[places].transpose(0, 2, 1), targets[places].max(1, initial=0)
        owners = None if owners is None else owners[starts]
        names = tuple(name for name in names for _ in range(steps))
    if layout.input_shape is not None:
        channels, *sides = layout.input_shape
        is_last = layout.form.layout == "channels-last" and values.ndim == 2
        values = values.reshape(-1, *sides, channels) if is_last else values.reshape(-1, *layout.input_shape)
        values = np.moveaxis(values, -1, 1) if is_last else values
    values = np.ascontiguousarray(values, np.uint8 if rows.are_pixels else np.float32)  # ONNX Runtime takes no other
    return CsvTable(values, targets, owners, names)


def _windows(lines: np.ndarray, owner: np.ndarray | None, steps: int) -> tuple[np.ndarray, list[int]]:
    """Returns the first row of each whole window, int `[windows]`, and the first line of each broken one.

    :param lines: the place of each usable row's line below the header, from 0, int `[rows]`.
    :param owner: the device of each row; its first window begins at its first line. None: at line 0.
    """
    runs = np.zeros(len(lines), np.int64)
    first = np.zeros(1, np.int64)
    if owner is not None and len(lines):
        runs[1:] = np.cumsum(owner[1:] != owner[:-1])
        first = lines[np.unique(runs, return_index=True)[1]]
    windows = np.stack((runs, (lines - first[runs]) // steps))
    found, starts, counts = np.unique(windows, axis=1, return_index=True, return_counts=True)
    may_go_on = np.append(found[0, 1:] != found[0, :-1], True)[: len(counts)]  # the last of a run may be incomplete
    broken = found[:, (counts < steps) & ~may_go_on]
    return starts[counts == steps].astype(np.int64), (first[broken[0]] + broken[1] * steps).tolist()


def _encoding(raw: io.BufferedReader) -> str:
    return "utf-16" if raw.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _lines(file: io.TextIOBase, unfinished: bool) -> Iterator[str | None]:
    """Yields each line; None in place of one that is too long for a board's memory."""
    while line := file.readline(MOST_CHARACTERS):
        end, is_long = line, len(line) == MOST_CHARACTERS
        while len(end) == MOST_CHARACTERS and not end.endswith("\n"):
            end = file.readline(MOST_CHARACTERS)
        if end.endswith("\n") or not unfinished:
            yield None if is_long else line


def _header(path: Path, lines: Iterator[str | None], names: Sequence[str]) -> tuple[str, list[str], int]:
    """Returns the separator, the names of the columns, and the number of lines that they take.

    :param names: the columns that it must have. They show the separator; without them it is the most frequent one.
    """
    first = next(lines, "")
    if first is None:
        raise BadInput(f"{path}: the first line has more than {MOST_CHARACTERS} characters; it must name the columns")
    separator = _SEPARATORS[0]
    if names:
        for each in reversed(_SEPARATORS):
            cells = next(csv.reader([first], delimiter=each), [])
            separator = each if set(names) <= {one_form(name.strip()) for name in cells} else separator
    else:
        separator = max(_SEPARATORS, key=first.count)
    reader = csv.reader((line or "" for line in chain([first], lines)), delimiter=separator)
    return separator, [one_form(name.strip()) for name in next(reader, [])], reader.line_num


def _columns(path: Path, header: Sequence[str], layout: CsvLayout) -> list[int]:
    """Returns the places of the columns of values, in the order in which they are wanted.

    Raises `BadInput` for a header that does not fit.
    """
    check_names(header, str(path))
    first: dict[str, int] = {}
    for number, name in enumerate(header, 1):
        if (before := first.setdefault(name, number)) != number:
            raise BadInput(
                f"{path}: columns {before} and {number} are both named {name!r}; rename one, or leave it out"
            )
    for name in layout.needed:
        if name not in first:
            raise BadInput(
                f"{path}: the first line must name the columns, one of them {name!r}; it is {header[:8]}"
                + "; columns are separated by commas, semicolons or tabs" * (len(header) == 1)
            )
    others, shape = (layout.label, layout.device, *layout.arranging.values(), *layout.outputs), layout.input_shape
    order = list(map(one_form, layout.form.columns))
    names = [name for name in header if name not in others]
    if order and set(order) < set(names):
        names = order  # others are left out
    sizes = [len(names)] if shape is None else [math.prod(shape)]
    if shape is not None and (layout.series or layout.form.record_column):
        sizes = [*sizes[: not layout.form.record_column], shape[0]]
    if len(names) not in sizes or not names:
        shown = "" if shape is None else f", the task wants {sizes[0]}: {' x '.join(map(str, shape))}"
        shown += "".join(f"; or {size}, where each line is one step of a series" for size in sizes[1:])
        raise BadInput(f"{path} has {len(names)} columns of values{shown}")
    order = order or names
    if sorted(order) != sorted(names):
        other = sorted(set(names) ^ set(order))[0]
        lacks = "lacks the column" if other in order else "has the column"
        told = f"{', '.join(order[:8])}{', ...' * (len(order) > 8)}"
        raise BadInput(
            f"{path} {lacks} {other!r}, and the columns of values are {told}; data.columns names them, in the task "
            "and, if a board calls them otherwise, in its DEVICE.toml"
        )
    return [header.index(name) for name in order]


class _Rows:
    """The usable lines of a file. It takes little more memory than its numbers.

    :param columns: the places of the columns of values.
    :param are_alike: whether all lines must have the decimal mark of the first that has one.
    """

    def __init__(
        self, header: Sequence[str], separator: str, columns: Sequence[int], layout: CsvLayout, *, are_alike: bool
    ) -> None:
        self._header, self._separator, self._are_alike = header, separator, are_alike
        self._names, self._outputs = tuple(header[place] for place in columns), layout.outputs
        self._places = [*columns, *(header.index(name) for name in layout.outputs if name in header)]
        texts = {"label": layout.label} if not layout.outputs else {}
        texts |= layout.arranging | ({"device": layout.device} if layout.owners else {})
        self._texts = {key: (header.index(name), list[str]()) for key, name in texts.items() if name in header}
        self._decimal = layout.form.decimal or "." * (separator == ",")  # empty: each line by itself
        self.are_pixels = layout.form.values == "pixels"
        is_part = layout.input_shape is not None and len(columns) < math.prod(layout.input_shape)
        self.is_step = is_part and not layout.form.record_column
        """True if a line is a step of a series, so that no line between others may be empty."""
        self.numbers: list[int] = []
        """The number of each usable line in the file."""
        self._found, self._empty = bytearray(), 0

    def add(self, number: int, line: str | None) -> None:
        """Adds a line, unless it is empty. Raises `BadInput` for a line that cannot be used; it leaves nothing
        behind."""
        if line is None:
            raise BadInput(f"it has more than {MOST_CHARACTERS} characters")
        try:
            row = next(csv.reader([line], delimiter=self._separator, strict=True), [])
        except csv.Error as error:
            raise BadInput(str(error)) from error
        if not any(map(str.strip, row)):
            self._empty = self._empty or number
            return
        empty, self._empty = self._empty, 0
        if empty and self.is_step and self._are_alike:
            raise BadInput(f"line {empty} before it is empty, and each line is one step of a series")
        if len(row) != len(self._header):
            raise BadInput(f"{len(row)} fields, and the header has {len(self._header)}")
        mark, values = self._read([row[place] for place in self._places])
        for key, (place, _) in self._texts.items():
            if not row[place].strip():
                raise BadInput(f"{self._header[place]!r} is empty; give it one, or leave the line out")
            if key == "times":
                series.time_of(row[place].strip())
        for place, texts in self._texts.values():
            texts.append(sys.intern(row[place].strip()))  # few different texts, each many times
        self._found += values.tobytes()
        self.numbers.append(number)
        if self._are_alike:
            self._decimal = self._decimal or mark

    def _read(self, cells: Sequence[str]) -> tuple[str, np.ndarray]:
        """Returns the decimal mark of a line, empty if it has none, and its numbers, float32 `[places]`."""
        mark = self._decimal or next((mark for mark in ",." if any(mark in cell for cell in cells)), "")
        found = list[float]()
        for place, cell in zip(self._places, cells, strict=True):
            try:
                if mark == "," and "." in cell:
                    raise ValueError("one of the two separates thousands")
                found.append(float(cell.replace(",", ".") if mark == "," else cell))
            except ValueError as error:
                other = ",.".strip(mark)
                hint = f"; the decimal mark is {mark!r}, see data.decimal" * (len(other) == 1 and other in cell)
                raise BadInput(f"{self._header[place]!r} = {cell!r} is not a number{hint}") from error
        with np.errstate(over="ignore"):  # becomes infinite, which is refused below
            values = np.array(found, np.float32)
        fits, accepted = np.isfinite(values), "finite"
        if self.are_pixels and fits.all():
            fits, accepted = are_pixels(values[: len(self._names)]), "a pixel, 0 to 255"
        for wrong in np.flatnonzero(~fits)[:1]:
            raise BadInput(f"{self._header[self._places[wrong]]!r} = {cells[wrong]!r}: must be {accepted}")
        return mark, values

    def table(self) -> CsvTable:
        """Returns all lines; values `[n, F]`. Without the columns of targets all samples are normal."""
        rows = np.frombuffer(self._found, np.float32).reshape(-1, len(self._places))
        values, numbers = rows[:, : len(self._names)], rows[:, len(self._names) :]
        if numbers.shape[1] < len(self._outputs):
            numbers = np.zeros((len(rows), len(self._outputs)), np.float32)
        # As objects: in an array of texts each takes the memory of the longest.
        texts = {key: np.array(found, object) for key, (_, found) in self._texts.items()}
        return CsvTable(values, numbers if self._outputs else texts["label"], texts.get("device"), self._names)

    def arranging(self) -> dict[str, Any]:
        """Returns the times and records of the lines, as `series.arranged` takes them."""
        found = {key: self._texts.get(key, (0, None))[1] for key in ("times", "records")}
        return {key: None if texts is None else np.array(texts, object) for key, texts in found.items()}
