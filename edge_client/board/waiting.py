"""Notes what a running client waits for, and since when, for `hushfleet-edge status` and the log.

A broker that does not know a board, and withholds its messages, looks like a broker on which nobody sends. Therefore a
long silence is logged once, with its possible causes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hushfleet import atomic_file
from hushfleet.edge_client.storage.state_files import WAITING
from hushfleet.errors import StoreError

SILENT_S = 60.0

Kind = Literal["certificate", "broker", "aggregator", "away", "answer", "operator", "round", "nothing"]
"""The party that the client waits for. `certificate`: the fleet, which must issue one; `aggregator`: none was ever
heard; `away`: it announced that it leaves, or is lost; `answer`: it is there, but does not answer; `operator`: must
accept this device."""

_log = logging.getLogger("hushfleet.edge")


@dataclass(frozen=True)
class Waiting:
    """:param since: unix seconds."""

    kind: Kind
    words: str
    since: float


def advice_on_silence(device: str, federation: str) -> dict[Kind, str]:
    """Returns the texts that are logged if a wait is long, by the party that is waited for."""
    kept = f"this broker keeps messages back: its access list knows this connection by another name than {device}"
    return {
        "aggregator": "connected, and nothing has come from an aggregator. Either none has been started in the "
        f"federation {federation}, it still prepares its task, or {kept}",
        "answer": f"connected, and the aggregator does not answer. It may be busy; else {kept}",
    }


class WaitingNote:
    """Keeps `waiting.json` in the state directory; it is written when it changes, and never synced.

    :param path: None if nothing is written.
    :param advice: for each kind, the text that is logged once the wait has lasted for `SILENT_S`.
    :param clock: monotonic seconds.
    """

    def __init__(self, path: Path | None, advice: dict[Kind, str], *, clock: Callable[[], float]) -> None:
        self._path = path
        self._advice = advice
        self._clock = clock
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
        if self._path is not None:
            since = time.time() - (self._clock() - self._since)
            data = json.dumps({"kind": kind, "words": words, "since": round(since)}).encode()
            with contextlib.suppress(StoreError):  # a full disk is reported elsewhere
                atomic_file.write_whole(self._path, data, durable=False)


def read_waiting(state_dir: Path) -> Waiting | None:
    """Reads what the client in this state directory waits for, or waited for when it ended; None if not known."""
    try:
        plain = json.loads((state_dir / WAITING).read_text("utf-8"))
        return Waiting(plain["kind"], str(plain["words"]), float(plain["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
