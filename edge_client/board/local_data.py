"""The device's own labelled samples, read again when they have changed since the last round.

A board that keeps collecting images should train with them without a restart. Reading thousands of files for every
round takes long, so they are read only if the name, the date or the size of one has changed.

Photographs that cannot be read, or that lie in no folder of a class, are left out. Where a task takes a device without
samples, any sample that does not fit it counts as none, by itself, and data that cannot be read at all are no samples:
a decline would tell, without a charge, what is in the data. What was left out is told on the board alone: in its log,
and by `hushfleet-edge status`.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from hushfleet.config.spec import ModelSpec
from hushfleet.data.arrays import as_targets, as_values, opened
from hushfleet.data.csv_file import read_csv
from hushfleet.data.folder import ImageForm, files_below, load_unlabelled, named, scan_folder
from hushfleet.data.held_out import held_out_part, training_part
from hushfleet.data.labels import check_one_reading, one_form, texts_of
from hushfleet.data.measurements import far_away, refuse_far, warn_of_row_numbers
from hushfleet.data.samples import FeatureSamples, LabelledSamples, Samples
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.notes import DataUse, Note
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.errors import BadInput
from hushfleet.graphs.features import FeatureGraph

Stamp = tuple[int, int]

_FILES = {
    "arrays": ".npz file, with samples `x` and labels `y`",
    "csv": "CSV file, with a column `label` (or the task's outputs) and columns of values",
}

MOST_UNLABELLED = 1000
_LOOKED_AT = 1 << 18  # values: as float64 2 MiB, where a hundred photographs of 224 x 224 pixels take 115
_FAR = 50.0  # standard deviations: pixels that are not divided by 255 lie hundreds of them away, a bad sensor a few

_log = logging.getLogger("hushfleet.edge")


def describe_data(section: OwnDataSection) -> str | None:
    """Tells a person what is wrong with the configured data before a task comes; None if nothing is.

    A device starts all the same: a disk may come later, and a camera's first image.
    """
    if section.unlabelled is not None and not Path(section.unlabelled).is_dir():
        return f"data.unlabelled = {section.unlabelled!r}: there is no such folder of images"
    for key, text in (("path", section.path), ("held_out", section.held_out)):
        path = Path(text or ".")
        name, later = f"data.{key} = {str(path)!r}", "; until then it has nothing to train on" * (key == "path")
        if section.kind in _FILES:
            if text and not path.is_file():
                return f"{name}: there is no such {_FILES[section.kind]}{later}"
        elif text and not path.is_dir():
            return f"{name}: there is no such folder, with a sub-folder of images for each class{later}"
        elif text and not any(
            os.path.isfile(each) and Path(each).parent != path for each in files_below(path, data=path)
        ):
            return f"{name}: there are no images in class folders, as in {path}/CLASS/1.jpg{later}"
    return None


class LocalData:
    """The samples that a task trains on.

    :param section: where the data are.
    :param model: the shape and normalisation that the task wants.
    :param features: what makes features of images, where the task trains on those; once for each state of the data.
    :param may_be_empty: whether the task takes a device without samples, since what it sends is noise all the same.
    :param note: says what was left out of the data.
    :param held_out: the share of them that never trains (`hushfleet.data.held_out`).
    """

    def __init__(
        self,
        section: OwnDataSection,
        model: ModelSpec,
        *,
        features: FeatureGraph | None = None,
        may_be_empty: bool = False,
        note: Note | None = None,
        held_out: float = 0.0,
    ) -> None:
        self._share = held_out
        self._held_out: Samples | None = None
        self._held_inputs: LabelledSamples | None = None
        self.left_out = 0
        """How many samples were not read, when they were read last."""
        self._section = section
        self._model = model
        self._features = features
        self._may_be_empty = may_be_empty
        self._note = note or Note(None)
        self._stamp: Stamp | None = None
        self._samples: LabelledSamples | None = None

    @property
    def has_read(self) -> bool:
        """Whether they are in memory, though perhaps not the newest."""
        return self._samples is not None

    def samples(self) -> LabelledSamples:
        """All samples that may train. Raises `BadInput` where there are none and must be some, or they do not fit."""
        path = Path(self._section.path)
        stamp = _stamp(path)
        if self._samples is None or stamp != self._stamp:
            self._samples, self._held_out, self._stamp, skipped = None, None, stamp, list[str]()
            self._held_inputs = None
            self._samples = self._load(path, skipped)
            self.left_out = len(skipped)
            return_small_blocks()
        return self._samples

    def held_out(self) -> LabelledSamples:
        """The samples that never train. Raises as `samples` does."""
        self.samples()
        if self._held_inputs is None:
            found = self._none() if self._held_out is None else self._held_out
            self._held_inputs = inputs_of(found, self._features, skipped=[])
            return_small_blocks()
        return self._held_inputs

    def unlabelled(self) -> LabelledSamples | None:
        """The images that the owner has named for the own head, at most `MOST_UNLABELLED`; read at each call."""
        if self._section.unlabelled is None:
            return None
        samples = load_unlabelled(Path(self._section.unlabelled), most=MOST_UNLABELLED, **_form(self._model))
        inputs = inputs_of(samples, self._features, skipped=[])
        return_small_blocks()
        return inputs

    def _load(self, path: Path, skipped: list[str]) -> LabelledSamples:
        """:param skipped: is told what is left out."""
        failed = ""
        try:
            samples = self._read(path, skipped)
            if not len(samples) and not self._may_be_empty:
                where, names = f"data.path = {str(path)!r}", ", ".join(self._model.class_names)
                cure = f"; put images into {path}/CLASS/, the classes are {names}" * (self._section.kind == "folder")
                left_out = f"; left out: {reasons(skipped)}" if skipped else ""
                raise BadInput(f"{where} holds no samples that fit the task{left_out}{cure}")
        except (BadInput, OSError) as error:
            if not self._may_be_empty:
                self._note.keep(DataUse(0, len(skipped), reasons(skipped) or str(error)))
                raise
            self._stamp = None  # next time it may be readable, though nothing has changed
            samples, failed = self._none(), str(error)
        if len(samples):
            _warn_of_another_unit(samples, path)
        if self._share:
            samples, self._held_out = training_part(samples, self._share), held_out_part(samples, self._share)
        inputs = inputs_of(samples, self._features, skipped=skipped if self._may_be_empty else None)
        self._tell(path, DataUse(len(inputs), len(skipped), failed or reasons(skipped), self._may_be_empty))
        return inputs

    def _read(self, path: Path, skipped: list[str]) -> Samples:
        model, lenient = self._model, skipped if self._may_be_empty else None
        if self._section.kind == "arrays":
            samples = load_arrays(path, model, skipped=lenient)
            warn_of_row_numbers(samples.images, str(path))
            return samples
        if self._section.kind == "csv":
            return load_csv(path, model, skipped=lenient)
        samples, found = scan_folder(path, lenient=True, **_form(model))
        skipped += found
        return samples

    def _none(self) -> Samples:
        model = self._model
        return Samples(
            np.empty((0, *model.image_shape), np.uint8),
            model.targets.blank(0, len(model.class_names)),
            model.mean,
            model.std,
            model.targets,
        )

    def _tell(self, path: Path, use: DataUse) -> None:
        self._note.keep(use)
        if use.why or not use.used:
            alone = "" if use.used else ", and this device takes part with noise alone"
            left_out = f"; {use.left_out} are left out: " if use.left_out else ": " if use.why else ""
            _log.warning("data.path = %r: %d samples are used%s%s%s", str(path), use.used, alone, left_out, use.why)


def reasons(skipped: Sequence[str]) -> str:
    """Tells why samples are left out, the commonest first: `12: its folder is no class of this task, as new/1.jpg`.

    :param skipped: `name: reason` of each, or a name alone.
    """
    parts = [each.partition(": ") for each in skipped]
    counted = Counter(reason for _, _, reason in parts)
    first = {reason: name for name, _, reason in reversed(parts)}
    return named([f"{n}: {reason or 'does not fit'}, as {first[reason]}" for reason, n in counted.most_common()])


def _form(model: ModelSpec) -> ImageForm:
    return {
        "input_shape": model.image_shape,
        "class_names": model.class_names,
        "mean": model.mean,
        "std": model.std,
    }


def load_arrays(path: Path, model: ModelSpec, *, skipped: list[str] | None = None) -> Samples:
    """An .npz with samples `x` (or `images`), as `as_values` takes them, and labels `y` (or `labels`): whole numbers,
    names of classes, or what else the task has as targets. Raises `BadInput`.

    :param skipped: where samples that do not fit are told, and left out; None: the first of them is an error.
    """
    with opened(path) as arrays:
        x, y = ("images", "labels") if "images" in arrays else ("x", "y")
        if missing := {x, y} - set(arrays):
            raise BadInput(f"{path} lacks the array {min(missing)!r}; it needs {x!r} and {y!r}")
        values, labels = arrays[x], arrays[y]
    if y == "y" and model.targets.are_classes:  # a simulation's own files have places
        check_one_reading(labels, model.class_names, f"{path}: {y}")
    if skipped is not None:
        values, labels = _usable(values, labels, model, skipped)
    return _fitting(as_values(values, f"{path}: {x}"), labels, model, f"{path}: {y}", skipped)


def load_csv(path: Path, model: ModelSpec, *, skipped: list[str] | None = None) -> Samples:
    """Reads a CSV file (`hushfleet.data.csv_file`); parameters as `load_arrays`. Raises `BadInput`."""
    outputs = () if model.targets.are_classes else model.class_names
    values, labels, _, names = read_csv(path, input_shape=model.image_shape, outputs=outputs, skipped=skipped)
    warn_of_row_numbers(values, str(path), names)
    if skipped is not None:
        values, labels = _usable(values, labels, model, skipped)
    return _fitting(values, labels, model, str(path), skipped)


def _usable(
    values: np.ndarray, labels: np.ndarray, model: ModelSpec, skipped: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Selects the samples that `as_values` and `as_targets` take; arrays that do not fit as a whole are left alone."""
    if not (values.ndim and labels.ndim and len(values) == len(labels)):
        return values, labels
    targets, numeric = model.targets, labels.dtype.kind in "iufb"
    fits = np.ones(len(values), bool)
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            fits &= np.isfinite(values.astype(np.float32, copy=False)).reshape(len(values), -1).all(1)
    if targets.are_classes and labels.ndim == 1:
        if numeric:
            fits &= (labels >= 0) & (labels < len(model.class_names)) & (labels == np.floor(labels))
        else:
            fits &= np.isin(texts_of(labels).astype(str), list(map(one_form, model.class_names)))
    elif not targets.are_classes and numeric:
        rows = labels.reshape(len(labels), -1)
        with np.errstate(over="ignore"):
            found = rows.astype(np.float32)
        if rows.shape[1] == len(model.class_names):
            fits &= ~targets.misfits(found)
    if fits.all():
        return values, labels
    (places,) = np.nonzero(~fits)
    skipped += (f"sample {place} ({labels[place]}): its label does not fit the task" for place in places)
    return values[fits], labels[fits]


def _fitting(
    values: np.ndarray, labels: np.ndarray, model: ModelSpec, where: str, skipped: list[str] | None
) -> Samples:
    if values.shape[1:] != model.image_shape:
        raise BadInput(f"{where}: samples of {list(values.shape[1:])}, the task wants {list(model.image_shape)}")
    labels = as_targets(labels, model.class_names, model.targets, count=len(values), where=where)
    if skipped is None:
        refuse_far(values, model.mean, model.std, where)
    elif (far := far_away(values, model.mean, model.std)).any():
        skipped += (f"sample {place}: a million standard deviations from the mean" for place in np.flatnonzero(far))
        values, labels = values[~far], labels[~far]
    return Samples(values, labels, model.mean, model.std, model.targets)


def _warn_of_another_unit(samples: Samples, path: Path) -> None:
    """Pixels in a wider type than uint8 are not divided by 255, and bytes always are: what the task subtracts may be of
    another unit. Said in the device's own log alone, since it follows from the values."""
    count = max(1, _LOOKED_AT // math.prod(samples.images.shape[1:]))
    are_bytes, few = samples.images.dtype == np.uint8, samples.take(slice(count)).x
    distance = float(np.sqrt(np.square(few, dtype=np.float64).mean()))
    if distance > _FAR or (are_bytes and max(samples.mean) > 1):
        found = "uint8, which is read as pixels and divided by 255" if are_bytes else "taken as they are, not as pixels"
        _log.warning(
            "data.path = %r: the values are %s, and lie %.3g of the task's standard deviations from its mean %s. If "
            "that is another unit, save pixels of 0 to 255 as uint8, and values of sensors as float32",
            str(path), found, distance, list(samples.mean),
        )  # fmt: skip


def inputs_of(samples: Samples, features: FeatureGraph | None, *, skipped: list[str] | None = None) -> LabelledSamples:
    """Makes the network's inputs from images: their features if the task has some; see `FeatureGraph.of`."""
    return samples if features is None else features.of(samples, skipped=skipped)


def zero_samples(model: ModelSpec, labels: np.ndarray) -> Samples | FeatureSamples:
    """Makes black images, or features of zero, with these labels."""
    if model.features is not None:
        blank = np.zeros((len(labels), model.features.count, 1, 1), np.float32)
        return FeatureSamples(blank, labels, model.targets, model.input_shape[0])
    images = np.zeros((len(labels), *model.input_shape), np.uint8)
    return Samples(images, labels, model.mean, model.std, model.targets)


def load_indices(path: Path) -> np.ndarray | None:
    """Indices int64 `[n]` into the common test, of an .npz with `of_common`, a bit for each of its images.

    None for an .npz of images. Raises `BadInput`.
    """
    with opened(path) as arrays:
        return np.flatnonzero(np.unpackbits(arrays["of_common"])) if "of_common" in arrays else None


def _stamp(path: Path) -> Stamp:
    """The number of files, and a sum that follows the name, the date and the size of each: a file that was moved to
    another class keeps all but its name. Zeros where there is nothing."""
    count, total = 0, 0
    for file in [str(path)] if path.is_file() else files_below(path, data=path):
        with suppress(OSError):  # it was removed meanwhile
            status = os.stat(file)
            count, total = count + 1, total + hash((file, status.st_mtime_ns, status.st_size))
    return count, total
