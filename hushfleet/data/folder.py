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
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from hushfleet.data.samples import DataSet, Samples
from hushfleet.errors import BadInput
from hushfleet.progress import counted

if TYPE_CHECKING:
    from typing import Unpack

MAX_NAMED = 5
"""How many skipped files a warning names; it gives the count of all."""

_log = logging.getLogger(__name__)


class ImageForm(TypedDict):
    """What a model takes.

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
    """The first of them in one line, and how many more there are."""
    more = len(skipped) - MAX_NAMED
    return "; ".join([*skipped[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])])


def scan_folder(path: Path, *, lenient: bool = False, **form: Unpack[ImageForm]) -> tuple[Samples, tuple[str, ...]]:
    """The readable images by class folder, then by file name, and `class/file: reason` for each that was not read.

    :param path: holds one sub-folder for each class; hidden files and folders are ignored, classes may be
        missing, and image files that lie outside a class folder count as skipped.
    :param lenient: images of no class of the task are skipped, and there may be no readable image at all.
    :raises BadInput: no such folder, or, unless `lenient`, a sub-folder that is no class, or not one readable image.
    """
    input_shape, class_names = form["input_shape"], form["class_names"]
    channels = input_shape[0]
    if channels not in (1, 3):
        raise BadInput(f"the model takes {channels} channels; images can give 1 (grey) or 3 (RGB)")
    if not path.is_dir():
        raise BadInput(f"the data folder {path} does not exist or is not a folder")
    label_of = {name: label for label, name in enumerate(class_names)}
    images: list[npt.NDArray[np.uint8]] = []
    labels: list[int] = []
    skipped: list[str] = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith((".", "__")):
            continue
        if not entry.is_dir():
            skipped.append(f"{entry.name}: not in a class folder")
            continue
        if entry.name not in label_of:
            close = difflib.get_close_matches(entry.name, label_of, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            if lenient:
                left = (file.relative_to(path).as_posix() for file in sorted(entry.rglob("*")) if file.is_file())
                skipped += (f"{name}: its folder is no class of this task{hint}" for name in left)
                continue
            raise BadInput(
                f"{path} has the sub-folder {entry.name!r}, which is no class of this task{hint}; "
                f"the classes are {', '.join(class_names)}"
            )
        files = sorted(entry.rglob("*"))
        for file in counted(files, f"reading images of {entry.name}", total=len(files)):
            if file.is_dir() or any(part.startswith(".") for part in file.relative_to(entry).parts):
                continue
            if file.is_fifo():  # to open it would wait for a writer, for ever
                skipped.append(f"{file.relative_to(path).as_posix()}: it is a pipe")
                continue
            try:
                images.append(read_image(file, input_shape=input_shape))
            except (BadInput, MemoryError) as error:  # of memory it takes as much as the file says
                skipped.append(f"{file.relative_to(path).as_posix()}: {error.__cause__ or error!r}")
            else:
                labels.append(label_of[entry.name])
    if not images and not lenient:
        raise BadInput(
            f"{path} holds no readable image in a class folder ({len(skipped)} files skipped); "
            f"put images into {path}/<class>/, the classes are {', '.join(class_names)}"
        )
    samples = Samples(
        np.stack(images) if images else np.empty((0, *input_shape), np.uint8),
        np.array(labels, dtype=np.int64),
        tuple(map(float, form["mean"])),
        tuple(map(float, form["std"])),
    )
    return samples, tuple(skipped)


def pillow() -> Any:
    """The package PIL. Raises `BadInput` where it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise BadInput("reading images needs Pillow: pip install pillow") from error
    return PIL


def read_image(file: Path, *, input_shape: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
    """One image, uint8 `[C, H, W]`. Raises `BadInput` that names the file and the reason."""
    channels, height, width = input_shape
    pil = pillow()
    try:
        with warnings.catch_warnings():
            # An image of more pixels than Pillow thinks sane would take more memory than a board has.
            warnings.simplefilter("error", pil.Image.DecompressionBombWarning)
            with pil.Image.open(file) as opened:
                # JPEG decodes at a half, quarter or eighth of its size at a fraction of the time and memory.
                opened.draft("L" if channels == 1 else "RGB", (2 * width, 2 * height))
                image = pil.ImageOps.exif_transpose(opened)
                if image.mode.startswith("I;16"):  # Pillow would cut 16-bit values off at 255
                    image = pil.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                elif image.mode in ("I", "F"):
                    raise ValueError(f"pixels of mode {image.mode!r} have no largest value; save 8 or 16 bits")
                image = image.convert("L" if channels == 1 else "RGB")
                if image.size != (width, height):
                    image = image.resize((width, height), pil.Image.Resampling.LANCZOS)
                pixels = np.asarray(image)
    except MemoryError:
        raise
    except Exception as error:  # broken images fail in many ways: OSError, SyntaxError, struct.error, ...
        raise BadInput(f"{file} cannot be read as an image: {type(error).__name__}: {error}") from error
    return pixels[None].copy() if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
