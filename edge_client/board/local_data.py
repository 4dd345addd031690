"""Reads the device's own labelled samples, and reads them again when they have changed since the last round.

A board that keeps collecting images should train with them without a restart. Reading thousands of files for every
round takes long, so they are read only if the name, a date or the size of one has changed. A file that has changed in
the last seconds may be half written: an image then waits for the next round; a CSV file gives its complete lines, or,
where no sample may decide about another one, its last line as it stands: a new line elsewhere must not withhold it.

Photographs that cannot be read, or that are in no class folder, are left out. If a task accepts a device without
samples, each sample that does not fit is left out, and data that cannot be read at all count as no samples: a decline
would reveal, without a charge, what is in the data. Only the board shows what was left out: in its log, and with
`hushfleet-edge status`.
"""

from __future__ import annotations

import logging
import math
import os
import stat
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.data.form import FOLDERS
from hushfleet.data.held_out import both_parts
from hushfleet.data.samples import FeatureSamples, LabelledSamples, MakesFeatures, Samples, inputs_of
from hushfleet.data.walk import ENDINGS_OF, files_below
from hushfleet.durations import Period
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.edge_client.board.notes import DataUse, Note
from hushfleet.edge_client.board.process import return_small_blocks
from hushfleet.edge_client.board.sample_files import Reading, contents, load_file, reasons
from hushfleet.edge_client.storage.arrivals import file_key, sample_key
from hushfleet.errors import BadInput
from hushfleet.wire.format.spec import ModelSpec

if TYPE_CHECKING:
    from hushfleet.data import folder, sound
    from hushfleet.learning import anomaly
else:
    folder = at_need("hushfleet.data.folder")
    sound = at_need("hushfleet.data.sound")
    anomaly = at_need("hushfleet.learning.anomaly")

Stamp = tuple[int, int]
FilePlace = tuple[str, tuple[int, int, int]]

MOST_UNLABELLED = 1000
SETTLED_S = 2.0
"""A file that has not changed for this time is considered complete."""
_LOOKED_AT = 1 << 18  # values: as float64 2 MiB, where a hundred photographs of 224 x 224 pixels take 115
_FAR = 50.0  # standard deviations: pixels that are not divided by 255 lie hundreds of them away, a bad sensor a few

_log = logging.getLogger("hushfleet.edge")


class LocalData:
    """The samples that a task trains on.

    :param section: where the data are.
    :param model: the shape and normalisation that the task wants.
    :param features: computes features of images, if the task trains on features; once for each state of the data.
    :param may_be_empty: whether the task accepts a device without samples, because it still sends noise.
    :param note: records what was left out of the data.
    :param settled_s: a file that has changed within this time may be half written.
    :param arrivals: stores samples by their keys, and returns when each arrived; None if no windows are requested.
    :param held_out: the share of the samples that never trains (`hushfleet.data.held_out`).
    :param by_content: as `TaskSpec.by_content`.
    :param one_a_clip: as in `SoundForm`: the task protects single records.
    """

    def __init__(
        self,
        section: OwnDataSection,
        model: ModelSpec,
        *,
        features: MakesFeatures | None = None,
        may_be_empty: bool = False,
        note: Note | None = None,
        settled_s: float = 0.0,
        arrivals: Callable[[Sequence[bytes]], list[int]] | None = None,
        held_out: float = 0.0,
        by_content: bool = False,
        one_a_clip: bool = False,
    ) -> None:
        self._by_content, self._one_a_clip = by_content, one_a_clip
        self._share = held_out
        self._held_out: Samples | None = None
        self._held_inputs: LabelledSamples | None = None
        self.left_out = 0
        """The number of samples that the last reading left out."""
        self._section = section
        self._model = section.here(model)
        self._features = features
        self._may_be_empty = may_be_empty
        self._is_lenient = may_be_empty or by_content
        self._note = note or Note(None)
        self._settled_s = settled_s
        self._arrivals = arrivals
        self._keys: dict[FilePlace, bytes] = {}  # of files
        self._told: set[str] = set()
        # the task trains on windows: other reads, for personalized head and questions, are not noted
        self._by_window = False
        self._stamp: tuple[Stamp, Period | None] | None = None
        self._samples: LabelledSamples | None = None

    @property
    def has_read(self) -> bool:
        """True if samples are in memory, though perhaps not the newest."""
        return self._samples is not None

    def samples(self, window: Period | None = None) -> LabelledSamples:
        """Returns all samples that may train, or only those that arrived in a window.

        Raises `BadInput` if there are none although the task needs some, or if they do not fit the task.
        """
        path = Path(self._section.path)
        look, unfinished = look_at(path, self._settled_s)
        self._by_window |= window is not None
        stamp = look, window
        if self._samples is None or stamp != self._stamp:
            self._samples, self._held_out, self._stamp, skipped = None, None, stamp, list[str]()
            self._held_inputs = None
            self._samples = self._load(path, unfinished, skipped, window)
            self.left_out = len(skipped)
            return_small_blocks()
        return self._samples

    def held_out(self) -> LabelledSamples:
        """Returns the samples that never train. Raises the same errors as `samples`."""
        self.samples()
        if self._held_inputs is None:
            found = self._none() if self._held_out is None else self._held_out
            self._held_inputs = inputs_of(found, self._features, skipped=[])
            return_small_blocks()
        return self._held_inputs

    def unlabelled(self) -> LabelledSamples | None:
        """Reads the images that the owner has named for the personalized head, at most `MOST_UNLABELLED`, at each
        call."""
        if self._section.unlabelled is None:
            return None
        samples = folder.load_unlabelled(Path(self._section.unlabelled), most=MOST_UNLABELLED, **self._form())
        inputs = inputs_of(samples, self._features, skipped=[])
        return_small_blocks()
        return inputs

    def _load(
        self, path: Path, unfinished: Collection[str], skipped: list[str], window: Period | None
    ) -> LabelledSamples:
        """:param skipped: receives what is left out."""
        failed, others = "", 0
        try:
            samples, others = self._read(path, unfinished, skipped, window)
            if not len(samples) and not self._may_be_empty:
                where, cure = f"data.path = {str(path)!r}", ""
                if self._section.kind in FOLDERS:
                    names = ", ".join(folder.label_folders(self._form()))
                    cure = f"; put files into {path}/CLASS/, the classes are {names}"
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
            samples, self._held_out = both_parts(samples, self._share, are_all=not self._by_content)
        inputs = inputs_of(samples, self._features, skipped=skipped if self._is_lenient else None)
        held_out = 0 if self._held_out is None else len(self._held_out)
        use = DataUse(len(inputs), len(skipped), failed or reasons(skipped), self._may_be_empty, others, held_out)
        if window is not None or not self._by_window:
            self._tell(path, use, skipped)
        return inputs

    def _read(
        self, path: Path, unfinished: Collection[str], skipped: list[str], window: Period | None
    ) -> tuple[Samples, int]:
        """Returns the samples of a window, or all, and the number of samples that arrived in other windows."""
        model = self._model
        if self._section.kind in FOLDERS:
            asked = {} if window is None else self._in_window(path, window, unfinished)

            def keep(file: Path) -> bool:  # a file that has just arrived or changed has no noted arrival: it waits
                if window is None or not os.path.isfile(file):
                    return True
                return asked.get(str(file), False) and _place_of(str(file)) in self._keys

            samples, found = folder.scan_folder(path, lenient=True, unfinished=unfinished, keep=keep, **self._form())
            skipped += found
            if model.targets.are_inputs:
                samples, _ = anomaly.divided(samples, by_content=self._by_content)
            return samples, len(asked) - sum(asked.values())
        skips = skipped if os.path.isdir(path) or self._is_lenient else None
        unfinished = () if self._by_content else unfinished
        reading = Reading(skips, self._by_content, unfinished, cuts=window is None)
        names = list[str]()
        samples = load_file(path, model, kind=self._section.kind, reading=reading, names=names)
        if model.targets.are_inputs:
            samples, _ = anomaly.divided(samples, by_content=self._by_content)
        if window is None or self._arrivals is None:
            return samples, 0
        outputs = () if model.targets.are_classes else model.class_names
        arrived = self._arrivals(list(map(sample_key, contents(samples, names, outputs))))
        (places,) = np.nonzero([window.holds(at) for at in arrived])
        return samples.take(places), len(samples) - len(places)

    def _in_window(self, path: Path, window: Period, unfinished: Collection[str]) -> dict[str, bool]:
        """Returns whether each finished image file arrived in the window, without files that cannot be read."""
        assert self._arrivals is not None
        keys, known = dict[str, bytes](), self._keys
        self._keys = {}
        for file in set(files_below(path, data=path)) - set(unfinished):
            if not file.lower().endswith(ENDINGS_OF[self._section.kind]):
                continue
            with suppress(OSError):
                if (place := _place_of(file)) is not None:
                    self._keys[place] = keys[file] = known.get(place) or file_key(file)
        arrived = self._arrivals(list(keys.values()))
        return {file: window.holds(at) for file, at in zip(keys, arrived, strict=True)}

    def _form(self) -> folder.FileForm:
        self._section.check_kind(self._model)
        # features are computed segment by segment, so the sound of all clips need not be in memory
        in_files = self._features is not None
        return file_form(self._model, one_a_clip=self._one_a_clip, in_files=in_files)

    def _none(self) -> Samples:
        model = self._model
        return Samples(
            np.empty((0, *model.image_shape), np.int16 if model.form.sample_rate else np.uint8),
            model.targets.blank(0, len(model.class_names)),
            model.mean,
            model.std,
            model.targets,
        )

    def _tell(self, path: Path, use: DataUse, skipped: Sequence[str]) -> None:
        """Stores the use of the data; logs it if something is left out that was not left out before."""
        self._note.keep(use)
        told, self._told = self._told, set(skipped) or {use.why or str(use.used)}
        if not self._told <= told and (use.why or not use.used):
            alone = "" if use.used else ", and this device takes part with noise alone"
            left_out = f"; {use.left_out} are left out: " if use.left_out else ": " if use.why else ""
            _log.warning("data.path = %r: %d samples are used%s%s%s", str(path), use.used, alone, left_out, use.why)


def file_form(model: ModelSpec, *, one_a_clip: bool, in_files: bool) -> folder.FileForm:
    """Returns the form of a board's files.

    :param one_a_clip: as in `SoundForm`, like `in_files`.
    """
    return {
        "input_shape": model.image_shape,
        "class_names": model.class_names,
        "mean": model.mean,
        "std": model.std,
        "bit_depth": model.form.bit_depth or 8,
        "sound": sound.SoundForm.of(model.form, one_a_clip=one_a_clip, in_files=in_files),
        "targets": model.targets,
    }


def _warn_of_another_unit(samples: Samples, path: Path) -> None:
    """Warns if the values may have another unit than the task's mean: only uint8 pixels are divided by 255.
    It warns only in the device's own log, because the warning depends on the values."""
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


def zero_samples(model: ModelSpec, labels: np.ndarray) -> Samples | FeatureSamples:
    """Returns black images, or features of zero, with these labels."""
    if model.features is not None:
        blank = np.zeros((len(labels), model.features.count, 1, 1), np.float32)
        if math.prod(model.input_shape) == model.features.count:
            return FeatureSamples(blank.reshape(-1, *model.input_shape), labels, model.targets)
        return FeatureSamples(blank, labels, model.targets, model.input_shape[0])
    images = np.zeros((len(labels), *model.input_shape), np.int16 if model.form.sample_rate else np.uint8)
    return Samples(images, labels, model.mean, model.std, model.targets)


def _stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Returns both dates and the size of a file: a program may set the first date back, but not the second."""
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size


def _place_of(file: str) -> FilePlace | None:
    """Returns the path and the stamp of a regular file; None for any other file, or if it is gone."""
    with suppress(OSError):
        status = os.stat(file)
        if stat.S_ISREG(status.st_mode):
            return file, _stamp_of(status)
    return None


def look_at(path: Path, settled_s: float) -> tuple[Stamp, set[str]]:
    """Returns the number of files, with a sum over the name and the stamp of each and whether it has settled; and the
    files that have not settled.

    The name counts because a file that is moved to another class changes only its name. Returns zeros without files.
    """
    now, count, total, unfinished = time.time(), 0, 0, set[str]()
    for file in [str(path)] if os.path.isfile(path) else files_below(path, data=path):
        with suppress(OSError):  # it was removed meanwhile
            status = os.stat(file)
            if abs(now - status.st_mtime) < settled_s:  # `abs`: a clock that was set back must not keep it new
                unfinished.add(file)
            total += hash((file, _stamp_of(status), file in unfinished))
            count += 1
    return (count, total), unfinished
