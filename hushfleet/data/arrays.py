"""Reads your own data as arrays: images, series of sensor values, or vectors, with labels; and the file with them.

    np.savez("mine.npz", train_x=..., train_y=...)      # optional: test_x, test_y, train_device, class_names

All samples have the shape (C, H, W): a series of C channels and T steps is (C, 1, T), a vector of F values (F, 1, 1).
Values are uint8 (images) or float32; other numbers become float32.
"""

from __future__ import annotations

import logging
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.data.form import ANY_FORM, SampleForm
from hushfleet.data.held_out import WITHOUT_TEST
from hushfleet.data.labels import check_present, class_names_of, texts_of
from hushfleet.data.measurements import check_names, check_spread, moments, warn_of_row_numbers
from hushfleet.data.records import fitted, unmasked
from hushfleet.data.samples import DataSet
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.errors import BadInput
from hushfleet.paths import no_file

if TYPE_CHECKING:
    from hushfleet.data import partition
else:
    partition = at_need("hushfleet.data.partition")

_ORDER_SEED = 0
_UNREADABLE = (
    OSError, ValueError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error,
    RuntimeError,  # zipfile's, for an encrypted file, and for a compression that it does not know
    tokenize.TokenError, SyntaxError,  # NumPy reads the head of an array as Python
)  # fmt: skip
_KEYS = ("train_x", "train_y", "test_x", "test_y", "train_device", "test_device", "class_names", "column_names")
_FORM = {"layout": str, "bit_depth": int}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Data:
    """Labelled samples of your own. Each array is checked when `dataset` makes a data set from it.

    :param train_x: `[n, C, H, W]`, `[n, C, T]` or `[n, F]`; None: a test part alone, as on an aggregator in the field.
    :param train_y: `[n]`: whole numbers from 0, or names of classes. For other losses numbers, for "binary" 0 and 1,
        `[n, outputs]`, or `[n]` with one output. For "reconstruction" None, or 1 for a fault and 0 otherwise, `[n]`.
    :param test_x: None: a fifth of the data is held out, the same share of each class.
    :param train_device: `[n]`, numbers or names: the device of each sample, for `data.partition = "given"`.
    :param test_device: `[n]`, likewise: each device is tested on its own part. None: on some of its `train_x`.
    :param class_names: the meaning of labels 0, 1, ...; by default the labels themselves. For other targets: the
        meaning of each output; by default "output 0" and so on.
    :param column_names: the names of a vector's values, for messages; for a frame, its columns.
    :param layout: `channels-first` or `channels-last`, if it is known; else the task says it, or the shape.
    :param bit_depth: 9 to 16: values are pixels, whole numbers of so many bits.
    """

    train_x: Any = None
    train_y: Any = None
    test_x: Any = None
    test_y: Any = None
    train_device: Any = None
    test_device: Any = None
    class_names: Sequence[str] = ()
    column_names: Sequence[str] = ()
    layout: str = ""
    bit_depth: int = 0

    def __post_init__(self) -> None:
        """Converts frames to arrays and keeps the names of their columns."""
        frames = {key: x for key in ("train_x", "test_x") if is_frame(x := getattr(self, key))}
        names = {key: tuple(map(str, frame.columns)) for key, frame in frames.items()}
        if len(set(names.values())) > 1:
            raise BadInput(
                f"the data: test_x must have the columns of train_x, in the same order: {names['train_x'][:8]}"
            )
        for key, frame in frames.items():
            object.__setattr__(self, key, numbers_of(frame, f"the data: {key}"))
            object.__setattr__(self, "column_names", self.column_names or names[key])

    def __repr__(self) -> str:
        sized = {key: value for key, value in vars(self).items() if hasattr(value, "__len__") and len(value)}
        return f"Data({', '.join(f'{key}: {_shown(value)}' for key, value in sized.items())})"

    def save(self, path: Path) -> None:
        """Writes the file that `data.name = "arrays"` reads. Raises `BadInput` for values that it cannot hold."""
        arrays: dict[str, Any] = {key: getattr(self, key) for key in _FORM if getattr(self, key)}
        for key in _KEYS:
            if (value := getattr(self, key)) is not None and len(value):
                array = unmasked(value, f"the data: {key}")
                if array.dtype.kind == "O" and key.endswith("_x"):
                    raise BadInput(f"the data: {key} is {array.dtype}; it must be numbers")
                if array.dtype.kind == "O":  # texts in pandas' form
                    check_present(array, f"the data: {key}", names=self.class_names)
                    array = texts_of(array).astype(str)
                arrays[key] = array
        np.savez(path, **arrays)

    def dataset(
        self,
        name: str,
        *,
        class_names: Sequence[str] = (),
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        targets: Targets = CLASSES,
        form: SampleForm = ANY_FORM,
        input_shape: tuple[int, int, int] | None = None,
        where: str = "the data",
    ) -> DataSet:
        """:param class_names: in place of the data's own.
        :param mean: per channel, like `std`. Left out, 0 and 1: pixels go to a network in [0, 1], other values go as
            they are, as on a board, where nothing is computed from the data.
        :param targets: the kind of targets in y.
        :param form: what the task has fixed.
        :param input_shape: likewise; it says which axis the channels are.

        :raises BadInput: arrays that do not fit; the text names the array and the sample.
        """
        given = {}
        for part in ("train", "test"):
            x, y = getattr(self, f"{part}_x"), getattr(self, f"{part}_y")
            if targets.are_inputs and y is None and x is not None:
                y = np.zeros((len(x), 1), np.float32)
            if (x is None) != (y is None):
                raise BadInput(f"{where}: give both {part}_x and {part}_y, or neither")
            if x is not None:
                if not len(x):
                    raise BadInput(f"{where}: the {part} part has no samples; add some, or leave the part out")
                if np.shape(y)[:1] != (len(x),):
                    raise BadInput(
                        f"{where}: {part}_x has {len(x)} samples, and {part}_y the shape {list(np.shape(y))}"
                    )
                given[part] = x, y
        if not given:
            raise BadInput(f"{where} has neither train_x and train_y nor test_x and test_y")
        columns = tuple(map(str, self.column_names))
        check_names(columns, where)
        ys = [unmasked(y, f"{where}: {part}_y") for part, (_, y) in given.items()]
        names = tuple(map(str, class_names or self.class_names)) or (
            class_names_of(ys, where) if targets.are_classes else _output_names(ys[0])
        )
        rules: dict[str, Any] = {"targets": targets, "mean": mean, "std": std, "labels": form.labels}
        rules |= {
            "order": input_shape,
            "form": replace(form, **{key: getattr(self, key) or getattr(form, key) for key in _FORM}),
        }
        made = {
            part: fitted(x, y, names, **rules, where=(f"{where}: {part}_x", f"{where}: {part}_y"))
            for part, (x, y) in given.items()
        }
        first = next(iter(made.values()))
        warn_of_row_numbers(first.images, where, columns)
        has_test = len(made) > 1
        if has_test and targets.are_classes:
            _tell_lacking(made["train"].labels, made["test"].labels, names, where)
        owners, test_owners, devices = self._owners({part: len(samples) for part, samples in made.items()}, where)
        if "test" not in made:
            strata = first.labels if targets.are_classes else np.zeros(len(first), np.int64)
            rng, is_test = np.random.Generator(np.random.PCG64(_ORDER_SEED)), np.zeros(len(first), bool)
            is_test[partition.stratified_choice(strata, round(WITHOUT_TEST * len(first)), rng)] = True
            made = {"train": first.take(np.flatnonzero(~is_test)), "test": first.take(np.flatnonzero(is_test))}
            owners = None if owners is None else owners[~is_test]
        test = made["test"]
        train = made.get("train", test.take(slice(0, 0)))
        if train.images.shape[1:] != test.images.shape[1:]:
            raise BadInput(
                f"{where}: train_x has samples of {train.images.shape[1:]}, test_x of {test.images.shape[1:]}"
            )
        if len(train) and train.images.dtype != test.images.dtype:  # they would differ by a factor of 255
            types = ", ".join(f"{part}_x is {np.asarray(getattr(self, f'{part}_x')).dtype}" for part in made)
            raise BadInput(
                f"{where}: {types}. uint8 is read as pixels and divided by 255, other numbers are taken as they are; "
                'give both in one type, or say what they are: data.values = "pixels" or "numbers"'
            )
        if not mean and first.images.dtype != np.uint8 and form.values != "tokens":
            check_spread(first.images, *moments((train if len(train) else test).images), where, columns)
        return DataSet(name, train, test, names, owners, test_owners, columns, has_test, devices)

    def _owners(
        self, counts: Mapping[str, int], where: str
    ) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...]]:
        """Returns each training and test sample's device, numbered by sorted names, and these names; -1: without
        training samples."""
        train, test = (
            None
            if (given := getattr(self, key)) is None
            else _devices(given, counts.get(key[:-7], 0), f"{where}: {key}")
            for key in ("train_device", "test_device")
        )
        if train is None:
            return None, None, ()
        devices, owners = np.unique(train, return_inverse=True)
        place = {device: number for number, device in enumerate(devices.tolist())}
        tested = None if test is None else np.array([place.get(each, -1) for each in test.tolist()], np.int64)
        return owners.astype(np.int64), tested, tuple(map(str, devices.tolist()))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else str(list(getattr(value, "shape", [len(value)])))


def _tell_lacking(train_y: np.ndarray, test_y: np.ndarray, names: Sequence[str], where: str) -> None:
    """Says in one line which classes only one of the parts has."""
    train, test = set(train_y.tolist()), set(test_y.tolist())
    for only, part, why in (
        (test - train, "test", "no device can learn them, and each of their samples counts as wrong"),
        (train - test, "train", "no figure on the test part says how well they are learnt"),
    ):
        if only:
            shown = ", ".join(names[label] for label in sorted(only)[:8]) + ", ..." * (len(only) > 8)
            _log.warning("%s: only the %s part has the classes %s; %s", where, part, shown, why)


def load_arrays(path: Path) -> Data:
    """Loads a file that `Data.save` wrote. Raises `BadInput`."""
    with opened(path) as arrays:
        if unknown := sorted(set(arrays) - {*_KEYS, *_FORM}):
            raise BadInput(f"{path} has the array {unknown[0]!r}; it may have {', '.join(_KEYS)}")
        found: dict[str, Any] = {key: _FORM[key](arrays[key]) if key in _FORM else arrays[key] for key in arrays}
        return Data(**found)


def is_frame(x: Any) -> bool:
    """Returns whether this is a table of pandas or polars."""
    return hasattr(x, "columns") and hasattr(x, "to_numpy")


def numbers_of(frame: Any, where: str) -> np.ndarray:
    """Converts a frame; gaps of pandas' own types become NaN. Raises `BadInput` for a column that is not numeric."""
    values = np.asarray(frame)
    if values.dtype.kind != "O" or not hasattr(frame, "iloc"):
        return values
    for name, kind in frame.dtypes.items():
        if kind.kind not in "uifb":
            raise BadInput(
                f"{where}: the column {str(name)!r} is {kind}; it must be numbers; leave it out, or encode it"
            )
    return np.asarray(frame.to_numpy(dtype=float, na_value=np.nan))


def _output_names(y: np.ndarray) -> tuple[str, ...]:
    return tuple(f"output {number}" for number in range(y.shape[1] if y.ndim > 1 else 1))


def _devices(devices: Any, count: int, where: str) -> np.ndarray:
    """Returns the name or number of each sample's device, `[count]`. Raises `BadInput`."""
    found = unmasked(devices, where)
    if not count or found.shape != (count,) or found.dtype.kind not in "iuUO":
        raise BadInput(
            f"{where} is {found.dtype} of shape {list(found.shape)}; it must be a whole number or a name for each "
            f"of the {count} samples of its part"
        )
    if found.dtype.kind in "UO":
        check_present(found, where, what="device")
        return texts_of(found).astype(str)
    return found


@contextmanager
def opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Opens the arrays of an .npz file. Raises `BadInput`, also for errors while the arrays are read."""
    if what := no_file(path):
        raise BadInput(f"{path} cannot be read as an .npz file: it is {what}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays
    except _UNREADABLE as error:
        told = error if not os.path.isfile(path) or zipfile.is_zipfile(path) else "it is none; numpy.savez writes one"
        raise BadInput(f"{path} cannot be read as an .npz file: {told}") from error
