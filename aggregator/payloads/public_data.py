"""Loads a task's public data set, and its public samples, normalised in the same way as on its devices;
without PyTorch, for many processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.aggregator.config.task import Task
from hushfleet.data.samples import DataSet, Samples
from hushfleet.errors import BadInput

LEAST, MOST = 16, 2000
"""The numbers of public samples: at least; at most, evenly spaced, are read."""
PUBLIC = (
    "samples determine the directions of the shared head. These samples are taken as public: whoever "
    "receives the task can learn from its features about them"
)


def load_public(task: Task, data_dir: Path | None) -> DataSet:
    """Returns the data set that the task names, one of `PUBLIC_DATA`."""
    from hushfleet.data.sets import load

    dataset = load(task.data.name, data_dir=data_dir)
    if not task.model.takes_pixels:
        return dataset
    mean, std = normalisation(task, dataset.input_shape[0])
    train, test = (replace(part, mean=mean, std=std) for part in (dataset.train, dataset.test))
    return replace(dataset, train=train, test=test)


def normalisation(task: Task, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns mean and deviation for data sets without their own: pixels in [0, 1], other values unchanged."""
    if task.data.mean:
        return task.data.mean, task.data.std
    return (0.0,) * channels, (1.0,) * channels


def public_samples(
    task: Task, path: Path, shape: tuple[int, int, int], mean: Sequence[float], std: Sequence[float]
) -> Samples:
    """Returns the samples of `model.public`, normalised as the task's own. Without `model.public_classes` labels are 0.

    :param path: a folder of images or sound, or an .npz file with `train_x`.

    Raises `BadInput`.
    """
    normal: dict[str, Any] = {"mean": mean, "std": std}
    where, has_classes = f"model.public = {str(path)!r}", task.model.public_classes
    if path.suffix == ".npz":
        from hushfleet.data.arrays import load_arrays
        from hushfleet.data.records import fitted

        arrays = load_arrays(path)
        if (x := arrays.train_x) is None:
            raise BadInput(f"{where} has no array train_x; numpy.savez({path.name!r}, train_x=...) writes one")
        every = slice(None, None, max(1, -(-len(x) // MOST)))
        some, y = np.asarray(x)[every], np.zeros(len(x)) if arrays.train_y is None else np.asarray(arrays.train_y)
        classes, labels = np.unique(y[every] if has_classes else 0 * np.arange(len(some)), return_inverse=True)
        names = tuple(map(str, range(max(2, len(classes)))))
        rules: dict[str, Any] = {"form": task.data.form, "shape": shape, "where": (f"{where}: train_x",) * 2}
        found = fitted(some, labels, names, **rules, **normal)
    else:
        from hushfleet.data.folder import load_unlabelled
        from hushfleet.data.sound import SoundForm

        sound = SoundForm.of(task.data.form, one_a_clip=task.privacy.unit == "record")
        if shape[1] == 1 and sound is None:
            raise BadInput(f"{where}: the task's samples are no images or sound; give an .npz file with train_x")
        form: dict[str, Any] = {
            "input_shape": shape,
            "class_names": (),
            "bit_depth": task.data.bit_depth or 8,
            "sound": sound,
        }
        found = load_unlabelled(path, most=MOST, has_classes=has_classes, **form, **normal)
    if len(found) < LEAST or found.images.shape[1:] != tuple(shape):
        raise BadInput(
            f"{where} has {len(found)} samples of {list(found.images.shape[1:])}; at least {LEAST} of {list(shape)} "
            "are needed"
        )
    if has_classes and len(np.unique(found.labels)) < 2:
        raise BadInput(
            f"{where}: public_classes = true needs two classes, as sub-folders, or as train_y in an .npz file"
        )
    return found
