"""Reads a device's own data: one sub-folder of images for each class.

    data/
        cat/0001.jpg ...
        dog/0001.png ...

Images of any size and mode are turned upright (EXIF), converted to the model's channels, and resized. Files
that cannot be read are skipped and named in one warning: a camera that loses power while writing leaves
incomplete files, and these must not exclude a device from every round. So are files without an image's ending
(`hushfleet.data.walk.ENDINGS`), which `data.keep` never deletes.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from hushfleet.data.form import one_form
from hushfleet.data.images import read_image, stacked, unit_pixels
from hushfleet.data.samples import DataSet, Samples
from hushfleet.data.walk import check_name, files_below, named
from hushfleet.errors import BadInput
from hushfleet.progress import counted

if TYPE_CHECKING:
    from typing import NotRequired, Unpack

_log = logging.getLogger(__name__)


class ImageForm(TypedDict):
    """The form of images that a model takes.

    :param input_shape: (C, H, W); C is 1 (grey) or 3 (RGB).
    :param class_names: the meaning of labels 0, 1, ...; the names of the sub-folders.
    :param mean: per channel, for pixels scaled to 0..1.
    :param std: per channel, likewise.
    :param bit_depth: as in `pixels_of`; left out, 8.
    """

    bit_depth: NotRequired[int]
    input_shape: tuple[int, int, int]
    class_names: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]


def load_folder_set(path: Path, **form: Unpack[ImageForm]) -> DataSet:
    """Reads `path/train/<class>/*` and `path/test/<class>/*` as the data set `folder`.

    :param path: if it has only `test/`, the training part is empty: an aggregator in the field tests with public
        images and has no training images.
    :raises BadInput: no `test/`, or `scan_folder` refuses one of the parts.
    """
    if not (path / "test").is_dir():
        raise BadInput(f"{path} lacks the folder test/; put images into {path / 'test'}/<class>/, and train/ likewise")
    test = load_folder(path / "test", **form)
    train = load_folder(path / "train", **form) if (path / "train").is_dir() else test.take(slice(0, 0))
    if len(train) and train.images.dtype != test.images.dtype:  # only one part has images with 16 bits
        train, test = (replace(part, images=unit_pixels(part.images)) for part in (train, test))
    return DataSet("folder", train, test, tuple(form["class_names"]), has_test=len(train) > 0)


def load_folder(path: Path, **form: Unpack[ImageForm]) -> Samples:
    """Reads a folder of images; logs one warning if files were skipped. See `scan_folder`."""
    samples, skipped = scan_folder(path, **form)
    if skipped:
        _log.warning("%d files in %s were skipped: %s", len(skipped), path, named(skipped))
    return samples


def scan_folder(
    path: Path,
    *,
    lenient: bool = False,
    unfinished: Collection[str] = (),
    keep: Callable[[Path], bool] = lambda file: True,
    **form: Unpack[ImageForm],
) -> tuple[Samples, tuple[str, ...]]:
    """Returns the readable images by class folder, then by file name, and `class/file: reason` for each other file.

    :param path: has one sub-folder for each class; hidden files and folders are ignored, classes may be
        missing, and files outside a class folder count as skipped.
    :param lenient: images in a folder that is no class of the task are skipped, and no readable image is needed.
    :param unfinished: files that are still being written: they are not read, and not counted as skipped.
    :param keep: whether to read a file at all.
    :raises BadInput: no such folder, or, unless `lenient`, a sub-folder that is no class, or no readable image.
    """
    input_shape, class_names = form["input_shape"], form["class_names"]
    channels = input_shape[0]
    if channels not in (1, 3):
        raise BadInput(
            f"the task's input_shape {list(input_shape)} begins with {channels} channels, and images have 1 (grey) "
            "or 3 (colour); its order is channels, height, width"
        )
    if not os.path.isdir(path):
        raise BadInput(f"the data folder {path} does not exist or is not a folder")
    label_of = {one_form(name): label for label, name in enumerate(class_names)}
    images: list[npt.NDArray[Any]] = []
    labels: list[int] = []
    skipped: list[str] = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith((".", "__")):
            continue
        if not os.path.isdir(entry):  # `Path.is_dir` raises an error for a link that cannot be followed
            skipped.append(f"{entry.name}: not in a class folder")
            continue
        label = label_of.get(one_form(entry.name))
        if label is None:
            close = difflib.get_close_matches(entry.name, label_of, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            if lenient:
                left = (Path(file).relative_to(path).as_posix() for file in sorted(files_below(entry, data=path)))
                skipped += (f"{name}: its folder is not a class of this task{hint}" for name in left)
                continue
            raise BadInput(
                f"{path} has the sub-folder {entry.name!r}, which is not a class of this task{hint}; "
                f"the classes are {', '.join(class_names)}"
            )
        files = sorted(Path(file) for file in files_below(entry, data=path) if file not in unfinished)
        for file in counted(files, f"reading images of {entry.name}", total=len(files)):
            if any(part.startswith(".") for part in file.relative_to(entry).parts) or not keep(file):
                continue
            image = _read(file, form)
            if isinstance(image, str):
                skipped.append(f"{file.relative_to(path).as_posix()}: {image}")
            else:
                images.append(image)
                labels.append(label)
    if not images and not lenient:
        raise BadInput(
            f"{path} holds no readable image in a class folder"
            + (f"; of {len(skipped)} files none can be used: {named(skipped)}" if skipped else "")
            + f"; put images into {path}/<class>/, the classes are {', '.join(class_names)}"
        )
    return _samples(images, labels, form), tuple(skipped)


def load_unlabelled(path: Path, *, most: int, **form: Unpack[ImageForm]) -> Samples:
    """Returns the readable images in a folder and its sub-folders, and logs the others. All labels are 0, without a
    meaning.

    :param most: the maximum number of files to read, evenly spaced in the order of their names.
    """
    files = [file for file in sorted(map(Path, files_below(path, data=path))) if not file.name.startswith(".")]
    chosen = [files[place * len(files) // most] for place in range(most)] if len(files) > most else files
    images, skipped = list[npt.NDArray[Any]](), list[str]()
    for file in counted(chosen, "reading unlabelled images", total=len(chosen)):
        image = _read(file, form)
        if isinstance(image, str):
            skipped.append(f"{file.relative_to(path).as_posix()}: {image}")
        else:
            images.append(image)
    if skipped:
        _log.warning("%d unlabelled files in %s are left out: %s", len(skipped), path, named(skipped))
    return _samples(images, [0] * len(images), form)


def _samples(images: Sequence[npt.NDArray[Any]], labels: Sequence[int], form: ImageForm) -> Samples:
    pixels = stacked(images) if images else np.empty((0, *form["input_shape"]), np.uint8)
    mean, std = (tuple(map(float, given)) for given in (form["mean"], form["std"]))
    return Samples(pixels, np.array(labels, np.int64), mean, std)


def _read(file: Path, form: ImageForm) -> npt.NDArray[Any] | str:
    """Returns the image, or a text that says why it cannot be read."""
    if os.path.isdir(file):
        return "a link to a folder that is read elsewhere"
    try:
        check_name(file.name)
        return read_image(file, input_shape=form["input_shape"], bit_depth=form.get("bit_depth", 8))
    except (BadInput, MemoryError) as error:  # the file's header decides how much memory is needed
        cause = error.__cause__ or error
        return str(cause) or repr(cause)
