"""Reads labelled samples from a CSV file with a header and one line for each sample.

    label,device,ax,ay,az
    walk,anna,0.1,0.2,9.7

The column `label` names the class, and `device` (in a simulation) the device that has the sample. All other columns are
values, in their order: a vector, or C x H x W values for an input shape (C, H, W), the last axis fastest. If a task's
targets are not classes, the columns that its `class_names` name are the targets, by default `label` alone.

A task that learns to reconstruct its input needs no labels: its column `fault` may be missing, and is 0 for a normal
sample. If a file has one column per channel, and the input shape has more values, a line is one step of a series, which
is cut into windows without overlap; a window with a faulty step is a fault. The steps of one device follow each other;
steps after its last whole window are left out. An unusable line is left out too, and the window continues with the next
line.

Files of Excel are accepted too: with semicolons or tabs between columns, then possibly with decimal commas; in UTF-16;
with rows of empty cells. If lines may be left out, each line is parsed by itself: no cell below the header may contain
a line break.
"""

from __future__ import annotations

import codecs
import csv
import io
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.data.arrays import Data
from hushfleet.data.labels import one_form
from hushfleet.data.measurements import check_names
from hushfleet.errors import BadInput

LABEL, DEVICE = "label", "device"
_SEPARATORS = ",;\t"
_BLOCK = 1 << 12  # lines


def load_csv_set(
    path: Path,
    *,
    input_shape: tuple[int, int, int] | None = None,
    outputs: Sequence[str] = (),
    series: bool = False,
) -> Data:
    """Reads a file, or a folder with `train.csv` and `test.csv`; parameters as `read_csv`. Raises `BadInput`."""
    one = path.suffix == ".csv" or path.is_file()
    parts = {"train": path} if one else {part: path / f"{part}.csv" for part in ("train", "test")}
    if len(parts) == 2 and not parts["train"].exists():  # an aggregator in the field has a test part alone
        del parts["train"]
    found = {
        part: read_csv(file, input_shape=input_shape, outputs=outputs, series=series) for part, file in parts.items()
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
    skipped: list[str] | None = None,
    unfinished: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, tuple[str, ...]]:
    """Returns values float32 `[n, F]`, or `[n, C, H, W]` for a given shape; labels and devices, text `[n]`; names.

    :param outputs: the columns that are the targets; these then replace the labels, float32 `[n, outputs]`.
    :param series: for a task without labels: these columns may be missing, and a line may be a step of a series.
    :param cuts: whether a series may be cut; if lines are removed, the windows after them change.
    :param skipped: the list that receives a text for each unusable line, which is left out; None: it is an error.
    :param unfinished: whether the file is still being written: an incomplete last line is then left out.
    :raises BadInput: names the file, the line and the column.
    """
    outputs = [one_form(name) for name in outputs]
    try:
        errors = "strict" if skipped is None and not unfinished else "replace"  # a character may be half written
        with path.open("rb") as raw, io.TextIOWrapper(raw, _encoding(raw), errors, newline="") as file:
            first = file.readline()
            separator = _separator(first, () if series else outputs or (LABEL,))
            lines = (line for line in chain([first], file) if not unfinished or line.endswith(("\n", "\r")))
            reader = csv.reader(lines, delimiter=separator)
            header = [one_form(name.strip()) for name in next(reader, [])]
            columns = _columns(path, header, input_shape, outputs, series=series)
            places = columns + [header.index(name) for name in outputs if name in header]
            rows = _each(reader) if skipped is None else _each_alone(lines, separator, reader.line_num, skipped)
            table, texts = _table(path, rows, header, places, skipped, comma_separated=separator == ",")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not {error.encoding.upper()} ({error.reason}); save it as CSV UTF-8") from error
    except (OSError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a CSV file: {error}") from error
    if len(places) < len(columns) + len(outputs):  # no fault column: all samples are normal
        table = np.concatenate((table, np.zeros((len(table), len(outputs)), np.float32)), axis=1)
    devices, names = texts.get(DEVICE), tuple(header[place] for place in columns)
    if input_shape is not None and len(columns) < (size := math.prod(input_shape)):
        if not cuts:
            raise BadInput(
                f"{path}: a line is one step of a series. With data.window write a whole sample of {size} values into "
                "each line: samples that are cut of a series change when lines go, and would come into a second window"
            )
        steps = size // len(columns)
        starts = _window_starts(len(table), devices, steps)
        whole = table[starts[:, None] + np.arange(steps)]  # [windows, steps, places]
        values = whole[..., : len(columns)].transpose(0, 2, 1).reshape(-1, size)
        targets = whole[..., len(columns) :].max(1, initial=0)
        devices = None if devices is None else devices[starts]
        names = tuple(name for name in names for _ in range(steps))
    else:
        values, targets = table[:, : len(columns)], table[:, len(columns) :]
    shaped = values if input_shape is None else values.reshape(-1, *input_shape)
    return shaped, targets if outputs else texts[LABEL], devices, names


def _window_starts(lines: int, devices: np.ndarray | None, steps: int) -> np.ndarray:
    """Returns the first line of each window, int `[windows]`: `steps` consecutive lines of one device."""
    changes = [] if devices is None else (np.flatnonzero(devices[1:] != devices[:-1]) + 1).tolist()
    runs = zip([0, *changes], [*changes, lines], strict=True)
    return np.concatenate([np.arange(first, last - steps + 1, steps) for first, last in runs])


def _encoding(raw: io.BufferedReader) -> str:
    return "utf-16" if raw.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def _separator(first: str, names: Sequence[str]) -> str:
    """Finds the separator with which the first line has the required names; without names, the most frequent one."""
    if not names:
        return max(_SEPARATORS, key=first.count)
    for separator in _SEPARATORS:
        header = [one_form(name.strip()) for name in next(csv.reader([first], delimiter=separator), [])]
        if set(names) <= set(header):
            return separator
    return _SEPARATORS[0]


def _columns(
    path: Path,
    header: Sequence[str],
    input_shape: tuple[int, int, int] | None,
    outputs: Sequence[str],
    *,
    series: bool,
) -> list[int]:
    """Returns the places of the value columns. Raises `BadInput` for a header that does not fit."""
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
    columns = [place for place, name in enumerate(header) if name not in (LABEL, DEVICE, *outputs)]
    wanted = len(columns) if input_shape is None else math.prod(input_shape)
    are_steps = series and input_shape is not None and len(columns) == input_shape[0]
    if not (len(columns) == wanted or are_steps) or not columns:
        shown = "" if input_shape is None else f", the task wants {wanted}: {' x '.join(map(str, input_shape))}"
        if series and input_shape is not None:
            shown += f"; or {input_shape[0]}, where each line is one step of a series"
        raise BadInput(f"{path} has {len(columns)} columns of values{shown}")
    return columns


def _table(
    path: Path,
    rows: Iterator[tuple[int, list[str]]],
    header: Sequence[str],
    places: Sequence[int],
    skipped: list[str] | None,
    *,
    comma_separated: bool,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads numbers float32 `[n, places]`, and labels and devices, text `[n]`; needs at most twice that memory.

    Raises `BadInput` or `csv.Error` unless lines may be `skipped`.
    """
    texts: dict[str, list[str]] = {name: [] for name in (LABEL, DEVICE) if name in header}
    blocks, count = [np.empty((0, len(places)), np.float32)], 0
    marks = set(".") if comma_separated else set[str]()
    for line, row in rows:
        if not any(map(str.strip, row)):
            continue
        if count % _BLOCK == 0:
            # A block whose first line was left out is still empty, and is replaced by this one.
            blocks[count // _BLOCK + 1 :] = [np.empty((_BLOCK, len(places)), np.float32)]
        try:
            _read_row(row, header, places, marks, out=blocks[-1][count % _BLOCK])
        except BadInput as error:
            if skipped is None:
                raise BadInput(f"{path}, line {line}: {error}") from error
            skipped.append(f"line {line}: {error}")
            continue
        for name, column in texts.items():
            column.append(sys.intern(row[header.index(name)].strip()))  # few different texts, each many times
        count += 1
    table = np.concatenate(blocks)[:count]
    return table, {name: np.array(column, dtype=str) for name, column in texts.items()}


def _each(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields each row and its number. Raises `csv.Error`."""
    for row in reader:
        yield reader.line_num, row


def _each_alone(
    lines: Iterator[str], separator: str, before: int, skipped: list[str]
) -> Iterator[tuple[int, list[str]]]:
    """Yields each line and its number, parsed by itself, so that an unclosed quote does not include later lines.

    :param before: the number of lines before these.
    """
    for number, line in enumerate(lines, before + 1):
        try:
            yield number, next(csv.reader([line], delimiter=separator, strict=True), [])
        except csv.Error as error:
            skipped.append(f"line {number}: {error}")


def _read_row(
    row: Sequence[str], header: Sequence[str], columns: Sequence[int], marks: set[str], *, out: np.ndarray
) -> None:
    """Writes the numbers of a line into `out`. Raises `BadInput` for a line that cannot be used.

    :param marks: the decimal marks in the file's usable lines so far; the point if commas separate the columns.
    """
    if len(row) != len(header):
        raise BadInput(f"{len(row)} fields, and the header has {len(header)}")
    found = set(marks)
    for target, column in enumerate(columns):
        text = row[column]
        if found != {"."}:
            found |= {",", "."}.intersection(text)
            text = text.replace(",", ".")
        try:
            if len(found) > 1:
                raise ValueError("one of the two separates thousands")
            with np.errstate(over="ignore"):  # becomes infinite, which is refused below
                out[target] = float(text)
        except ValueError as error:
            raise BadInput(f"{header[column]!r} = {row[column]!r} is not a number") from error
    wrong = np.flatnonzero(~np.isfinite(out))
    if len(wrong):
        column = columns[wrong[0]]
        raise BadInput(f"{header[column]!r} = {row[column]!r}: must be finite")
    for name in (LABEL, DEVICE):
        if name in header and not row[header.index(name)].strip():
            raise BadInput(f"{name!r} is empty; give it one, or leave the line out")
    marks |= found
