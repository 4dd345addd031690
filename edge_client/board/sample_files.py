"""Reads samples from files of a board: arrays in an .npz, or lines of a CSV file or of a folder of CSV files."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.config.spec import ModelSpec
from hushfleet.data.arrays import as_targets, as_values, opened
from hushfleet.data.csv_file import LABEL, read_csv
from hushfleet.data.folder import files_below, named
from hushfleet.data.labels import check_one_reading, have_two_readings, one_form, texts_of
from hushfleet.data.measurements import far_away, refuse_far, warn_of_row_numbers
from hushfleet.data.samples import Samples
from hushfleet.errors import BadInput

_UNCLEAR = "its label may be the name of a class or its place from 0; give labels as texts, as y.astype(str) does"


def load_file(
    path: Path,
    model: ModelSpec,
    *,
    kind: str = "",
    skipped: list[str] | None = None,
    unfinished: Collection[str] = (),
    cuts: bool = True,
    names: list[str] | None = None,
) -> Samples:
    """Reads a file of samples; parameters and errors as in `load_arrays`.

    :param kind: `arrays` or `csv`; by default the ending of its name decides.
    :param cuts: as in `read_csv`; `unfinished` and `names` as in `load_csv`.
    """
    if (kind or path.suffix) not in ("arrays", ".npz"):
        return load_csv(path, model, skipped=skipped, unfinished=unfinished, cuts=cuts, names=names)
    samples = load_arrays(path, model, skipped=skipped)
    warn_of_row_numbers(samples.images, str(path))
    return samples


def load_arrays(path: Path, model: ModelSpec, *, skipped: list[str] | None = None) -> Samples:
    """Reads an .npz with samples `x` (or `images`), as in `as_values`, and labels `y` (or `labels`): whole numbers,
    names of classes, or other targets of the task. Raises `BadInput`.

    :param skipped: receives the samples that do not fit and are left out; None: the first of them is an error.
    """
    with opened(path) as arrays:
        x, y = ("images", "labels") if "images" in arrays else ("x", "y")
        needed = {x} if model.targets.are_inputs else {x, y}
        if missing := needed - set(arrays):
            raise BadInput(
                f"{path} lacks the array {min(missing)!r}; it needs {' and '.join(map(repr, sorted(needed)))}"
            )
        values = arrays[x]
        labels = arrays[y] if y in arrays else model.targets.blank(len(values), len(model.class_names))
    may_be_names = y == "y" and model.targets.are_classes  # a simulation's own files have indices
    if skipped is not None:
        values, labels = _usable(values, labels, model, skipped, may_be_names=may_be_names)
    elif may_be_names:
        check_one_reading(labels, model.class_names, f"{path}: {y}")
    return _fitting(as_values(values, f"{path}: {x}"), labels, model, f"{path}: {y}", skipped)


def load_csv(
    path: Path,
    model: ModelSpec,
    *,
    skipped: list[str] | None = None,
    unfinished: Collection[str] = (),
    cuts: bool = True,
    names: list[str] | None = None,
) -> Samples:
    """Reads a CSV file (`hushfleet.data.csv_file`), or all of a folder; parameters as `load_arrays`. Raises `BadInput`.

    :param unfinished: files that are being written.
    :param cuts: as in `read_csv`.
    :param names: receives the names of the columns of values.
    """
    outputs = () if model.targets.are_classes else model.class_names
    form: dict[str, Any] = {"input_shape": model.image_shape, "outputs": outputs, "cuts": cuts}
    form["series"] = model.targets.are_inputs
    if os.path.isdir(path):
        values, labels, columns = _read_folder(path, form, [] if skipped is None else skipped, unfinished)
    else:
        values, labels, _, columns = read_csv(path, **form, skipped=skipped, unfinished=str(path) in unfinished)
    if names is not None:
        names += columns
    warn_of_row_numbers(values, str(path), columns)
    if skipped is not None:
        values, labels = _usable(values, labels, model, skipped)
    return _fitting(values, labels, model, str(path), skipped)


def contents(samples: Samples, names: Sequence[str], outputs: Sequence[str]) -> list[bytes]:
    """Returns the content of each sample, independent of which columns a task uses as values and which as targets.

    :param names: names of the columns of values; empty for an .npz, whose values are one array.
    :param outputs: names of the targets that are no classes.

    The column `label` and all zeros are left out: a column `fault` may be missing if all samples are normal.
    """
    rows = samples.images.reshape(len(samples), -1)
    if not names:
        return [row.tobytes() for row in rows]
    columns = {name: rows[:, place] for place, name in enumerate(names)}
    columns |= {one_form(name): samples.labels[:, place] for place, name in enumerate(outputs)}
    columns.pop(LABEL, None)
    order = sorted(columns)
    table = np.stack([columns[name] for name in order], axis=1).astype("<f4")
    marks = np.array([hashlib.sha256(name.encode()).digest()[:8] for name in order], "S8")
    found = (np.flatnonzero(row) for row in table)
    return [marks[places].tobytes() + row[places].tobytes() for row, places in zip(table, found, strict=True)]


def _read_folder(
    folder: Path, form: dict[str, Any], skipped: list[str], unfinished: Collection[str]
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Reads values, labels and names of columns of the `.csv` files, in the order of their names; a file that does not
    fit is skipped."""
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    first, names = "", tuple[str, ...]()
    for file in sorted(files_below(folder, data=folder)):
        name, lines = Path(file).relative_to(folder).as_posix(), list[str]()
        if any(part.startswith(".") for part in name.split("/")):
            continue
        try:
            if not (name.lower().endswith(".csv") and os.path.isfile(file)):  # opening a pipe would block for ever
                raise BadInput("no file whose name ends in .csv")
            values, labels, _, columns = read_csv(Path(file), **form, skipped=lines, unfinished=file in unfinished)
            if parts and columns != names:
                raise BadInput(f"its columns of values are not those of {first}, in the same order")
        except BadInput as error:
            skipped.append(f"{name}: {str(error).removeprefix(file).lstrip(':, ')}")
            continue
        skipped += (f"{name}, {line}" for line in lines)
        first, names = first or name, columns
        parts.append((values, labels))
    if not parts:
        raise BadInput(f"{folder} holds no CSV file that can be read{': ' * bool(skipped)}{reasons(skipped)}")
    values, labels = map(np.concatenate, zip(*parts, strict=True))
    return values, labels, names


def _usable(
    values: np.ndarray, labels: np.ndarray, model: ModelSpec, skipped: list[str], *, may_be_names: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the samples that `as_values` and `as_targets` accept; does not change arrays that do not fit as a whole.

    :param may_be_names: whether a number may be meant as the name of a class.
    """
    if not (values.ndim and labels.ndim and len(values) == len(labels)):
        return values, labels
    targets, numeric = model.targets, labels.dtype.kind in "iufb"
    fits, unclear = np.ones(len(values), bool), np.zeros(len(values), bool)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype(np.float32, copy=False))
        fits &= finite.all(tuple(range(1, values.ndim)))
    if targets.are_classes and labels.ndim == 1:
        if numeric:
            fits &= (labels >= 0) & (labels < len(model.class_names)) & (labels == np.floor(labels))
            unclear = have_two_readings(labels, model.class_names) & fits & may_be_names
        else:
            fits &= np.isin(texts_of(labels).astype(str), list(map(one_form, model.class_names)))
    elif not targets.are_classes and numeric:
        rows = labels.reshape(len(labels), math.prod(labels.shape[1:]))  # there may be none
        with np.errstate(over="ignore"):
            found = rows.astype(np.float32)
        if rows.shape[1] == len(model.class_names):
            fits &= ~targets.misfits(found)
    for wrong, why in ((~fits, "its label does not fit the task"), (unclear, _UNCLEAR)):
        skipped += (f"sample {place} ({labels[place]}): {why}" for place in np.flatnonzero(wrong))
    fits &= ~unclear
    return (values, labels) if fits.all() else (values[fits], labels[fits])


def _fitting(
    values: np.ndarray, labels: np.ndarray, model: ModelSpec, where: str, skipped: list[str] | None
) -> Samples:
    if values.shape[1:] != model.image_shape:
        raise BadInput(
            f"{where}: samples have the shape {list(values.shape[1:])}, and the task takes {list(model.image_shape)}"
        )
    labels = as_targets(labels, model.class_names, model.targets, count=len(values), where=where)
    if skipped is None:
        refuse_far(values, model.mean, model.std, where)
    elif (far := far_away(values, model.mean, model.std)).any():
        skipped += (f"sample {place}: a million standard deviations from the mean" for place in np.flatnonzero(far))
        values, labels = values[~far], labels[~far]
    return Samples(values, labels, model.mean, model.std, model.targets)


def load_indices(path: Path) -> np.ndarray | None:
    """Reads indices int64 `[n]` into the common test from an .npz with `of_common`, one bit for each of its images.

    Returns None for an .npz of images. Raises `BadInput`.
    """
    with opened(path) as arrays:
        return np.flatnonzero(np.unpackbits(arrays["of_common"])) if "of_common" in arrays else None


def reasons(skipped: Sequence[str]) -> str:
    """Lists why samples are left out, the commonest first: `12: its folder is no class of this task, as new/1.jpg`.

    :param skipped: `name: reason` of each, or a name alone.
    """
    parts = [each.partition(": ") for each in skipped]
    counted = Counter(reason for _, _, reason in parts)
    first = {reason: name for name, _, reason in reversed(parts)}
    return named([f"{n}: {reason or 'does not fit'}, as {first[reason]}" for reason, n in counted.most_common()])
