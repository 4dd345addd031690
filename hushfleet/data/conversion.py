"""Converts a Python program's own data to `Data`: arrays, tables, PyTorch data sets, Hugging Face data sets.

Neither torch nor datasets is imported: their objects are recognised by their attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from hushfleet.data.arrays import Data, is_frame
from hushfleet.data.form import SampleForm
from hushfleet.data.tables import as_array, from_table, read_table, samples_of, table_of, table_of_rows
from hushfleet.errors import BadInput
from hushfleet.refusals import meant

_TESTS = ("test", "validation", "valid", "val", "dev", "eval")
_MOST = 1_000_000  # samples of something that may have no end
_COLUMNS = ("label_column", "device_column", "time_column", "record_column", "columns")
READ = (*_COLUMNS, "layout", "bit_depth")
"""The fields of a form by which data are converted; no later reader needs them."""
_log = logging.getLogger(__name__)


def as_data(source: Any, *, label_column: str | Sequence[str] = "", **form: Any) -> Data:
    """Converts what a program has.

    :param source: `Data`; (x, y) or (x, y, devices) of arrays, tensors or sparse matrices; a table with named columns:
        a frame of pandas or polars, an Arrow table, a Hugging Face data set, a `.parquet` file, or a `.tar` of
        WebDataset; a PyTorch data set or an iterable of pairs (sample, label) or of dicts; or a dict of these with
        `train` and `test`, such as a `DatasetDict`, in which `validation` is the test part if there is no other.
    :param label_column: of a table; several of them are targets that are numbers.
    :param form: fields of `hushfleet.data.form.SampleForm`: `columns`, `device_column`, `time_column`, `record_column`,
        `layout`, `bit_depth`, `labels`.
    :raises BadInput: it is none of these; the text says what is accepted.
    """
    one = label_column if isinstance(label_column, str) else ""
    known = [*READ, "labels"]
    if unknown := form.keys() - set(known):
        raise BadInput(
            f"as_data has no argument {min(unknown)!r}{meant(min(unknown), known)}; it has {', '.join(known)}"
        )
    try:
        made = SampleForm(label_column=one, **form)
    except ValueError as error:
        raise BadInput(f"data: {error}") from error
    return converted(source, made, () if one == label_column else label_column)


def converted(source: Any, form: SampleForm, outputs: Sequence[str] | None = ()) -> Data:
    """Converts what a program has; parameters as in `as_data` and `from_table`."""
    if isinstance(source, Data):
        return source
    parts = {"train": source}
    if isinstance(source, Mapping) and table_of(source) is None:
        test = next((part for part in _TESTS if part in source), None)
        left = source.keys() - {"train", test}
        if ("train" not in source and test != "test") or left - set(_TESTS):
            raise BadInput(
                f"data = a dict with {sorted(map(str, source))}: it needs 'train', and may have 'test' or 'validation' "
                "beside it; leave other parts out"
            )
        chosen = {"train": "train", "test": test}
        parts = {part: source[key] for part, key in chosen.items() if key in source}
        if left or test not in (None, "test"):
            _log.warning("data: the test part is %r; not used: %s", test, ", ".join(sorted(left)) or "none")
    made = {part: _part(each, form, outputs) for part, each in parts.items()}
    for part, each in made.items():
        if each.train_x is None or not len(each.train_x):
            raise BadInput(f"data: the {part} part has no samples; add some, or leave the part out")
    test_part = made.get("test", Data())
    train = made.get("train") or replace(test_part, train_x=None, train_y=None, train_device=None)
    for key in ("column_names", "class_names"):
        of_train, of_test = getattr(train, key), getattr(test_part, key)
        if of_test and of_test != of_train:
            raise BadInput(f"data: {key} of 'test' are {list(of_test)[:8]}, and of 'train' {list(of_train)[:8]}")
    owners = None if train.train_device is None else test_part.train_device
    return replace(train, test_x=test_part.train_x, test_y=test_part.train_y, test_device=owners)


def _part(source: Any, form: SampleForm, outputs: Sequence[str] | None) -> Data:
    if (table := table_of(source)) is None and isinstance(source, str | PathLike):
        if Path(source).suffix not in (".parquet", ".tar"):
            raise BadInput(
                f"data = {str(source)!r}: the task names a file: changes={{'data.name': 'table', 'data.path': ...}}, "
                "or 'arrays' for .npz, or 'folder'; .parquet and .tar are taken here too"
            )
        table = read_table(Path(source))
    if table is None and not _are_arrays(source):
        if isinstance(source, str | bytes) or (not isinstance(source, Iterable) and not hasattr(source, "__getitem__")):
            raise BadInput(
                f"data = {type(source).__name__}: give (x, y) arrays, hushfleet.Data, a table with named columns, or a "
                "PyTorch or Hugging Face data set; or a dict of them with 'train' and 'test'"
            )
        if hasattr(source, "dataset") and hasattr(source, "batch_size"):
            raise BadInput("data = a DataLoader, which gives batches: give its data set (loader.dataset)")
        items = _items(source)
        if not items or not all(isinstance(item, Mapping) for item in items):
            return _from_pairs(items, form, tuple(map(str, getattr(source, "classes", ()))))
        classes = getattr(source, "classes", ())
        table = table_of_rows(items)._replace(classes=lambda name: classes)
    if table is not None:
        made = from_table(table, form, outputs)
    else:
        x, y, *devices = source
        if named := [key for key in _COLUMNS if getattr(form, key)]:
            raise BadInput(f"data: {named[0]} names a column, and (x, y) arrays have none; give the whole table")
        owners = as_array(devices[0]) if devices else None
        x, are_images = samples_of(x, form.bit_depth, "data") if isinstance(x, list) else (x, False)
        x = x if is_frame(x) else as_array(x)
        made = _with_form(Data(x, as_array(y), train_device=owners), form, are_images)
    if made.train_x is not None and (kind := made.train_x.dtype.kind) not in "uifb":
        raise BadInput(
            f"data: samples are {made.train_x.dtype}; they must be numbers{', such as abs(x)' * (kind == 'c')}"
        )
    return made


def _are_arrays(source: Any) -> bool:
    """Returns whether this is (x, y) or (x, y, devices): arrays, or in a tuple also lists."""
    if not isinstance(source, tuple | list) or len(source) not in (2, 3):
        return False
    return all(hasattr(each, "shape") or (isinstance(source, tuple) and isinstance(each, list)) for each in source)


def _items(source: Any) -> list[Any]:
    """Returns the items of a data set with a length, or of an iterable. Raises `BadInput` for one without an end."""
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return [source[index] for index in range(len(source))]
    items = list(islice(source, _MOST + 1))
    if len(items) > _MOST:
        raise BadInput(f"data has more than {_MOST:,} samples, or no end: give a part of it")
    return items


def _from_pairs(items: Sequence[Any], form: SampleForm, classes: tuple[str, ...]) -> Data:
    """Converts pairs (sample, label) or (sample, targets): tensors, arrays or images."""
    if any(not isinstance(item, tuple | list) or len(item) != 2 for item in items):
        raise BadInput(
            "a data set must have items, each of them a pair (sample, label), or a dict such as "
            "{'image': ..., 'label': ...}, in which a third part such as the device has a name"
        )
    if not items:
        return Data()
    x, are_images = samples_of([x for x, _ in items], form.bit_depth, "data")
    labels = [label.decode() if isinstance(label, bytes) else label for _, label in items]
    y, _ = samples_of(labels, 0, "data: labels")
    return _with_form(Data(x, y, class_names=classes), form, are_images)


def _with_form(data: Data, form: SampleForm, are_images: bool) -> Data:
    """Returns the data with what the form says of their arrays; images are in our own form already."""
    layout, bit_depth = ("channels-first", 0) if are_images else (form.layout, form.bit_depth)
    return replace(data, layout=layout, bit_depth=bit_depth)
