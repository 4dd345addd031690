"""Describes what is wrong with the place of the data; nothing is read, so that the guardian can say it at its start."""

from __future__ import annotations

import os
from pathlib import Path

from hushfleet.data.walk import ENDINGS_OF, files_below
from hushfleet.edge_client.board.config import OwnDataSection
from hushfleet.paths import is_closed

_FILES = {
    "arrays": ".npz file, with samples `x` and labels `y`",
    "csv": "CSV file (or folder of such files), with a column `label` (or the task's outputs) and columns of values",
}


def describe_data(section: OwnDataSection) -> str | None:
    """Describes what is wrong with the configured data before a task arrives; returns None if nothing is.

    A device starts anyway: a disk, or a camera's first image, may come later.
    """
    what, is_there, ending = ("sound", "is no", ".wav") if section.kind == "sound" else ("images", "are no", ".jpg")
    for key in ("unlabelled", "inbox", "path", "held_out"):
        if (place := getattr(section, key)) and is_closed(place):
            return (
                f"data.{key} = {place!r}: a folder above it is closed to the client's user; open it with "
                "chmod o+x, or move the data to another place"
            )
    for key, folder in (("unlabelled", section.unlabelled), ("inbox", section.inbox)):
        if folder is not None and not os.path.isdir(folder):
            return f"data.{key} = {folder!r}: there is no such folder of {what}"
    if (section.keep or section.max_mib) and os.path.isfile(section.path):
        return f"data.path = {section.path!r} is one file, of which data.keep and data.max_mib delete nothing"
    for key, text in (("path", section.path), ("held_out", section.held_out)):
        path = Path(text or ".")
        name, later = f"data.{key} = {str(path)!r}", "; until then it has nothing to train on" * (key == "path")
        if section.kind in _FILES:
            if text and not os.path.isfile(path) and not (section.kind == "csv" and os.path.isdir(path)):
                return f"{name}: there is no such {_FILES[section.kind]}{later}"
        elif text and not os.path.isdir(path):
            return f"{name}: there is no such folder, with a sub-folder of {what} for each class{later}"
        elif text and not any(
            each.lower().endswith(ENDINGS_OF[section.kind]) and os.path.isfile(each) and Path(each).parent != path
            for each in files_below(path, data=path)
        ):
            return f"{name}: there {is_there} {what} in class folders, as in {path}/CLASS/1{ending}{later}"
    return None
