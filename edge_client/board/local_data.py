"""The device's own labelled samples, read again when they have changed since the last round.

A board that keeps collecting images should train with them without a restart. Reading thousands of files for every
round takes long, so they are read only if their number, size or newest date has changed.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

from hushfleet.config.spec import ModelSpec
from hushfleet.data.arrays import as_targets, as_values, opened
from hushfleet.data.csv_file import read_csv
from hushfleet.data.folder import load_folder
from hushfleet.data.samples import FeatureSamples, LabelledSamples, Samples
from hushfleet.edge_client.board.config import DataSection
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.errors import BadInput
from hushfleet.graphs.features import FeatureGraph

Stamp = tuple[int, int, int]

_FILES = {
    "arrays": ".npz file, with samples `x` and labels `y`",
    "csv": "CSV file, with a column `label` (or the task's outputs) and columns of values",
}

_LOOKED_AT = 100  # samples
_FAR = 50.0  # standard deviations: pixels that are not divided by 255 lie hundreds of them away, a bad sensor a few

_log = logging.getLogger("hushfleet.edge")


def data_words(section: DataSection) -> str | None:
    """What a person should know before a task comes; None where there is nothing to say.

    A device starts all the same: a disk may come later, and a camera's first image.
    """
    for key, text in (("path", section.path), ("held_out", section.held_out)):
        path = Path(text or ".")
        name, later = f"data.{key} = {str(path)!r}", "; until then it has nothing to train on" * (key == "path")
        if section.kind in _FILES:
            if text and not path.is_file():
                return f"{name}: there is no such {_FILES[section.kind]}{later}"
        elif text and not path.is_dir():
            return f"{name}: there is no such folder, with a sub-folder of images for each class{later}"
        elif text and not any(each.is_file() for each in path.glob("*/**/*")):
            return f"{name}: there are no images in class folders, as in {path}/CLASS/1.jpg{later}"
    return None


class LocalData:
    """The samples that a task trains on.

    :param section: where the data are.
    :param model: the shape and normalisation that the task wants.
    :param features: what makes features of images, where the task trains on those; once for each state of the data.
    :param may_be_empty: whether the task takes a device without samples, since what it sends is noise all the same.
    """

    def __init__(
        self,
        section: DataSection,
        model: ModelSpec,
        *,
        features: FeatureGraph | None = None,
        may_be_empty: bool = False,
    ) -> None:
        self._section = section
        self._model = model
        self._features = features
        self._may_be_empty = may_be_empty
        self._stamp: Stamp | None = None
        self._samples: LabelledSamples | None = None

    def samples(self) -> LabelledSamples:
        """All samples. Raises `BadInput` where there are none and must be some, or they do not fit the task."""
        path = Path(self._section.path)
        stamp = _stamp(path)
        if self._samples is None or stamp != self._stamp:
            self._samples = inputs_of(self._load(path), self._features)
            self._stamp = stamp
            return_small_blocks()
        return self._samples

    def _load(self, path: Path) -> Samples:
        if self._section.kind == "arrays":
            samples = load_arrays(path, self._model)
        elif self._section.kind == "csv":
            samples = load_csv(path, self._model)
        else:
            model = self._model
            samples = load_folder(
                path,
                input_shape=model.image_shape,
                class_names=model.class_names,
                mean=model.mean,
                std=model.std,
                may_be_empty=self._may_be_empty,
            )
        if not len(samples):
            if self._may_be_empty:
                _log.warning("data.path = %r holds no samples: this device takes part with noise alone", str(path))
                return samples
            raise BadInput(f"data.path = {str(path)!r} holds no samples")
        _warn_of_another_unit(samples, path)
        return samples


def load_arrays(path: Path, model: ModelSpec) -> Samples:
    """An .npz with samples `x` (or `images`), as `as_values` takes them, and labels `y` (or `labels`): whole numbers,
    names of classes, or what else the task has as targets. Raises `BadInput`."""
    with opened(path) as arrays:
        x, y = ("images", "labels") if "images" in arrays else ("x", "y")
        if missing := {x, y} - set(arrays):
            raise BadInput(f"{path} lacks the array {min(missing)!r}; it needs {x!r} and {y!r}")
        values, labels = arrays[x], arrays[y]
    return _fitting(as_values(values, f"{path}: {x}"), labels, model, f"{path}: {y}")


def load_csv(path: Path, model: ModelSpec) -> Samples:
    """A line a sample, see `hushfleet.data.csv_file`. Raises `BadInput`."""
    outputs = () if model.targets.are_classes else model.class_names
    values, labels, *_ = read_csv(path, input_shape=model.image_shape, outputs=outputs)
    return _fitting(values, labels, model, str(path))


def _fitting(values: np.ndarray, labels: np.ndarray, model: ModelSpec, where: str) -> Samples:
    if values.shape[1:] != model.image_shape:
        raise BadInput(f"{where}: samples of {list(values.shape[1:])}, the task wants {list(model.image_shape)}")
    labels = as_targets(labels, model.class_names, model.targets, count=len(values), where=where)
    return Samples(values, labels, model.mean, model.std, model.targets)


def _warn_of_another_unit(samples: Samples, path: Path) -> None:
    """Pixels in a wider type than uint8 are not divided by 255, and bytes always are: what the task subtracts may be of
    another unit. Said in the device's own log alone, since it follows from the values."""
    are_bytes, few = samples.images.dtype == np.uint8, samples.take(slice(_LOOKED_AT)).x
    distance = float(np.sqrt(np.square(few, dtype=np.float64).mean()))
    if distance > _FAR or (are_bytes and max(samples.mean) > 1):
        found = "uint8, which is read as pixels and divided by 255" if are_bytes else "taken as they are, not as pixels"
        _log.warning(
            "data.path = %r: the values are %s, and lie %.3g of the task's standard deviations from its mean %s. If "
            "that is another unit, save pixels of 0 to 255 as uint8, and values of sensors as float32",
            str(path), found, distance, list(samples.mean),
        )  # fmt: skip


def inputs_of(samples: Samples, features: FeatureGraph | None) -> LabelledSamples:
    """What the network takes of these images: features of them, where the task has some."""
    return samples if features is None else features.of(samples)


def blank_samples(model: ModelSpec, labels: np.ndarray) -> Samples | FeatureSamples:
    """Black images, or features of zero, with these labels."""
    if model.features is not None:
        return FeatureSamples(np.zeros((len(labels), *model.input_shape), np.float32), labels, model.targets)
    images = np.zeros((len(labels), *model.input_shape), np.uint8)
    return Samples(images, labels, model.mean, model.std, model.targets)


def load_indices(path: Path) -> np.ndarray | None:
    """Indices int64 `[n]` into the common test, of an .npz with `of_common`, a bit for each of its images.

    None for an .npz of images. Raises `BadInput`.
    """
    with opened(path) as arrays:
        return np.flatnonzero(np.unpackbits(arrays["of_common"])) if "of_common" in arrays else None


def _stamp(path: Path) -> Stamp:
    """Number of files, newest change (ns) and bytes in all; zeros where there is nothing."""
    if path.is_file():
        files = iter([str(path)])
    else:
        files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    count, newest, size = 0, 0, 0
    for file in files:
        with suppress(OSError):  # it was removed meanwhile
            status = os.stat(file)
            count, newest, size = count + 1, max(newest, status.st_mtime_ns), size + status.st_size
    return count, newest, size
