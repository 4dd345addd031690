"""Labelled samples in a CSV file: a line each, with a header.

    label,device,ax,ay,az
    walk,anna,0.1,0.2,9.7

The column `label` names the class, `device` (of a simulation) who has the sample; all others are values, in
their order: a vector, or with an input shape of (C, H, W) that many values, the last axis fastest.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.data.arrays import Data
from hushfleet.errors import BadInput

LABEL, DEVICE = "label", "device"


def load_csv_set(path: Path, *, input_shape: tuple[int, int, int] | None = None) -> Data:
    """A file, or a folder with `train.csv` and `test.csv`. Raises `BadInput`."""
    parts = {"train": path} if path.suffix == ".csv" else {part: path / f"{part}.csv" for part in ("train", "test")}
    if len(parts) == 2 and not parts["train"].exists():  # an aggregator in the field has a test part alone
        del parts["train"]
    found = {part: read_csv(file, input_shape=input_shape) for part, file in parts.items()}
    arrays: dict[str, Any] = {
        f"{part}_{key}": value for part, each in found.items() for key, value in zip("xy", each, strict=False)
    }
    return Data(**arrays, train_device=found["train"][2] if "train" in found else None)


def read_csv(
    path: Path, *, input_shape: tuple[int, int, int] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Values float32 `[n, F]`, or `[n, C, H, W]` of a given shape; labels and devices, as text `[n]`.

    :raises BadInput: names the file, the line and the column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read as a CSV file: {error}") from error
    if header.count(LABEL) != 1:
        raise BadInput(f"{path}: the first line must name the columns, one of them {LABEL!r}; it is {header[:8]}")
    columns = [place for place, name in enumerate(header) if name not in (LABEL, DEVICE)]
    wanted = len(columns) if input_shape is None else math.prod(input_shape)
    if len(columns) != wanted or not columns:
        shown = "" if input_shape is None else f", the task wants {wanted}: {' x '.join(map(str, input_shape))}"
        raise BadInput(f"{path} has {len(columns)} columns of values{shown}")
    values = np.empty((len(rows), len(columns)), np.float32)
    for place, (line, row) in enumerate(rows):
        if len(row) != len(header):
            raise BadInput(f"{path}, line {line}: {len(row)} fields, and the header has {len(header)}")
        for column, target in zip(columns, range(len(columns)), strict=True):
            try:
                with np.errstate(over="ignore"):  # becomes infinite, which is refused below
                    values[place, target] = float(row[column])
            except ValueError as error:
                raise BadInput(f"{path}, line {line}: {header[column]!r} = {row[column]!r} is no number") from error
        wrong = np.flatnonzero(~np.isfinite(values[place]))
        if len(wrong):
            column = columns[wrong[0]]
            raise BadInput(f"{path}, line {line}: {header[column]!r} = {row[column]!r}: must be finite")
    texts = {
        name: np.array([row[header.index(name)].strip() for _, row in rows], dtype=str)
        for name in (LABEL, DEVICE)
        if name in header
    }
    shaped = values if input_shape is None else values.reshape(-1, *input_shape)
    return shaped, texts[LABEL], texts.get(DEVICE)
