"""A device's own data: one sub-folder of images for each class.

    data/
        cat/0001.jpg ...
        dog/0001.png ...

Images of any size and mode are turned upright (EXIF), converted to the model's channels, and resized. What
cannot be read is skipped and named in one warning: a camera that lost power while writing leaves half files,
and they must not keep a device out of every round.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from hushfleet.data.images import read_image
from hushfleet.data.labels import one_form
from hushfleet.data.samples import DataSet, Samples
from hushfleet.errors import BadInput
from hushfleet.progress import counted

if TYPE_CHECKING:
    from typing import Unpack

MAX_NAMED = 5
"""How many skipped files a warning names; it gives the count of all."""

_log = logging.getLogger(__name__)


class ImageForm(TypedDict):
    """The images that a model takes.

    :param input_shape: (C, H, W); C is 1 (grey) or 3 (RGB).
    :param class_names: what labels 0, 1, ... mean; the names of the sub-folders.
    :param mean: per channel, of pixels scaled to 0..1.
    :param std: per channel, likewise.
    """

    input_shape: tuple[int, int, int]
    class_names: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]


def load_folder_set(path: Path, **form: Unpack[ImageForm]) -> DataSet:
    """Reads `path/train/<class>/*` and `path/test/<class>/*` as the data set `folder`.

    :param path: where only `test/` is present, the training part is empty: an aggregator in the field tests
        with public images and trains with none.
    :raises BadInput: no `test/`, or either part is one that `scan_folder` refuses.
    """
    if not (path / "test").is_dir():
        raise BadInput(f"{path} lacks the folder test/; put images into {path / 'test'}/<class>/, and train/ likewise")
    test = load_folder(path / "test", **form)
    train = load_folder(path / "train", **form) if (path / "train").is_dir() else test.take(slice(0, 0))
    return DataSet("folder", train, test, tuple(form["class_names"]))


def load_folder(path: Path, **form: Unpack[ImageForm]) -> Samples:
    """Reads a folder of images; logs one warning if files were skipped. See `scan_folder`."""
    samples, skipped = scan_folder(path, **form)
    if skipped:
        _log.warning("%d files in %s were skipped: %s", len(skipped), path, named(skipped))
    return samples


def named(skipped: Sequence[str]) -> str:
    """Names the first skipped files in one line, and the number of the others."""
    more = len(skipped) - MAX_NAMED
    return "; ".join([*skipped[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def files_below(folder: Path, *, data: Path) -> Iterator[str]:
    """The files in a folder, in its folders, and in those that it has links to.

    :param data: the whole data folder. A link to a folder in it or above it, or to one that another link leads to, is
        given in place of the files there: they are read elsewhere, and may be of another class.
    """
    whole, seen = os.path.realpath(data), set[str]()
    for top, names, files in os.walk(folder, followlinks=True):
        names.sort()  # which of two links is followed must not depend on the disk
        yield from (os.path.join(top, name) for name in files)
        for link in [each for name in names if os.path.islink(each := os.path.join(top, name))]:
            place = os.path.realpath(link)
            if place in seen or os.path.commonpath((place, whole)) in (place, whole):
                names.remove(os.path.basename(link))
                yield link
            seen.add(place)


def scan_folder(
    path: Path,
    *,
    lenient: bool = False,
    unfinished: Collection[str] = (),
    keep: Callable[[Path], bool] = lambda file: True,
    **form: Unpack[ImageForm],
) -> tuple[Samples, tuple[str, ...]]:
    """The readable images by class folder, then by file name, and `class/file: reason` for each that was not read.

    :param path: holds one sub-folder for each class; hidden files and folders are ignored, classes may be
        missing, and image files that lie outside a class folder count as skipped.
    :param lenient: images of no class of the task are skipped, and there may be no readable image at all.
    :param unfinished: files that are being written: they are not read, and not counted as skipped.
    :param keep: whether a file is looked at at all.
    :raises BadInput: no such folder, or, unless `lenient`, a sub-folder that is no class, or not one readable image.
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
    images: list[npt.NDArray[np.uint8]] = []
    labels: list[int] = []
    skipped: list[str] = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith((".", "__")):
            continue
        if not entry.is_dir():
            skipped.append(f"{entry.name}: not in a class folder")
            continue
        label = label_of.get(one_form(entry.name))
        if label is None:
            close = difflib.get_close_matches(entry.name, label_of, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            if lenient:
                left = (file.relative_to(path).as_posix() for file in sorted(entry.rglob("*")) if file.is_file())
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
            image = _read(file, input_shape)
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
    samples = Samples(
        np.stack(images) if images else np.empty((0, *input_shape), np.uint8),
        np.array(labels, dtype=np.int64),
        tuple(map(float, form["mean"])),
        tuple(map(float, form["std"])),
    )
    return samples, tuple(skipped)


def load_unlabelled(path: Path, *, most: int, **form: Unpack[ImageForm]) -> Samples:
    """Readable images in a folder and in the folders below it; all labels are 0, and say nothing.

    :param most: so many files are read, evenly of all by their names.
    """
    files = [file for file in sorted(map(Path, files_below(path, data=path))) if not file.name.startswith(".")]
    chosen = [files[place * len(files) // most] for place in range(most)] if len(files) > most else files
    read = (
        _read(file, form["input_shape"]) for file in counted(chosen, "reading unlabelled images", total=len(chosen))
    )
    images = [image for image in read if not isinstance(image, str)]
    pixels = np.stack(images) if images else np.empty((0, *form["input_shape"]), np.uint8)
    labels = np.zeros(len(images), np.int64)
    return Samples(pixels, labels, tuple(map(float, form["mean"])), tuple(map(float, form["std"])))


def _read(file: Path, input_shape: tuple[int, int, int]) -> npt.NDArray[np.uint8] | str:
    """The image, or why it is none."""
    if file.is_dir():
        return "a link to a folder that is read elsewhere"
    if file.is_fifo():  # to open it would wait for a writer, for ever
        return "it is a pipe"
    try:
        return read_image(file, input_shape=input_shape)
    except (BadInput, MemoryError) as error:  # of memory it takes as much as the file says
        cause = error.__cause__ or error
        return str(cause) or repr(cause)
