"""Notes for `hushfleet-edge status`: what a board waits for, how it uses its data, and what went wrong in training.

They are shown only on the board: what a device sends must not depend on them. None is synced. A broker that does not
know a board, and withholds its messages, looks like a broker on which nobody sends. Therefore a long silence is also
logged once, with its possible causes.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from hushfleet import atomic_file
from hushfleet.edge_client.storage.state_files import DATA_USE, TRAINING, WAITING
from hushfleet.errors import StoreError

SILENT_S = 60.0

Kind = Literal["certificate", "broker", "aggregator", "away", "answer", "operator", "round", "nothing"]
"""The party that the client waits for. `certificate`: the fleet, which must issue one; `aggregator`: none was ever
heard; `away`: it announced that it leaves, or is lost; `answer`: it is there, but does not answer; `operator`: must
accept this device."""
T = TypeVar("T")

_log = logging.getLogger("hushfleet.edge")


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


@dataclass(frozen=True)
class Waiting:
    """:param since: unix seconds."""

    kind: Kind
    words: str
    since: float


class Note:
    """A text that stays until it is replaced or removed.

    :param path: None if nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def keep(self, words: str | DataUse | Waiting | None) -> None:
        """:param words: None if all is well."""
        if self._path is None:
            return
        with suppress(OSError, StoreError):  # a full disk is reported elsewhere
            if words is None:
                self._path.unlink(missing_ok=True)
            else:
                data = self.text_of(words).encode(errors="backslashreplace")
                atomic_file.write_whole(self._path, data, durable=False)

    @staticmethod
    def text_of(words: str | DataUse | Waiting) -> str:
        """Returns the text of a note as it is written."""
        return words if isinstance(words, str) else json.dumps(asdict(words))


class WaitingNote:
    """Notes what the client waits for.

    :param path: None if nothing is written.
    :param advice: for each kind, the text that is logged once the wait has lasted for `SILENT_S`.
    :param clock: monotonic seconds.
    """

    def __init__(self, path: Path | None, advice: dict[Kind, str], *, clock: Callable[[], float]) -> None:
        self._note, self._advice, self._clock = Note(path), advice, clock
        self._reported: tuple[Kind, str] | None = None
        self._since = 0.0
        self._warned: set[Kind] = set()

    def is_(self, kind: Kind, words: str) -> None:
        """Notes what is waited for now; cheap if it is the same as before."""
        if self._reported == (kind, words):
            if kind not in self._warned and kind in self._advice and self._clock() - self._since >= SILENT_S:
                self._warned.add(kind)
                _log.warning("%s", self._advice[kind])
            return
        if self._reported is None or self._reported[0] != kind:
            self._since = self._clock()
        self._reported = kind, words
        if kind in ("round", "nothing"):
            self._warned.clear()  # all is well, and the next silence is a new one
        since = time.time() - (self._clock() - self._since)
        self._note.keep(Waiting(kind, words, float(round(since))))


def advice_on_silence(device: str, federation: str) -> dict[Kind, str]:
    """Returns the texts that are logged if a wait is long, by the party that is waited for."""
    kept = f"this broker keeps messages back: its access list knows this connection by another name than {device}"
    return {
        "aggregator": "connected, and nothing has come from an aggregator. Either none has been started in the "
        f"federation {federation}, it still prepares its task, or {kept}",
        "answer": f"connected, and the aggregator does not answer. It may be busy; else {kept}",
    }


def notes_in(state_dir: Path | None) -> tuple[Note, Note]:
    """Returns the notes of the data and of training; with None nothing is written."""
    data, training = (Note(None if state_dir is None else state_dir / name) for name in (DATA_USE, TRAINING))
    return data, training


def read_data_use(state_dir: Path) -> DataUse | None:
    """Reads how the client in this state directory uses its data; None before its first round."""
    return _read(DataUse, state_dir / DATA_USE)


def read_waiting(state_dir: Path) -> Waiting | None:
    """Reads what the client in this state directory waits for, or waited for when it ended; None if not known."""
    return _read(Waiting, state_dir / WAITING)


def read_training(state_dir: Path) -> str | None:
    """Reads what went wrong in the last training of the client in this state directory."""
    try:
        return (state_dir / TRAINING).read_bytes().decode("utf-8")
    except (OSError, ValueError):
        return None


def _read(kind: Callable[..., T], path: Path) -> T | None:
    try:
        return kind(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
