"""Notes for `hushfleet-edge status`: how a board uses its data, and what went wrong in training.

They are shown only on the board: what a device sends must not depend on them.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.edge_client.storage.state_files import DATA_USE, TRAINING
from hushfleet.errors import StoreError


@dataclass(frozen=True)
class DataUse:
    """How the task used the data when they were read last.

    :param used: samples that it trains with; `left_out`: those that do not fit it.
    :param why: why these were left out, or why the data could not be read at all; empty: all are used.
    :param noise_alone: whether the device takes part even if no sample is used.
    :param held_out: samples that never train, because an evaluation asks about them.
    :param other_windows: samples that arrived in another window than the one that the task trains on.
    """

    used: int
    left_out: int = 0
    why: str = ""
    noise_alone: bool = False
    other_windows: int = 0
    held_out: int = 0


class Note:
    """A text that stays until it is replaced or removed.

    :param path: None if nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self, words: str | DataUse | None) -> None:
        """:param words: None if all is well."""
        if self._path is None:
            return
        with suppress(OSError, StoreError):  # a full disk is reported elsewhere
            if words is None:
                self._path.unlink(missing_ok=True)
            else:
                atomic_file.write_whole(
                    self._path, self.text_of(words).encode(errors="backslashreplace"), durable=False
                )

    @staticmethod
    def text_of(words: str | DataUse) -> str:
        """Returns the text of a note as it is written."""
        return words if isinstance(words, str) else json.dumps(asdict(words))


def notes_in(state_dir: Path | None) -> tuple[Note, Note]:
    """Returns the notes of the data and of training; with None nothing is written."""
    data, training = (Note(None if state_dir is None else state_dir / name) for name in (DATA_USE, TRAINING))
    return data, training


def read_data_use(state_dir: Path) -> DataUse | None:
    """Reads how the client in this state directory uses its data; None before its first round."""
    try:
        plain = json.loads((state_dir / DATA_USE).read_text("utf-8"))
        return DataUse(**plain)
    except (OSError, ValueError, TypeError):
        return None


def read_training(state_dir: Path) -> str | None:
    """Reads what went wrong in the last training of the client in this state directory."""
    try:
        return (state_dir / TRAINING).read_bytes().decode("utf-8")
    except (OSError, ValueError):
        return None
