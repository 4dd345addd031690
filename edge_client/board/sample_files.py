"""Reads samples from files of a board: arrays in an .npz, or lines of a CSV file or of a folder of CSV files."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.data.form import one_form
from hushfleet.data.measurements import warn_of_row_numbers
from hushfleet.data.records import are_pixels, fitted
from hushfleet.data.samples import Samples
from hushfleet.data.walk import files_below, named
from hushfleet.edge_client.board.by_content import FORM_OF_ARRAYS, FORM_OF_FOLDERS
from hushfleet.errors import BadInput
from hushfleet.wire.format.spec import ModelSpec

if TYPE_CHECKING:
    from hushfleet.data import arrays as npz
    from hushfleet.data import csv_file
else:
    npz = at_need("hushfleet.data.arrays")
    csv_file = at_need("hushfleet.data.csv_file")


@dataclass(frozen=True)
class Reading:
    """How a table is read for a task.

    :param skipped: receives a text for each sample that does not fit and is left out; None: the first is an error.
    :param by_content: whether no sample may decide how another is read (`TaskSpec.by_content`); needs `skipped`.
    :param unfinished: files that are still being written.
    :param cuts: as in `read_csv`.
    """

    skipped: list[str] | None = None
    by_content: bool = False
    unfinished: Collection[str] = ()
    cuts: bool = True


STRICT = Reading()


def load_file(
    path: Path, model: ModelSpec, *, kind: str = "", reading: Reading = STRICT, names: list[str] | None = None
) -> Samples:
    """Reads a file of samples; parameters and errors as in `load_arrays`.

    :param kind: `arrays` or `csv`; by default the ending of its name decides.
    :param names: as in `load_csv`.
    """
    if (kind or path.suffix) not in ("arrays", ".npz"):
        return load_csv(path, model, reading=reading, names=names)
    samples = load_arrays(path, model, reading=reading)
    warn_of_row_numbers(samples.images, str(path))
    return samples


def load_arrays(path: Path, model: ModelSpec, *, reading: Reading = STRICT) -> Samples:
    """Reads an .npz with samples `x`, as in `fitted`, and labels `y`: whole numbers, names of classes, or other
    targets of the task. A simulation's files have `images` and `labels`, where numbers are places. Raises `BadInput`.
    """
    with npz.opened(path) as arrays:
        x, y = ("images", "labels") if "images" in arrays else ("x", "y")
        needed = {x} if model.targets.are_inputs else {x, y}
        if missing := needed - set(arrays):
            raise BadInput(
                f"{path} lacks the array {min(missing)!r}; it needs {' and '.join(map(repr, sorted(needed)))}"
            )
        values = arrays[x]
        clips = arrays.get("clips")
        labels = arrays[y] if y in arrays else model.targets.blank(len(values), len(model.class_names))
    by_type = "names" if labels.dtype.kind in "UO" and not reading.by_content else ""
    kind = (model.form.labels or by_type or "each") if y == "y" else by_type or "numbers"  # as a simulation writes them
    if reading.by_content and not (model.form.values or model.form.bit_depth):
        raise BadInput(f"{path}: {FORM_OF_ARRAYS}")
    # int16 is sound in a simulation's files alone: in others, one sample could change the type of all
    form = replace(model.form, layout="channels-first", bit_depth=0)
    form = replace(model.form, sample_rate=0, segment_s=0.0, hop_s=0.0) if y == "y" else form
    where = f"{path}: {x}", f"{path}: {y}"
    samples = _for_task(values, labels, replace(model, form=form), kind, where, reading)
    return samples if clips is None or len(clips) != len(samples) else replace(samples, clips=clips)


def load_csv(path: Path, model: ModelSpec, *, reading: Reading = STRICT, names: list[str] | None = None) -> Samples:
    """Reads a CSV file (`hushfleet.data.csv_file`), or all of a folder; parameters as `load_arrays`. Raises `BadInput`.

    :param names: receives the names of the values.
    """
    outputs = () if model.targets.are_classes else model.class_names
    layout = csv_file.CsvLayout(
        model.form,
        model.image_shape,
        outputs,
        series=model.targets.are_inputs,
        cuts=reading.cuts,
        in_utf8=reading.by_content,
    )
    if os.path.isdir(path):
        table = _read_folder(path, layout, reading)
    else:
        table = csv_file.read_csv(path, layout, skipped=reading.skipped, unfinished=str(path) in reading.unfinished)
    if names is not None:
        names += table.names
    warn_of_row_numbers(table.values, str(path), table.names)
    model = replace(model, form=replace(model.form, layout="channels-first"))  # as it is now
    return _for_task(table.values, table.targets, model, model.form.labels or "names", (str(path),) * 2, reading)


def contents(samples: Samples, names: Sequence[str], outputs: Sequence[str]) -> list[bytes]:
    """Returns the content of each sample, independent of the task: of which columns are values and which are targets,
    and of whether values are pixels.

    :param names: names of the columns of values; empty for an .npz, whose values are one array.
    :param outputs: names of the targets that are no classes.

    The column `label` and all zeros are left out: a column `fault` may be missing if all samples are normal.
    """
    rows = samples.images.reshape(len(samples), math.prod(samples.images.shape[1:]))  # there may be none
    if not names:
        return [(row.astype(np.uint8) if are_pixels(row).all() else row).tobytes() for row in rows]
    columns = {name: rows[:, place] for place, name in enumerate(names)}
    columns |= {one_form(name): samples.labels[:, place] for place, name in enumerate(outputs)}
    columns.pop(csv_file.LABEL, None)
    order = sorted(columns)
    table = np.stack([columns[name] for name in order], axis=1).astype("<f4")
    marks = np.array([hashlib.sha256(name.encode()).digest()[:8] for name in order], "S8")
    found = (np.flatnonzero(row) for row in table)
    return [marks[places].tobytes() + row[places].tobytes() for row, places in zip(table, found, strict=True)]


def _read_folder(folder: Path, layout: csv_file.CsvLayout, reading: Reading) -> csv_file.CsvTable:
    """Reads the `.csv` files in the order of their names; a file that does not fit is skipped."""
    if reading.by_content and not layout.form.columns:
        raise BadInput(f"{folder}: {FORM_OF_FOLDERS}")
    skipped = [] if reading.skipped is None else reading.skipped
    parts: dict[str, csv_file.CsvTable] = {}
    for file in sorted(files_below(folder, data=folder)):
        name, lines = Path(file).relative_to(folder).as_posix(), list[str]()
        if any(part.startswith(".") for part in name.split("/")):
            continue
        try:
            if not (name.lower().endswith(".csv") and os.path.isfile(file)):  # opening a pipe would block for ever
                raise BadInput("no file whose name ends in .csv")
            table = csv_file.read_csv(Path(file), layout, skipped=lines, unfinished=file in reading.unfinished)
            for first in [other for other in parts if parts[other].names != table.names][:1]:
                raise BadInput(f"its columns of values are not those of {first}, in the same order")
        except BadInput as error:
            skipped.append(f"{name}: {str(error).removeprefix(file).lstrip(':, ')}")
            continue
        skipped += (f"{name}, {line}" for line in lines)
        parts[name] = table
    if not parts:
        raise BadInput(f"{folder} holds no CSV file that can be read{': ' * bool(skipped)}{reasons(skipped)}")
    values, targets = (np.concatenate([table[at] for table in parts.values()]) for at in (0, 1))
    return csv_file.CsvTable(values, targets, None, next(iter(parts.values())).names)


def _for_task(
    x: np.ndarray, y: np.ndarray, model: ModelSpec, labels: str, where: tuple[str, str], reading: Reading
) -> Samples:
    """Returns the samples that fit the task; parameters as in `fitted`. Raises `BadInput`."""
    return fitted(
        x,
        y,
        model.class_names,
        targets=model.targets,
        mean=model.mean,
        std=model.std,
        form=model.form,
        labels=labels,
        shape=model.image_shape,
        where=where,
        skipped=reading.skipped,
    )


def load_indices(path: Path) -> np.ndarray | None:
    """Reads indices int64 `[n]` into the common test from an .npz with `of_common`, one bit for each of its images.

    Returns None for an .npz of images. Raises `BadInput`.
    """
    with npz.opened(path) as arrays:
        return np.flatnonzero(np.unpackbits(arrays["of_common"])) if "of_common" in arrays else None


def reasons(skipped: Sequence[str]) -> str:
    """Lists why samples are left out, the commonest first: `12: its folder is no class of this task, as new/1.jpg`.

    :param skipped: `name: reason` of each, or a name alone.
    """
    parts = [each.partition(": ") for each in skipped]
    counted = Counter(reason for _, _, reason in parts)
    first = {reason: name for name, _, reason in reversed(parts)}
    return named([f"{n}: {reason or 'does not fit'}, as {first[reason]}" for reason, n in counted.most_common()])
