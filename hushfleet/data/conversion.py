"""Converts a Python program's own data to `Data`: arrays, PyTorch data sets, Hugging Face data sets.

Neither torch nor datasets is imported: their objects are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from hushfleet.data.arrays import Data, is_frame
from hushfleet.data.images import pixels_of
from hushfleet.data.records import unmasked
from hushfleet.errors import BadInput

_INPUTS = ("x", "image", "img", "images", "features", "inputs", "values", "signal")
_LABELS = ("y", "label", "labels", "fine_label", "target")
_DEVICES = ("device", "client", "client_id", "user", "user_id", "subject")


def as_data(source: Any) -> Data:
    """:param source: `Data`; (x, y) or (x, y, devices) of arrays; a PyTorch data set of pairs (sample, label); a
        Hugging Face data set; or a dict of these with `train` and `test`, such as a `DatasetDict`.

    :raises BadInput: it is none of these; the text says what is accepted.
    """
    if isinstance(source, Data):
        return source
    if isinstance(source, Mapping) and not _is_columns(source):
        if not {"train", "test"} >= source.keys() >= {"train"}:
            raise BadInput(f"data = a dict with {sorted(map(str, source))}: it needs 'train', and may have 'test'")
        parts = {part: _part(source[part]) for part in source}
    else:
        parts = {"train": _part(source)}
    train, test = parts["train"], parts.get("test", Data())
    for key in ("column_names", "class_names"):
        of_train, of_test = getattr(train, key), getattr(test, key)
        if of_test and of_test != of_train:
            raise BadInput(f"data: {key} of 'test' are {list(of_test)[:8]}, and of 'train' {list(of_train)[:8]}")
    return replace(train, test_x=test.train_x, test_y=test.train_y)


def _is_columns(source: Any) -> bool:
    """Returns whether this is a `datasets.Dataset`; a `DatasetDict` has a dict of column names instead."""
    return hasattr(source, "features") and isinstance(getattr(source, "column_names", None), list)


def _part(source: Any) -> Data:
    if isinstance(source, tuple | list) and len(source) in (2, 3) and all(hasattr(each, "shape") for each in source):
        x, y, *devices = source
        return Data(
            x if is_frame(x) else _array(x, "data"),
            _array(y, "data"),
            train_device=_array(devices[0], "data") if devices else None,
        )
    if _is_columns(source):
        return from_hugging_face(source)
    if isinstance(source, str | PathLike):
        raise BadInput(
            f"data = {str(source)!r}: the task names a file: changes={{'data.name': 'csv', 'data.path': ...}}, or "
            "'arrays' for .npz, or 'folder'"
        )
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        return from_torch(source)
    raise BadInput(
        f"data = {type(source).__name__}: give (x, y) arrays, hushfleet.Data, a PyTorch data set with a length, or a "
        "Hugging Face data set; or a dict of them with 'train' and 'test'"
    )


def from_torch(dataset: Any) -> Data:
    """Converts a data set of pairs (sample, label) or (sample, targets): tensors, arrays or PIL images, which become
    arrays with the channels first."""
    pairs = [dataset[index] for index in range(len(dataset))]
    if not pairs or any(not isinstance(pair, tuple | list) or len(pair) != 2 for pair in pairs):
        raise BadInput("a PyTorch data set must have items, each of them a pair (sample, label)")
    labels = _stacked([label for _, label in pairs])
    return Data(_stacked([x for x, _ in pairs]), labels, class_names=tuple(map(str, getattr(dataset, "classes", ()))))


def from_hugging_face(dataset: Any) -> Data:
    """Converts a `datasets.Dataset` with a column of samples and a column of labels; a column such as `device` or
    `user` has the owner of each sample. Use `rename_column` to give columns the names that are known here."""
    names = dataset.column_names
    x, y = (
        next((name for name in known if name in names), None) for known in (_INPUTS, _LABELS)
    )  # fmt: skip
    if x is None or y is None:
        raise BadInput(
            f"data: no column is called {' or '.join(_INPUTS if x is None else _LABELS)}; the columns are {names}; "
            "use rename_column"
        )
    device = next((name for name in _DEVICES if name in names), None)
    classes = getattr(dataset.features[y], "names", None) or ()
    return Data(
        _stacked(dataset[x]),
        _array(list(dataset[y]), f"data: {y}"),
        train_device=None if device is None else _array(list(dataset[device]), f"data: {device}"),
        class_names=tuple(map(str, classes)),
    )


def _stacked(samples: Any) -> np.ndarray:
    arrays = [_array(sample, f"data: sample {number}") for number, sample in enumerate(samples)]
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise BadInput(f"data: samples must have one shape, and have {', '.join(map(str, sorted(shapes)[:4]))}")
    return np.stack(arrays)


def _array(value: Any, where: str) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    if hasattr(value, "getbands"):  # a PIL image
        try:
            return pixels_of(value)
        except ValueError as error:
            raise BadInput(f"{where} (from 0): {error}") from error
    return unmasked(value, where)
