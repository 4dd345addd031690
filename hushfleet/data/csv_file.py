"""Reads labelled samples from a CSV file with a header and one line for each sample.

    label,device,ax,ay,az
    walk,anna,0.1,0.2,9.7

The column `label` names the class, and `device` (in a simulation) the device that has the sample. All other columns are
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
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.data.arrays import Data
from hushfleet.data.form import ANY_FORM, SampleForm, one_form
from hushfleet.data.measurements import check_names
from hushfleet.data.records import are_pixels
from hushfleet.errors import BadInput
from hushfleet.paths import no_file

LABEL, DEVICE = "label", "device"
MOST_CHARACTERS = 1 << 23  # in a line: longer ones are not brought into a board's memory
_SEPARATORS = ",;\t"
_BLOCK = 1 << 12  # lines


def load_csv_set(
    path: Path,
    *,
    input_shape: tuple[int, int, int] | None = None,
    outputs: Sequence[str] = (),
    series: bool = False,
    form: SampleForm = ANY_FORM,
) -> Data:
    """Reads a file, or a folder with `train.csv` and `test.csv`; parameters as `read_csv`. Raises `BadInput`."""
    one = path.suffix == ".csv" or path.is_file()
    parts = {"train": path} if one else {part: path / f"{part}.csv" for part in ("train", "test")}
    if len(parts) == 2 and not parts["train"].exists():  # an aggregator in the field has a test part alone
        del parts["train"]
    found = {
        part: read_csv(file, input_shape=input_shape, outputs=outputs, series=series, form=form, owners=True)
        for part, file in parts.items()
    }
    if len({each[3] for each in found.values()}) > 1:
        raise BadInput(f"{parts['test']} must have the columns of values of {parts['train']}, in the same order")
    arrays: dict[str, Any] = {
        f"{part}_{key}": value for part, each in found.items() for key, value in zip("xy", each, strict=False)
    }
    names = next(iter(found.values()))[3]
    arrays |= {f"{part}_device": each[2] for part, each in found.items()}
    return Data(**arrays, column_names=names)


def read_csv(
    path: Path,
    *,
    input_shape: tuple[int, int, int] | None = None,
    outputs: Sequence[str] = (),
    series: bool = False,
    cuts: bool = True,
    form: SampleForm = ANY_FORM,
    owners: bool = False,
    skipped: list[str] | None = None,
    unfinished: bool = False,
    in_utf8: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Returns values `[n, F]`, or `[n, C, H, W]` for a given shape, float32 or, for pixels, uint8; labels and devices,
    text `[n]`; and the names of the values.

    :param outputs: the columns that are the targets; these then replace the labels, float32 `[n, outputs]`.
    :param series: for a task without labels: these columns may be missing, and a line may be a step of a series.
    :param cuts: whether a series may be cut; if lines are removed, the windows after them change.
    :param form: what the task, or the owner of a board, has fixed.
    :param owners: whether the column `device` counts, as in a simulation. On a board all lines are of one device.
    :param skipped: the list that receives a text for each unusable line, which is left out; None: it is an error.
    :param unfinished: whether the file is still being written: an incomplete last line is then left out.
    :param in_utf8: whether UTF-16 is refused. There, half a character makes all later lines unreadable.
    :raises BadInput: names the file, the line and the column.
    """
    outputs = [one_form(name) for name in outputs]
    if what := no_file(path):
        raise BadInput(f"{path} is {what}, and no CSV file")
    try:
        errors = "strict" if skipped is None and not unfinished else "replace"  # a character may be half written
        with path.open("rb") as raw, io.TextIOWrapper(raw, _encoding(raw), errors) as file:
            if in_utf8 and file.encoding == "utf-16":
                raise BadInput(f"{path} is UTF-16, where a damaged line damages all after it; save it as CSV UTF-8")
            lines = _lines(file, unfinished)
            separator, header, before = _header(path, lines, () if series else outputs or (LABEL,))
            columns = _columns(path, header, input_shape, outputs, series=series, wanted=form.columns)
            targets = [header.index(name) for name in outputs if name in header]
            wanted = [LABEL] * (not outputs) + [DEVICE] * owners
            texts = {name: header.index(name) for name in wanted if name in header}
            is_cut = input_shape is not None and len(columns) < math.prod(input_shape)
            decimal, pixels = form.decimal or "." * (separator == ","), form.values == "pixels"
            table = _Table(header, columns + targets, len(columns), texts, decimal, separator, pixels)
            for number, line in enumerate(lines, before + 1):
                try:
                    table.add(number, line, is_step=is_cut, are_alike=skipped is None)
                except BadInput as error:
                    if skipped is None:
                        raise BadInput(f"{path}, line {number}: {error}") from error
                    skipped.append(f"line {number}: {error}")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not {error.encoding.upper()} ({error.reason}); save it as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a CSV file: {error}") from error
    rows, names = table.rows(), tuple(header[place] for place in columns)
    if len(targets) < len(outputs):  # no fault column: all samples are normal
        rows = np.concatenate((rows, np.zeros((len(rows), len(outputs)), np.float32)), axis=1)
    values, found = rows[:, : len(columns)], rows[:, len(columns) :]
    # As objects: in an array of texts each takes the memory of the longest.
    named = {name: np.array(table.texts[name], object) for name in texts}
    owner = named.get(DEVICE)
    if is_cut:
        assert input_shape is not None
        if not cuts:
            raise BadInput(
                f"{path}: a line is one step of a series. With data.window write a whole sample of "
                f"{math.prod(input_shape)} values into each line: samples that are cut of a series change when lines "
                "go, and would come into a second window"
            )
        steps = math.prod(input_shape) // len(columns)
        starts, broken = _windows(np.array(table.numbers, np.int64) - before - 1, owner, steps)
        if skipped is not None:
            skipped += (f"line {before + 1 + line} and those after it: a step is unusable or empty" for line in broken)
        places = starts[:, None] + np.arange(steps)  # [windows, steps]
        values, found = values[places].transpose(0, 2, 1), found[places].max(1, initial=0)
        owner = None if owner is None else owner[starts]
        names = tuple(name for name in names for _ in range(steps))
    shaped = values if input_shape is None else values.reshape(-1, *input_shape)
    typed = np.ascontiguousarray(shaped, np.uint8 if pixels else np.float32)  # ONNX Runtime takes no other order
    return typed, found if outputs else named[LABEL], owner, names


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


def _columns(
    path: Path,
    header: Sequence[str],
    input_shape: tuple[int, int, int] | None,
    outputs: Sequence[str],
    *,
    series: bool,
    wanted: Sequence[str],
) -> list[int]:
    """Returns the places of the columns of values, in the order in which they are wanted.

    :param wanted: `SampleForm.columns`. Raises `BadInput` for a header that does not fit.
    """
    check_names(header, str(path))
    first: dict[str, int] = {}
    for number, name in enumerate(header, 1):
        if (before := first.setdefault(name, number)) != number:
            raise BadInput(
                f"{path}: columns {before} and {number} are both named {name!r}; rename one, or leave it out"
            )
    for name in () if series else outputs or (LABEL,):
        if name not in first:
            raise BadInput(
                f"{path}: the first line must name the columns, one of them {name!r}; it is {header[:8]}"
                + "; columns are separated by commas, semicolons or tabs" * (len(header) == 1)
            )
    names = [name for name in header if name not in (LABEL, DEVICE, *outputs)]
    size = len(names) if input_shape is None else math.prod(input_shape)
    are_steps = series and input_shape is not None and len(names) == input_shape[0]
    if not (len(names) == size or are_steps) or not names:
        shown = "" if input_shape is None else f", the task wants {size}: {' x '.join(map(str, input_shape))}"
        if series and input_shape is not None:
            shown += f"; or {input_shape[0]}, where each line is one step of a series"
        raise BadInput(f"{path} has {len(names)} columns of values{shown}")
    order = list(map(one_form, wanted)) or names
    if sorted(order) != sorted(names):
        other = sorted(set(names) ^ set(order))[0]
        lacks = "lacks the column" if other in order else "has the column"
        told = f"{', '.join(order[:8])}{', ...' * (len(order) > 8)}"
        raise BadInput(
            f"{path} {lacks} {other!r}, and the columns of values are {told}; data.columns names them, in the task "
            "and, if a board calls them otherwise, in its DEVICE.toml"
        )
    return [header.index(name) for name in order]


@dataclass
class _Table:
    """The usable lines of a file. It takes at most twice the memory of its numbers.

    :param places: the columns of numbers, of which the first `values` are those of the sample; `named`: those of texts.
    :param decimal: the decimal mark; empty: a point or a comma, each line by itself.
    :param pixels: whether the numbers are pixels.
    """

    header: Sequence[str]
    places: Sequence[int]
    values: int
    named: dict[str, int]
    decimal: str
    separator: str
    pixels: bool
    texts: dict[str, list[str]] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    """The number of each usable line in the file."""
    _blocks: list[np.ndarray] = field(default_factory=list)
    _empty: int | None = None

    def __post_init__(self) -> None:
        self.texts = {name: [] for name in self.named}

    def add(self, number: int, line: str | None, *, is_step: bool, are_alike: bool) -> None:
        """Adds a line, unless it is empty. Raises `BadInput` for a line that cannot be used; it leaves nothing behind.

        :param is_step: whether no line between others may be empty.
        :param are_alike: whether all lines must have the decimal mark of the first that has one.
        """
        if line is None:
            raise BadInput(f"it has more than {MOST_CHARACTERS} characters")
        try:
            row = next(csv.reader([line], delimiter=self.separator, strict=True), [])
        except csv.Error as error:
            raise BadInput(str(error)) from error
        if not any(map(str.strip, row)):
            self._empty = self._empty or number
            return
        empty, self._empty = self._empty, None
        if empty and is_step and are_alike:
            raise BadInput(f"line {empty} before it is empty, and each line is one step of a series")
        if len(row) != len(self.header):
            raise BadInput(f"{len(row)} fields, and the header has {len(self.header)}")
        count = len(self.numbers)
        if count % _BLOCK == 0:  # a block whose first line was left out is still empty, and is replaced by this one
            self._blocks[count // _BLOCK :] = [np.empty((_BLOCK, len(self.places)), np.float32)]
        mark = self._read(row, out=self._blocks[-1][count % _BLOCK])
        for name, place in self.named.items():
            if not row[place].strip():
                raise BadInput(f"{name!r} is empty; give it one, or leave the line out")
        for name, place in self.named.items():
            self.texts[name].append(sys.intern(row[place].strip()))  # few different texts, each many times
        self.numbers.append(number)
        if are_alike:
            self.decimal = self.decimal or mark

    def rows(self) -> np.ndarray:
        """Returns the numbers, float32 `[lines, places]`."""
        return np.concatenate([np.empty((0, len(self.places)), np.float32), *self._blocks])[: len(self.numbers)]

    def _read(self, row: Sequence[str], *, out: np.ndarray) -> str:
        """Writes the numbers of a line into `out`, and returns its decimal mark, empty if it has none."""
        cells = [row[place] for place in self.places]
        mark = self.decimal or next((mark for mark in ",." if any(mark in cell for cell in cells)), "")
        found = list[float]()
        for place, cell in zip(self.places, cells, strict=True):
            try:
                if mark == "," and "." in cell:
                    raise ValueError("one of the two separates thousands")
                found.append(float(cell.replace(",", ".") if mark == "," else cell))
            except ValueError as error:
                other = ",.".strip(mark)
                hint = f"; the decimal mark is {mark!r}, see data.decimal" * (len(other) == 1 and other in cell)
                raise BadInput(f"{self.header[place]!r} = {cell!r} is not a number{hint}") from error
        with np.errstate(over="ignore"):  # becomes infinite, which is refused below
            out[:] = found
        fits, accepted = np.isfinite(out), "finite"
        if self.pixels and fits.all():
            fits, accepted = are_pixels(out[: self.values]), "a pixel, 0 to 255"
        for wrong in np.flatnonzero(~fits)[:1]:
            raise BadInput(f"{self.header[self.places[wrong]]!r} = {cells[wrong]!r}: must be {accepted}")
        return mark
