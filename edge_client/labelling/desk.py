"""Lets a person label new images or clips: handles the inbox, the model's guess, and each tap on the page.

An image stays in the inbox until a person has labelled it; then it is moved into the folder of its class, and the next
round trains on it. The model's guess never decides. With `wrong` the page shows the alarms of `hushfleet-edge listen`
instead: each lies in a folder with the name of the class that the board took it for.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hushfleet.at_need import at_need
from hushfleet.data.form import one_form
from hushfleet.data.images import preview
from hushfleet.data.walk import walked
from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.local_data import SETTLED_S
from hushfleet.edge_client.labelling import class_folders
from hushfleet.edge_client.labelling.class_folders import AlreadyThere, ClassFolders, check_sample, move, opened_store
from hushfleet.edge_client.labelling.heard import ALARMS, taken_for
from hushfleet.edge_client.status import describe_model
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.predict import LoadedGraphs, predict
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.output import one_line

if TYPE_CHECKING:
    from hushfleet.data import sound
    from hushfleet.edge_client.labelling import spectrogram
else:
    sound = at_need("hushfleet.data.sound")
    spectrogram = at_need("hushfleet.edge_client.labelling.spectrogram")

NOT_USABLE = "not-usable"
"""The folder in the inbox for images that a person has rejected ("put aside")."""
MOST_UNDONE = 100
PREVIEW_PIXELS = 1024
PLAYED_HZ = 8000  # with fewer, a browser may play nothing

_log = logging.getLogger("hushfleet.edge")


@dataclass(frozen=True)
class Shown:
    """The image that the page shows next, and the page's text about it.

    :param waiting: number of images in the inbox, including the shown one.
    :param image: its name in the inbox; None if no image waits.
    :param version: changes if another picture replaces this one under the same name.
    :param guess: the likeliest class and its probability; None if the device has no model yet, or cannot use it.
    :param by: the model that guessed, in words.
    :param undo: whether there is a tap that can be undone.
    :param said: the last event, in words.
    :param unreadable: files in the inbox that are no readable pictures, each with the reason.
    :param kind: `image` or `clip`.
    :param wrong: whether alarms are shown, and `guess` is what the board took the clip for.
    """

    waiting: int
    image: str | None
    classes: tuple[str, ...]
    guess: tuple[str, float] | None = None
    by: str = ""
    undo: bool = False
    said: str = ""
    unreadable: tuple[str, ...] = ()
    version: str = ""
    kind: str = "image"
    wrong: bool = False


class _Tap(NamedTuple):
    """:param image: its name in the inbox; :param label: empty if it was put aside; :param place: its present path.
    :param corrected: the former and present path of each file with the same content that had another label."""

    image: str
    label: str
    place: Path
    corrected: Sequence[tuple[Path, Path]] = ()


def version_of(status: os.stat_result) -> str:
    """Returns a text that changes if another file takes the name, such as if a camera overwrites `latest.jpg`."""
    return f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_size}"


@dataclass
class Desk:
    """The desk of one board; one thread at a time.

    :param settled_s: a file that has changed within this time may be half written, and is not shown.
    :param wrong: whether to show alarms.
    """

    config: DeviceConfig
    settled_s: float = SETTLED_S
    wrong: bool = False
    _taps: deque[_Tap] = field(default_factory=lambda: deque(maxlen=MOST_UNDONE))
    _graphs: dict[bytes, LoadedGraphs] = field(default_factory=dict)
    _unreadable: dict[tuple[str, str], str] = field(default_factory=dict)
    """The reason why a file is no picture, by its name and version."""

    def __post_init__(self) -> None:
        inbox = class_folders.check_inbox(self.config.data)
        self._inbox, self._aside = inbox / ALARMS if self.wrong else inbox, inbox / NOT_USABLE
        if self.wrong and not self._inbox.is_dir():
            raise BadInput(
                "no alarm has been kept; write keep_alarms = 100 into [listen], and run hushfleet-edge listen"
            )
        with opened_store(self.config) as store:
            class_folders.class_names(self.config, store)  # raises if no image can be labelled here
            self._rate = class_folders.sample_rate(store)
        self._folders = ClassFolders(self.config.data, rate=self._rate)

    def next(self, said: str = "") -> Shown:
        """Returns the image that has waited longest, with the model's guess."""
        files = self._files()
        waiting = self._waiting(files)
        with opened_store(self.config) as store:
            shown = Shown(
                len(waiting),
                waiting[0] if waiting else None,
                class_folders.class_names(self.config, store),
                undo=bool(self._taps),
                said=one_line(said),
                unreadable=tuple(map(one_line, self._unreadable.values())),
                version=version_of(files[waiting[0]]) if waiting else "",
                kind="clip" if self.config.data.kind == "sound" else "image",
                wrong=self.wrong,
            )
            if self.wrong and waiting:
                guess = taken_for(waiting[0])
                return replace(shown, guess=guess if guess[0] in shown.classes else None, by="this board")
            return self._guessed(shown, store, self._inbox / waiting[0]) if store is not None and waiting else shown

    def preview(self, name: str, version: str) -> bytes:
        """Returns a new JPEG of an image in the inbox, so that no code reaches the browser; of a clip its spectrogram.

        Raises `BadInput`.
        """
        file = self._found(name, version)
        if self.config.data.kind == "sound":
            return spectrogram.spectrogram(sound.read_clip(file, self._rate), self._rate)
        return preview(file, longest=PREVIEW_PIXELS)

    def clip(self, name: str, version: str) -> bytes:
        """Returns a clip in the inbox as a new WAV file, as the task hears it. Raises `BadInput`."""
        if self.config.data.kind != "sound":
            raise BadInput("an image has no sound")
        pcm, times = sound.read_clip(self._found(name, version), self._rate), -(-PLAYED_HZ // self._rate)
        return sound.wav_of(pcm.repeat(times), times * self._rate)

    def tap(self, name: str, label: str, version: str) -> Shown:
        """Moves an image to its class, or with an empty label aside. Raises `BadInput` if it is not there, or if it is
        another picture than the shown one.

        An alarm with an empty label is none of the classes: it becomes a sample of `listen.no_alarm` if the task has
        this class.
        """
        image = self._found(name, version)
        with opened_store(self.config) as store:
            classes = class_folders.class_names(self.config, store)
        none = one_form(self.config.listen.no_alarm)
        label = none if self.wrong and not label and none in classes else label
        said = f"{name} is labelled {label}." if label else f"{name} is put aside."
        if self.wrong and not label:
            said += f" No class of the task is called {none!r}."
        if not label:
            said += "".join(f" The same is still at {file}." for file in self._folders.known(image))
        place: Path | None = None
        corrected = list[tuple[Path, Path]]()
        if label:
            label = class_folders.check_label(label, classes)
            try:
                place = self._folders.take_in(image, label)
            except AlreadyThere as error:
                corrected = self._folders.correct(image, label)
                moved = ", ".join(f"{former} is now {present}" for former, present in corrected)
                said = f"{f'{name} was there already: {moved}' if corrected else error}. This copy was put aside."
                label = label if corrected else ""
        place = place or move(image, self._aside)
        self._taps.append(_Tap(name, label, place, corrected))
        return self.next(said)

    def undo(self) -> Shown:
        """Moves the image of the last tap back into the inbox, and each file that it has corrected back. Raises
        `BadInput` if there is none."""
        if not self._taps:
            raise BadInput("there is no tap to undo")
        name, label, place, corrected = self._taps[-1]
        is_there = place.is_file()
        if is_there:
            move(place, (self._inbox / name).parent, Path(name).name)
        for former, present in corrected:
            if present.is_file():
                move(present, former.parent, former.name)
        self._taps.pop()
        if not is_there:
            raise BadInput(f"{place} is gone, and cannot be taken back")
        return self.next(f"{Path(name).name} waits again; it was {f'labelled {label}' if label else 'put aside'}.")

    def _guessed(self, shown: Shown, store: DeviceStore, image: Path) -> Shown:
        try:
            prediction = predict(store, image, self._graphs)
        except (HushfleetError, MemoryError) as error:  # a person can label without it
            _log.info("no guess for %s: %r", image, error)
            return shown
        name, probability = prediction.classes[0]
        if (name := one_form(name)) not in shown.classes or not math.isfinite(probability):
            return shown
        by = f"{describe_model(prediction.model)}, of {prediction.task}"
        return replace(shown, guess=(name, probability), by=by)

    def _found(self, name: str, version: str) -> Path:
        """Returns the path of a waiting image. Raises `BadInput` for any other file, or if it is gone or replaced."""
        status = self._files().get(name)
        if status is None:
            raise BadInput("this image does not wait any more; it may have been labelled elsewhere")
        if version_of(status) != version:
            raise BadInput("another picture has come under this name since it was shown; look again")
        return self._inbox / name

    def _files(self) -> dict[str, os.stat_result]:
        """Returns the files in the inbox and its folders, without hidden files, links, and files that were put aside.

        Raises `BadInput` if the inbox cannot be read: its disk may have been removed.
        """
        try:
            os.scandir(self._inbox).close()
        except OSError as error:
            raise BadInput(
                f"data.inbox = {str(self._inbox)!r} cannot be read: {error.strerror}; the client's user must be able to"
            ) from error
        found: dict[str, os.stat_result] = {}
        for top, folders, files in walked(self._inbox):
            inside = Path(top).relative_to(self._inbox)
            aside = (NOT_USABLE, ALARMS) if top == str(self._inbox) and not self.wrong else ()
            folders[:] = [each for each in folders if not each.startswith(".") and each not in aside]
            for name in files:
                with suppress(OSError):  # it was moved meanwhile
                    status = os.lstat(os.path.join(top, name))
                    if stat.S_ISREG(status.st_mode) and not name.startswith("."):
                        found[(inside / name).as_posix()] = status
        return found

    def _waiting(self, files: dict[str, os.stat_result]) -> list[str]:
        """Returns the names of the images among `files`, the oldest first, and notes why others are no pictures.

        It checks files only until the first image.
        """
        now, waiting, known = time.time(), list[str](), self._unreadable
        self._unreadable = {}
        for name, status in sorted(files.items(), key=lambda item: (item[1].st_mtime_ns, item[0])):
            key = name, version_of(status)
            if abs(now - status.st_mtime) < self.settled_s:
                continue
            if wrong := known.get(key) or ("" if waiting else self._fault(name)):
                self._unreadable[key] = wrong
            else:
                waiting.append(name)
        return waiting

    def _fault(self, name: str) -> str:
        """Returns why a file is no picture; empty if it is one."""
        if not name.isprintable():
            return f"{name!a}: the name has characters that cannot be shown; rename the file"
        try:
            check_sample(self._inbox / name, self.config.data.kind, self._rate)
        except BadInput as error:
            return str(error)
        return ""
