"""Converts tables with named columns to `Data`: pandas, polars, Arrow, Parquet, Hugging Face, rows, tars of WebDataset.

None of these packages is imported before a table of its kind is there.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.data.arrays import Data, is_frame, numbers_of
from hushfleet.data.form import MOST_COLUMNS, SampleForm, one_form
from hushfleet.data.images import pixels_of, read_image, stacked
from hushfleet.data.records import unmasked
from hushfleet.data.series import arranged
from hushfleet.errors import BadInput

_INPUTS = (
    "x", "image", "img", "images", "features", "inputs", "values", "signal", "pixel_values", "input_ids",
    "png", "jpg", "jpeg", "webp", "tif", "tiff", "bmp", "npy",
)  # fmt: skip
_LABELS = ("label", "labels", "y", "fine_label", "target", "cls")
_DEVICES = ("device", "client", "client_id", "user", "user_id", "subject")


class NamedColumns(NamedTuple):
    """A table of any kind.

    :param names: of its columns.
    :param column: returns a column by its name.
    :param classes: returns the names of the classes in a column, if the table has them.
    """

    names: list[str]
    column: Callable[[str], Any]
    classes: Callable[[str], Sequence[str]] = lambda name: ()


def table_of(source: Any) -> NamedColumns | None:
    """Returns the table if this is one."""
    names = getattr(source, "column_names", None)
    if hasattr(source, "features") and isinstance(names, list):  # of datasets
        return NamedColumns(names, source.__getitem__, lambda name: getattr(source.features[name], "names", None) or ())
    if isinstance(names, list) and hasattr(source, "to_pandas"):  # of pyarrow
        source = source.to_pandas()
    if is_frame(source):
        called = {one_form(str(key)): key for key in source.columns}
        if len(called) < len(source.columns):
            raise BadInput(f"data: two columns have one name: {sorted(map(str, source.columns))[:8]}; rename one")
        return NamedColumns(list(called), lambda name: source[called[name]])
    return None


def table_of_rows(rows: Sequence[Mapping[str, Any]]) -> NamedColumns:
    """Returns the table of rows that have names, such as samples of WebDataset. Raises `BadInput`."""
    names = [name for name in rows[0] if not name.startswith("__")]
    for place, row in enumerate(rows):
        if lacking := [name for name in names if name not in row]:
            raise BadInput(f"data: sample {place} (from 0) lacks {lacking[0]!r}, which the first sample has")
    return NamedColumns(names, lambda name: [row[name] for row in rows])


def read_table(path: Path) -> NamedColumns:
    """Reads a Parquet file, or a tar of WebDataset. Raises `BadInput`."""
    try:
        if path.suffix == ".tar":
            return table_of_rows(_rows_of_tar(path))
        import pandas as pd

        found = table_of(pd.read_parquet(path))
    except ImportError as error:
        raise BadInput(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from error
    except (OSError, ValueError, tarfile.TarError) as error:  # pyarrow's errors are these
        raise BadInput(f"{path} cannot be read: {error}") from error
    assert found is not None
    return found


def _rows_of_tar(path: Path) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            key, _, ending = name.partition(".")
            if key and ending and (file := tar.extractfile(member)) is not None:
                rows.setdefault(f"{folder}/{key}", {})[ending.lower()] = file.read()
    if not rows:
        raise BadInput(f"{path} has no samples: files such as 0001.png and 0001.cls")
    return list(rows.values())


def from_table(table: NamedColumns, form: SampleForm, outputs: Sequence[str] | None = ()) -> Data:
    """Converts a table.

    :param form: names the columns, where they have not the usual names.
    :param outputs: the columns of the targets, if they are not one of labels; None: the samples need no targets.
    :raises BadInput: a column is missing, or is not what it should be; the text names it.
    """
    device, time, record = (
        _named(table, getattr(form, key), usual, key)
        for key, usual in (("device_column", _DEVICES), ("time_column", ()), ("record_column", ()))
    )
    usual = ("fault",) if outputs is None else _LABELS
    label = "" if outputs else _named(table, form.label_column, usual, "label_column")
    if not (label or outputs or outputs is None):
        raise _missing(table, " or ".join(_LABELS), "label_column names it")
    targets = list(map(one_form, outputs or ())) or [label] * bool(label)
    rest = [name for name in table.names if name not in (*targets, device, time, record)]
    values = list(map(one_form, form.columns)) or _values(table, rest)
    for name in [name for name in (*values, *targets) if name not in table.names][:1]:
        raise _missing(table, name)
    if not values:
        raise BadInput(f"data: no column of values is left beside {', '.join(table.names)}")
    x, is_nested, are_images = _samples(table, values, form.bit_depth)
    if is_nested and (time or record):
        raise BadInput(f"data: {time or record!r} arranges rows of numbers, and {values[0]!r} has samples in each row")
    y, classes = _labels(table, label, form) if label else (numbers_of(_frame(table, targets), "data"), ())
    owners, times, records = (
        np.asarray(_decoded(table.column(key))) if key else None for key in (device, time, record)
    )
    x, (y, owners) = arranged(x, (y if targets else None, owners), times=times, records=records, where="data")
    return Data(
        x, y, train_device=owners, class_names=tuple(map(str, classes)),
        column_names=() if is_nested else tuple(name for name in values for _ in range(x.shape[2] if record else 1)),
        layout="channels-first" if are_images or record else form.layout, bit_depth=0 if are_images else form.bit_depth,
    )  # fmt: skip


def _named(table: NamedColumns, name: str, usual: Sequence[str], key: str) -> str:
    """Returns the column of this name, or the only one with a usual name; else an empty text."""
    if name and one_form(name) not in table.names:
        raise _missing(table, name, key)
    found = [one_form(name)] if name else [each for each in usual if each in table.names]
    if len(found) > 1:
        raise BadInput(
            f"data: the columns {' and '.join(map(repr, found))} may both be meant; say {key} = {found[0]!r}"
        )
    return found[0] if found else ""


def _missing(table: NamedColumns, name: str, key: str = "columns") -> BadInput:
    return BadInput(f"data: no column is called {name} ({key}); there are {', '.join(table.names[:16])}")


def _values(table: NamedColumns, rest: Sequence[str]) -> list[str]:
    """Returns the columns of values among the rest: one of whole samples with a usual name, or all."""
    known = [name for name in _INPUTS if name in rest and _is_nested(table.column(name))]
    return known if len(known) == 1 else list(rest)


def _samples(table: NamedColumns, values: Sequence[str], bit_depth: int) -> tuple[np.ndarray, bool, bool]:
    """Returns the samples, and whether one column has whole samples, and whether these are images."""
    nested = [name for name in values if _is_nested(table.column(name))]
    if not nested:
        return numbers_of(_frame(table, values), "data"), False, False
    if len(values) > 1:
        raise BadInput(
            f"data: the column {nested[0]!r} has a whole sample in each row, and there are others: "
            f"{', '.join(values[:8])}; columns names the one that the network takes"
        )
    x, are_images = samples_of(table.column(nested[0]), bit_depth, f"data: {nested[0]}")
    return x, True, are_images


def _is_nested(column: Any) -> bool:
    """Returns whether each row has more than a number or a text: an image, bytes, a list, an array."""
    first = next(iter(column), None)
    is_many = isinstance(first, bytes | Mapping | Sequence) and not isinstance(first, str)
    return is_many or hasattr(first, "getbands") or getattr(first, "ndim", 0) > 0


def _frame(table: NamedColumns, names: Sequence[str]) -> Any:
    import pandas as pd

    return pd.DataFrame({name: pd.Series(_plain(table.column(name))) for name in names})


def _plain(column: Any) -> Any:
    """Returns a column as pandas takes it: tensors and lazy columns as lists."""
    is_array = hasattr(column, "dtype") and not hasattr(column, "detach")
    return column if is_array else [each.item() if hasattr(each, "item") else each for each in column]


def _decoded(column: Any) -> list[Any]:
    return [each.decode() if isinstance(each, bytes) else each for each in column]


def _labels(table: NamedColumns, name: str, form: SampleForm) -> tuple[np.ndarray, Sequence[str]]:
    """Returns labels, and the names of their classes if the table has them. If neither it nor the form says otherwise,
    whole numbers are names of classes, as in a CSV file."""
    cells, classes = _decoded(table.column(name)), table.classes(name)
    found = samples_of(cells, 0, f"data: {name}")[0] if _is_nested(cells) else np.asarray(cells)
    are_places = classes or form.labels == "numbers" or found.dtype.kind not in "iub"
    return found if are_places else found.astype(str).astype(object), classes


def samples_of(samples: Any, bit_depth: int, where: str) -> tuple[np.ndarray, bool]:
    """Returns samples of one shape as one array, and whether they are images, which have the channels first.

    :param bit_depth: of images (`pixels_of`); 0: their own.
    """
    made = [_sample(sample, bit_depth, f"{where}: sample {number}") for number, sample in enumerate(samples)]
    arrays, are_images = [array for array, _ in made], all(is_image for _, is_image in made)
    if len(shapes := {array.shape for array in arrays}) > 1:
        shown = ", ".join(map(str, sorted(shapes)[:4]))
        raise BadInput(f"{where}: samples must have one shape, and have {shown}; resize images, cut series, pad tokens")
    return (stacked if are_images else np.stack)(arrays), are_images


def _sample(value: Any, bit_depth: int, where: str) -> tuple[np.ndarray, bool]:
    if isinstance(value, Mapping):  # an image that datasets has not decoded
        value = value.get("bytes") or Path(str(value.get("path")))
    try:
        if isinstance(value, bytes) and value.startswith(b"\x93NUMPY"):
            return np.load(io.BytesIO(value), allow_pickle=False), False
        if isinstance(value, bytes | Path):
            return read_image(io.BytesIO(value) if isinstance(value, bytes) else value, bit_depth=bit_depth), True
        if hasattr(value, "getbands"):  # of PIL
            return pixels_of(value, bit_depth=bit_depth), True
    except (BadInput, ValueError) as error:
        raise BadInput(f"{where} (from 0): {error.__cause__ or error}") from error
    return as_array(value, where), False


def as_array(value: Any, where: str = "data") -> np.ndarray:
    """Converts arrays, tensors and sparse matrices. Raises `BadInput` for what a mask hides, and for a wide sparse
    matrix, which would fill the memory."""
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().to_dense()
        value = (value.float() if "bfloat16" in str(value.dtype) else value).numpy()
    if hasattr(value, "toarray"):
        if value.shape[1] > MOST_COLUMNS:
            raise BadInput(
                f"{where}: a sparse matrix with {value.shape[1]} columns; a sample has at most {MOST_COLUMNS}"
            )
        value = value.toarray()
    return unmasked(value, where)
