"""Reads a device's own data: one sub-folder of images, or of clips of sound, for each class.

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
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt

from hushfleet.data.form import NORMAL, one_form
from hushfleet.data.held_out import WITHOUT_TEST
from hushfleet.data.images import read_image, stacked, unit_pixels
from hushfleet.data.partition import stratified_choice
from hushfleet.data.samples import DataSet, Samples
from hushfleet.data.sound import Segments, SoundForm
from hushfleet.data.targets import CLASSES, Targets
from hushfleet.data.walk import check_name, files_below, named
from hushfleet.errors import BadInput
from hushfleet.progress import counted

if TYPE_CHECKING:
    from typing import NotRequired, Unpack

_ORDER_SEED = 0
_DATE = re.compile(r"(19|20)\d\d([-_.]?(0[1-9]|1[0-2])([-_.]?[0-3]\d)?)?")
_PART = re.compile(rf"{_DATE.pattern}|0[1-9]|[12]\d|3[01]")  # within a year or a month
_log = logging.getLogger(__name__)


class FileForm(TypedDict):
    """The form of the samples that a model takes from files: of images, or of clips of sound.

    :param input_shape: (C, H, W); C is 1 (grey) or 3 (RGB).
    :param class_names: the meaning of labels 0, 1, ...; the names of the sub-folders.
    :param mean: per channel, for pixels scaled to 0..1, or sound to -1..1.
    :param std: per channel, likewise.
    :param bit_depth: as in `pixels_of`; left out, 8.
    :param sound: of clips; None or left out: the files are images.
    :param targets: the kind of the labels; left out, classes. For a reconstruction a sub-folder `normal` and one for
        each kind of fault, in `class_names`.
    """

    bit_depth: NotRequired[int]
    sound: NotRequired[SoundForm | None]
    targets: NotRequired[Targets]
    input_shape: tuple[int, int, int]
    class_names: Sequence[str]
    mean: Sequence[float]
    std: Sequence[float]


def load_folder_set(path: Path, *, by_device: bool = False, **form: Unpack[FileForm]) -> DataSet:
    """Reads `path/train/<class>/*` and `path/test/<class>/*` as a data set. Without `test/`, a fifth of the training
    part is held out, which may also be in `path/<class>/*`.

    :param path: if it has only `test/`, the training part is empty: an aggregator in the field tests with public
        images and has no training images.
    :param by_device: whether the training part is in `<device>/<class>/*`; the test part may be so, too.
    :param form: without names of classes, they are those of the folders.
    :raises BadInput: no such folders, or `scan_folder` refuses one of the parts.
    """
    has_train, has_test = ((path / part).is_dir() for part in ("train", "test"))
    first = path / "train" if has_train else path / "test" if has_test else path
    if not (found := _folders(first)):
        raise BadInput(f"{path} lacks the folder test/; put files into {path / 'test'}/<class>/, and train/ likewise")
    if not form["class_names"]:
        form["class_names"] = sorted({name for top in found for name in _folders(first / top)} if by_device else found)
    form["class_names"] = tuple(map(one_form, form["class_names"]))
    devices = tuple(found) if by_device else ()
    whole, owners = _load_part(first, devices, form)
    if has_train and has_test:
        train, (test, test_owners) = whole, _load_part(path / "test", devices, form)
    elif has_test:
        train, test, test_owners = whole.take(slice(0, 0)), whole, None
    else:
        records, rng = whole.records[0], np.random.default_rng(_ORDER_SEED)
        strata = whole.labels[records] if whole.targets.are_classes else np.zeros(len(records), np.int64)
        chosen = stratified_choice(strata, round(WITHOUT_TEST * len(records)), rng)
        is_test = np.isin(whole.records[1], chosen)
        train, test, test_owners = whole.take(np.flatnonzero(~is_test)), whole.take(np.flatnonzero(is_test)), None
        owners = None if owners is None else owners[~is_test]
    if len(train) and train.images.dtype != test.images.dtype:  # only one part has images with 16 bits
        train, test = (replace(part, images=unit_pixels(part.images)) for part in (train, test))
    return DataSet(
        "folder", train, test, tuple(form["class_names"]), owners, test_owners, (), has_train and has_test, devices
    )


def class_places(path: Path) -> tuple[list[Path], list[str]]:
    """Returns the folders that have class folders, and the names of the classes.

    It is `path` itself; but if its sub-folders have only folders whose names repeat, it is these, as in
    DEVICE/CLASS or train/CLASS. A date with files in it is no class: CLASS/2026-11-29 and CLASS/2026/11/29 have their
    classes outside.
    """
    places = [path]
    for _ in range(5):  # links may make it endless; DEVICE/2026/11/29/CLASS needs them
        below = [place / name for place in places for name in _folders(place)]
        inner = [each / name for each in below for name in _folders(each)]
        names = {each.name for each in inner}
        if len(names) == len(inner) or _have_files(below) or all(map(_is_date, inner)):
            break
        places = below
    return places, sorted({name for place in places for name in _folders(place)})


def _is_date(folder: Path, name: re.Pattern[str] = _DATE) -> bool:
    """Returns whether the name is a date, and all files are in this folder, or in those of its months or days."""
    is_last = _have_files([folder])
    return bool(name.fullmatch(folder.name)) and (is_last or all(_is_date(folder / n, _PART) for n in _folders(folder)))


def _have_files(folders: Sequence[Path]) -> bool:
    return any(file.is_file() and file.name[0] != "." for each in folders for file in each.iterdir())


def _folders(path: Path) -> list[str]:
    """Returns the names of the sub-folders that are not hidden, sorted."""
    found = path.iterdir() if path.is_dir() else ()
    return sorted(each.name for each in found if each.is_dir() and not each.name.startswith((".", "__")))


def label_folders(form: FileForm) -> tuple[str, ...]:
    """Returns the names of the class folders, in the order of the labels."""
    names = tuple(map(one_form, form["class_names"]))
    return (NORMAL, *names) if form.get("targets", CLASSES).are_inputs else names


def _load_part(place: Path, devices: Sequence[str], form: FileForm) -> tuple[Samples, npt.NDArray[np.int64] | None]:
    """Returns the samples of a part, and the device of each; None if they are in folders of classes.

    :param devices: the names of all devices; -1 stands for another.
    """
    found = _folders(place)
    if not devices or set(map(one_form, found)) <= set(label_folders(form)):
        return load_folder(place, **form), None
    parts = [load_folder(place / name, **form) for name in found]
    number = {name: place for place, name in enumerate(devices)}
    owners = np.repeat([number.get(name, -1) for name in found], list(map(len, parts))).astype(np.int64)
    return joined(parts), owners


def joined(parts: Sequence[Samples]) -> Samples:
    """Returns the samples of several folders with the same form."""
    images = [each.images for each in parts]
    same = images if len({each.dtype for each in images}) == 1 else list(map(unit_pixels, images))
    clips, before = [], 0
    for each in parts:
        clips.append(each.records[1] + before)
        before += len(each.records[0])
    return replace(
        parts[0],
        images=images[0].joined(images[1:]) if isinstance(images[0], Segments) else np.concatenate(same),
        labels=np.concatenate([each.labels for each in parts]),
        clips=None if parts[0].clips is None else np.concatenate(clips),
    )


def load_folder(path: Path, **form: Unpack[FileForm]) -> Samples:
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
    **form: Unpack[FileForm],
) -> tuple[Samples, tuple[str, ...]]:
    """Returns the readable images or clips by class folder, then by file name, and `class/file: reason` for each other
    file.

    :param path: has one sub-folder for each class; hidden files and folders are ignored, classes may be
        missing, and files outside a class folder count as skipped.
    :param lenient: images in a folder that is no class of the task are skipped, and no readable image is needed.
    :param unfinished: files that are still being written: they are not read, and not counted as skipped.
    :param keep: whether to read a file at all.
    :raises BadInput: no such folder, or, unless `lenient`, a sub-folder that is no class, or no readable image.
    """
    input_shape, class_names, what = form["input_shape"], label_folders(form), _noun(form)
    channels = input_shape[0]
    if channels not in (1, 3):
        raise BadInput(
            f"the task's input_shape {list(input_shape)} begins with {channels} channels, and images have 1 (grey) "
            "or 3 (colour); its order is channels, height, width"
        )
    if not os.path.isdir(path):
        raise BadInput(f"the data folder {path} does not exist or is not a folder")
    label_of = {name: label for label, name in enumerate(class_names)}
    found: list[npt.NDArray[Any]] = []
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
        for file in counted(files, f"reading {what}s of {entry.name}", total=len(files)):
            if any(part.startswith(".") for part in file.relative_to(entry).parts) or not keep(file):
                continue
            one = _read(file, form)
            if isinstance(one, str):
                skipped.append(f"{file.relative_to(path).as_posix()}: {one}")
            else:
                found.append(one)
                labels.append(label)
    if not found and not lenient:
        raise BadInput(
            f"{path} holds no readable {what} in a class folder"
            + (f"; of {len(skipped)} files none can be used: {named(skipped)}" if skipped else "")
            + f"; put {what}s into {path}/<class>/, the classes are {', '.join(class_names)}"
        )
    return _samples(found, labels, form), tuple(skipped)


def load_unlabelled(path: Path, *, most: int, has_classes: bool = False, **form: Unpack[FileForm]) -> Samples:
    """Returns the readable images or clips in a folder and its sub-folders, and logs the others. All labels are 0,
    without a meaning.

    :param most: the maximum number of files to read, evenly spaced in the order of their names.
    :param has_classes: each sub-folder has a label of its own.
    """
    files = [file for file in sorted(map(Path, files_below(path, data=path))) if not file.name.startswith(".")]
    chosen = [files[place * len(files) // most] for place in range(most)] if len(files) > most else files
    found, skipped, labels = list[npt.NDArray[Any]](), list[str](), list[int]()
    names = sorted({file.relative_to(path).parent.parts[:1] for file in chosen})
    for file in counted(chosen, f"reading unlabelled {_noun(form)}s", total=len(chosen)):
        one = _read(file, form)
        if isinstance(one, str):
            skipped.append(f"{file.relative_to(path).as_posix()}: {one}")
        else:
            found.append(one)
            labels.append(names.index(file.relative_to(path).parent.parts[:1]) if has_classes else 0)
    if skipped:
        _log.warning("%d unlabelled files in %s are left out: %s", len(skipped), path, named(skipped))
    return _samples(found, labels, form)


def load_files(files: Sequence[tuple[Path, int]], form: FileForm, *, where: str) -> Samples:
    """Returns the samples of these files with their labels. Raises `BadInput` if one is broken, or there is none.

    :param where: the name of the files for the error.
    """
    found = [_read(file, form) for file, _ in counted(files, f"reading {_noun(form)}s", total=len(files))]
    for (file, _), one in zip(files, found, strict=True):
        if isinstance(one, str):
            raise BadInput(f"{file}: {one}")
    if not found:
        raise BadInput(f"{where} has no {_noun(form)}")
    return _samples(found, [label for _, label in files], form)


def _noun(form: FileForm) -> str:
    return "clip" if form.get("sound") else "image"


def _samples(found: Sequence[npt.NDArray[Any]], labels: Sequence[int], form: FileForm) -> Samples:
    """:param found: of each file: an image `[C, H, W]`, or the segments of a clip."""
    mean, std = (tuple(map(float, given)) for given in (form["mean"], form["std"]))
    targets = form.get("targets", CLASSES)
    each: npt.NDArray[Any] = np.array(labels, np.int64)
    if targets.are_inputs:  # a column for each kind of fault
        each = (each[:, None] == np.arange(1, 1 + len(form["class_names"]))).astype(np.float32)
    if (sound := form.get("sound")) is not None:
        counts, segments = list(map(len, found)), sound.joined(found, form["input_shape"][2])
        clips = np.repeat(np.arange(len(found)), counts)
        return Samples(segments, np.repeat(each, counts, axis=0), mean, std, targets, clips)
    pixels = stacked(found) if found else np.empty((0, *form["input_shape"]), np.uint8)
    return Samples(pixels, each, mean, std, targets)


def _read(file: Path, form: FileForm) -> Any:
    """Returns the image, or the segments of the clip, or a text that says why it cannot be read."""
    if os.path.isdir(file):
        return "a link to a folder that is read elsewhere"
    try:
        if (sound := form.get("sound")) is not None:
            check_name(file.name, "sound")
            return sound.read(file, form["input_shape"][2])
        check_name(file.name)
        return read_image(file, input_shape=form["input_shape"], bit_depth=form.get("bit_depth", 8))
    except (BadInput, MemoryError) as error:  # the file's header decides how much memory is needed
        cause = error.__cause__ or error
        return str(cause) or repr(cause)
