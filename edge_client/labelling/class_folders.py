"""Manages the folders of a board's labelled images or clips of sound: lists the classes, and adds files.

An image appears in its folder complete or not at all, under a name that is not in use. Two processes that add images
wait for each other. An image whose content is already there is not added twice.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet import atomic_file
from hushfleet.at_need import at_need
from hushfleet.data.form import NORMAL, SAMPLE_RATE, one_form
from hushfleet.data.images import read_image
from hushfleet.data.walk import check_name, files_below
from hushfleet.edge_client.board.config import DeviceConfig, OwnDataSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, StoreFull
from hushfleet.paths import is_closed, no_file
from hushfleet.wire.format.spec import TaskSpec

if TYPE_CHECKING:
    from hushfleet.data import sound
else:
    sound = at_need("hushfleet.data.sound")

AS_THE_CLIENT = "run the command as the client's user, as in sudo -u hushfleet"
_LOOKED_AT = (3, 16, 16)  # a picture is decoded to this size to see whether it can be


class AlreadyThere(BadInput):
    """An image with the same content is already among the board's images."""


@contextlib.contextmanager
def opened_store(config: DeviceConfig) -> Iterator[DeviceStore | None]:
    """Opens the store read-only beside a running client; yields None if the client has never run."""
    if not os.path.exists(config.store_path) and not is_closed(config.store_path):
        yield None
        return
    in_fleet = config.fleet is not None
    with DeviceStore(config.store_path, device=config.device.id, inspect=True, in_fleet=in_fleet) as store:
        yield store


def class_names(config: DeviceConfig, store: DeviceStore | None) -> tuple[str, ...]:
    """Returns the labels that a person may give: the classes of the task, or before the first task the sub-folders of
    `data.path`.

    Raises `BadInput` if images have no classes here, or if no class is known yet.
    """
    data = config.data
    if data.kind not in ("folder", "sound"):
        raise BadInput(f"data.kind = {data.kind!r}: labels are given to images or sound; kind = 'folder' or 'sound'")
    if (spec := _task(store)) is not None:
        names, targets = spec.model.class_names, spec.model.targets
        if not (targets.are_classes or targets.are_inputs):
            raise BadInput(f"the task {spec.task} predicts numbers, and its images have no classes")
        names = (NORMAL, *names) if targets.are_inputs else names
        return tuple(name for name in map(one_form, names) if can_be_a_folder(name))
    if not os.path.isdir(data.path):
        raise BadInput(f"data.path = {data.path!r}: there is no such folder")
    folders = (entry.name for entry in os.scandir(data.path) if os.path.isdir(entry))
    if not (names := tuple(filter(can_be_a_folder, sorted(map(one_form, folders))))):
        raise BadInput(f"no classes are known yet: make a folder for each in {data.path}, or wait for the first task")
    return names


def sample_rate(store: DeviceStore | None) -> int:
    """Returns the rate, Hz, at which the task hears sound; before the first task the one of a task that names none."""
    spec = _task(store)
    return (spec and spec.model.form.sample_rate) or SAMPLE_RATE


def check_label(label: str, classes: Sequence[str]) -> str:
    """Returns the label in the spelling of the classes. Raises `BadInput` with the list of classes for any other."""
    if (label := one_form(label)) in classes:
        return label
    close = difflib.get_close_matches(label, classes, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise BadInput(f"label {label!r} is no class here{hint}; the classes are {', '.join(classes)}")


def check_sample(file: Path, kind: str, rate: int) -> None:
    """Raises `BadInput` if a file cannot be read, or has no ending of its kind: the client would not train on it.

    :param kind: as `OwnDataSection.kind`.
    :param rate: as `sample_rate`.
    """
    what = "sound" if kind == "sound" else "an image"
    try:
        check_name(file.name, kind)
    except BadInput as error:
        raise BadInput(f"{file} cannot be read as {what}: {error}") from error
    try:
        if kind == "sound":
            sound.read_clip(file, rate)
        else:
            read_image(file, input_shape=_LOOKED_AT)
    except MemoryError as error:
        raise BadInput(f"{file} cannot be read as {what}: it needs more memory than there is") from error


def check_inbox(data: OwnDataSection) -> Path:
    """Returns the folder of samples that wait for a label. Raises `BadInput` if there is none."""
    if data.inbox is None:
        raise BadInput(
            'DEVICE.toml names no folder of samples that wait for a label; write inbox = "/path/to/inbox" into [data]'
        )
    if not os.path.isdir(data.inbox):
        wrong = "there is no such folder; make it"
        if is_closed(data.inbox):
            wrong = f"a folder above it is closed to this user; {AS_THE_CLIENT}"
        raise BadInput(f"data.inbox = {data.inbox!r}: {wrong}")
    return Path(data.inbox)


def _task(store: DeviceStore | None) -> TaskSpec | None:
    package = store.blob(store.task_digest) if store is not None and store.task_digest else None
    return None if package is None else TaskSpec.from_bytes(package)


def can_be_a_folder(name: str) -> bool:
    """Returns whether a class name can name a folder of training images; the names come from the aggregator."""
    return bool(name) and not name.startswith((".", "__")) and "/" not in name and name.isprintable()


class ClassFolders:
    """The class folders of a board.

    :param section: where the images or clips are.
    :param rate: as `sample_rate`.
    """

    def __init__(self, section: OwnDataSection, *, rate: int = SAMPLE_RATE) -> None:
        self._kind, self._rate, self._path = section.kind, rate, Path(section.path)
        self._held_out = None if section.held_out is None else Path(section.held_out)

    def add(self, photo: Path, label: str) -> Path:
        """Copies a picture into the folder of its class, and returns its path.

        Raises `BadInput` if it is no readable picture or cannot be written, and `AlreadyThere`.
        """
        if os.path.isdir(photo):
            raise BadInput(f"{photo} is a folder; name its files: {photo}/*")
        check_sample(photo, self._kind, self._rate)
        with self._alone(), _plainly(f"{photo} cannot be added"):
            data = photo.read_bytes()
            self._refuse_known(photo, data, label)
            return write_new(data, self.folder(label), photo.name)

    def take_in(self, image: Path, label: str) -> Path:
        """Moves an image into the folder of its class, and returns its path; raises the same errors as `add`."""
        with self._alone(), _plainly(f"{image} cannot be moved"):
            self._refuse_known(image, image.read_bytes(), label)
            return move(image, self.folder(label))

    def known(self, image: Path) -> list[Path]:
        """Returns the files of class folders that have the content of an image."""
        with _plainly(f"{image} cannot be read"):
            return [file for _, file in self._known(image.read_bytes())]

    def correct(self, image: Path, label: str) -> list[tuple[Path, Path]]:
        """Moves the files that have the content of an image, and lie in other classes, into the folder of this class.

        :returns: the former and the present path of each.
        """
        with self._alone(), _plainly(f"{image} cannot be labelled"):
            known = list(self._known(image.read_bytes()))
            others = [(place, file) for place, file in known if _class_of(file, place) != label]
            return [(file, move(file, self.folder(label, place))) for place, file in others if not file.is_symlink()]

    def folder(self, label: str, place: Path | None = None) -> Path:
        """Returns the folder of a class, and creates it if it does not exist.

        :param place: the folder of class folders; None: the one that is trained on.
        """
        place = place or self._path
        for entry in os.scandir(place):
            if one_form(entry.name) == label:  # the disk may encode an accent in another way
                return place / entry.name
        return _made(place / label)

    def _refuse_known(self, image: Path, data: bytes, label: str) -> None:
        for place, file in self._known(data):
            whose = "held out, and never trained on" if place == self._held_out else "trained on"
            words = f"{image.name} is there already ({whose}): {file}"
            if _class_of(file, place) != label:
                words += f"; if it is {label}, move that file into {place / label}"
            raise AlreadyThere(words)

    def _known(self, data: bytes) -> Iterator[tuple[Path, Path]]:
        """Yields the files that have this content, each after the folder of class folders that it is in."""
        for place in (self._path, self._held_out):
            for file in () if place is None or not place.is_dir() else files_below(place, data=place):
                with contextlib.suppress(OSError):  # it was removed meanwhile
                    is_alike = not no_file(file) and os.stat(file).st_size == len(data)
                    if is_alike and Path(file).read_bytes() == data:
                        assert place is not None
                        yield place, Path(file)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with _plainly(f"data.path = {str(self._path)!r} cannot be used"):
            handle = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _class_of(file: Path, place: Path) -> str:
    return one_form(file.relative_to(place).parts[0])


def move(image: Path, folder: Path, name: str = "") -> Path:
    """Moves an image into a folder, also on another disk, under a name, its own if none is given, or a similar one that
    is free. Raises `BadInput`."""
    with _plainly(f"{image} cannot be moved"):
        _made(folder)
        data, times = image.read_bytes(), os.stat(image)
        target = _free_name(folder, name or image.name, data)
        try:
            os.rename(image, target)
            atomic_file.sync_folder(folder)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            os.utime(_write(data, target), ns=(times.st_atime_ns, times.st_mtime_ns))
            image.unlink()
        return target


def write_new(data: bytes, folder: Path, name: str) -> Path:
    """Writes a file into a folder, which is created, under this or a similar free name. Raises `BadInput`."""
    with _plainly(f"{folder / name} cannot be written"):
        return _write(data, _free_name(_made(folder), name, data))


def _free_name(folder: Path, name: str, data: bytes) -> Path:
    """Returns an unused path in the folder; adds a part of the content's hash if the name is taken."""
    target = folder / name.lstrip(".")
    if os.path.lexists(target):
        target = target.with_name(f"{target.stem}-{hashlib.sha256(data).hexdigest()[:16]}{target.suffix}")
    return target


def _made(folder: Path) -> Path:
    """Creates the folder and its parents if it does not exist."""
    if not folder.is_dir():
        _made(folder.parent)
        folder.mkdir(exist_ok=True)
        _belongs_to(folder.parent, folder)
    return folder


def _write(data: bytes, target: Path) -> Path:
    hidden = target.with_name(f".{hashlib.sha256(data).hexdigest()[:16]}")  # the client ignores hidden files
    try:
        atomic_file.write_whole(hidden, data, durable=True, mode=0o644)
    except StoreFull as error:
        raise StoreFull(str(error).replace(str(hidden), str(target))) from error
    _belongs_to(target.parent, hidden)
    os.rename(hidden, target)
    atomic_file.sync_folder(target.parent)
    return target


def _belongs_to(folder: Path, made: Path) -> None:
    """Gives a file that root has created to the owner of the folder, so that the client may read and delete it."""
    if os.geteuid() == 0:
        status = os.stat(folder)
        os.chown(made, status.st_uid, status.st_gid, follow_symlinks=False)


@contextlib.contextmanager
def _plainly(what: str) -> Iterator[None]:
    """Turns an `OSError` into a `BadInput` with advice."""
    try:
        yield
    except OSError as error:
        advice = {
            errno.EACCES: f"; {AS_THE_CLIENT}",
            errno.EROFS: "; the disk is mounted to be read only",
            errno.ENOSPC: "; free some space",
        }.get(error.errno or 0, "")
        raise BadInput(f"{what}: {error.filename or ''} {error.strerror}{advice}") from error
