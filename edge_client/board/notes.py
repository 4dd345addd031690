"""What is wrong with a board's data or with training on them, a line each, for `hushfleet-edge status`.

It is told on the board alone: what a device sends must not follow from it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.errors import StoreError

NAMES = ("data.txt", "training.txt")


class Note:
    """One line that lasts until another one, or none, takes its place.

    :param path: None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self, words: str | None) -> None:
        """:param words: None where all is well."""
        if self._path is None:
            return
        with suppress(OSError, StoreError):  # a full disk is told elsewhere
            if words is None:
                self._path.unlink(missing_ok=True)
            else:
                atomic_file.write_whole(self._path, words.encode(), durable=False)


def notes_in(state_dir: Path | None) -> tuple[Note, Note]:
    """Of the data, and of training; None: nothing is written."""
    data, training = (Note(None if state_dir is None else state_dir / name) for name in NAMES)
    return data, training


def read_notes(state_dir: Path) -> list[str]:
    """Those of the client in this state directory."""
    found = []
    for name in NAMES:
        with suppress(OSError, ValueError):
            found.append((state_dir / name).read_text("utf-8"))
    return found
