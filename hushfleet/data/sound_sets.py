"""Loads the standard sets of sound from the folders as they are downloaded: `speech-commands`, `esc-50`,
`urbansound8k`. Nothing is downloaded.

The test part is the published one: the clips of `testing_list.txt`, and the last fold. Those of `validation_list.txt`
are left out. Speech Commands names the speaker of each clip, who is its device in the partition `given`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hushfleet.data.folder import FileForm, load_files
from hushfleet.data.form import SOUND_SETS
from hushfleet.data.samples import DataSet
from hushfleet.errors import BadInput
from hushfleet.user_files import user_data_dir


class _Clip(NamedTuple):
    """A clip of a set: its file below the set's folder, its class, and its speaker, if the set names him."""

    file: str
    kind: str
    is_test: bool
    speaker: str = ""


class _Layout(NamedTuple):
    """A set as it is downloaded.

    :param folders: the names that its folder has.
    :param table: a file in it, by which it is found.
    """

    folders: tuple[str, ...]
    table: str
    clips: Callable[[Path], Iterator[_Clip]]


def load_sound_set(name: str, form: FileForm, *, data_dir: Path | None) -> DataSet:
    """Loads a set.

    :param form: its classes are replaced by those of the set.
    :param data_dir: the folder of the set, or the folder that it is in; None: the user's data folder.
    :raises BadInput: it is not there, or a file of it is missing or broken.
    """
    folder, layout = data_dir or user_data_dir(), _LAYOUTS[name]
    places = [folder / each for each in (*layout.folders, ".") if (folder / each / layout.table).is_file()]
    if not places:
        raise BadInput(
            f"the data set {name} is not in {folder}: looked for {layout.folders[0]}/{layout.table}; download the set, "
            "unpack it, and name the folder that it is in by --data-dir"
        )
    try:
        clips = list(layout.clips(places[0]))
    except KeyError as error:
        raise BadInput(f"{places[0] / layout.table} lacks the column {error}") from error
    form["class_names"] = sorted({clip.kind for clip in clips})
    label = {kind: place for place, kind in enumerate(form["class_names"])}
    train, test = (
        load_files(
            [(places[0] / clip.file, label[clip.kind]) for clip in clips if clip.is_test is is_test],
            form,
            where=f"{places[0]}, the {'test' if is_test else 'training'} part",
        )
        for is_test in (False, True)
    )
    speakers = np.array([clip.speaker for clip in clips if not clip.is_test])
    names, owners = np.unique(speakers[train.records[1]], return_inverse=True)
    if not any(names):
        return DataSet(name, train, test, tuple(form["class_names"]), has_test=True)
    devices = tuple(map(str, names.tolist()))
    return DataSet(name, train, test, tuple(form["class_names"]), owners, has_test=True, device_names=devices)


def _speech_commands(root: Path) -> Iterator[_Clip]:
    left_out, tested = (
        set((root / f"{part}_list.txt").read_text("utf-8").split()) for part in ("validation", "testing")
    )
    for word in sorted(each.name for each in root.iterdir() if each.is_dir() and each.name[0] not in "._"):
        for file in sorted((root / word).glob("*.wav")):
            if (name := f"{word}/{file.name}") not in left_out:
                yield _Clip(name, word, name in tested, file.name.partition("_nohash_")[0])


def _folds(
    table: str, kind: str, file_of: Callable[[Mapping[str, str]], str], *, test: str
) -> Callable[[Path], Iterator[_Clip]]:
    def clips(root: Path) -> Iterator[_Clip]:
        with (root / table).open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield _Clip(file_of(row), row[kind], row["fold"] == test)

    return clips


_ESC, _URBAN = "meta/esc50.csv", "metadata/UrbanSound8K.csv"
_LAYOUTS = {
    "speech-commands": _Layout(
        ("speech_commands_v0.02", "SpeechCommands/speech_commands_v0.02"), "testing_list.txt", _speech_commands
    ),
    "esc-50": _Layout(
        ("ESC-50-master", "ESC-50"), _ESC, _folds(_ESC, "category", lambda row: f"audio/{row['filename']}", test="5")
    ),
    "urbansound8k": _Layout(
        ("UrbanSound8K",),
        _URBAN,
        _folds(_URBAN, "class", lambda row: f"audio/fold{row['fold']}/{row['slice_file_name']}", test="10"),
    ),
}
assert _LAYOUTS.keys() == SOUND_SETS.keys()
