"""Writes and reads the run's event log: one JSON object per line, appended as events happen.

A display, a report and a person with `tail -f` read the same file while the aggregator still writes it,
and a `kill -9` may cut the last line. So a line counts only when it ends with a newline, a line that does
not parse is skipped, and a log that is opened again ends a cut line first instead of writing into it.

Every line has `at` (unix seconds) and `event` (the kind); a simulation may write many events of one kind as one line of
columns. The kinds and their fields are in
`docs/result.md`. Numbers are standard JSON: an infinity, such as an epsilon without noise, is written as
the string `"inf"` and read back as the number; NaN becomes null.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from hushfleet.aggregator.results.columns import columns_of, rows_of
from hushfleet.errors import StoreError
from hushfleet.plain_json import from_json, to_json

# Fields that hold names and sentences: a device may well be called "inf".
TEXT_FIELDS = {"event", "device", "cohort", "task", "method", "engine", "broker", "state", "board", "code", "reason"}
TEXT_FIELDS |= {"layers", "action", "target", "accountant", "timezone"}


_PIECE_BYTES = 1 << 20
_COUNT, _COLUMNS = "events", "columns"
_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Receives an event's kind and its fields."""


class EventLog:
    """Appends events to a file; safe to share between threads, usable as a context manager.

    :param path: the file; its folder is created. Existing content is kept.
    :param clock: unix seconds; a parameter so that a simulation can stamp its own time.
    :param on_event: is called after each `write`.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.time,
        on_event: OnEvent = lambda kind, fields: None,
    ) -> None:
        self.path = Path(path)
        self._clock, self._on_event = clock, on_event
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                if self._file.read(1) != b"\n":
                    self._append(b"\n")
        except OSError as error:
            raise StoreError(f"the event log {self.path} cannot be opened: {error}") from error

    def write(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Appends one event and returns it in the form that a reader gets.

        NumPy scalars and arrays are written as numbers and lists. Raises `StoreError` if the disk refuses.
        """
        event = _from_json(self._write({"event": kind, **fields}))
        self._on_event(kind, fields)
        return event

    def write_many(self, kind: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends events of one kind as one line; readers get one after the other. Raises as `write`."""
        if rows:
            self._write({"event": kind, _COUNT: len(rows), _COLUMNS: columns_of(rows)})

    def _write(self, fields: dict[str, Any]) -> dict[str, Any]:
        event = {"at": round(self._clock(), 3), **to_json(fields)}
        line = _ENCODER.encode(event) + "\n"
        with self._lock:
            try:
                self._append(line.encode())
            except (OSError, ValueError) as error:  # ValueError: the log was closed
                raise StoreError(f"the event log {self.path} cannot be written: {error}") from error
        return event

    def _append(self, data: bytes) -> None:
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        """Closes the file; later writes raise `StoreError`."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def iterate_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a log, oldest first, piece by piece, because the log of a long run is large.

    A missing file has no events, and other lines are skipped.
    """
    tail = EventTail(path)
    while piece := tail.read_lines(_PIECE_BYTES):
        yield from (event for line in piece for event in _parse(line) if isinstance(event.get("event"), str))


class EventTail:
    """Reads a growing file of JSON lines piece by piece: each `read` returns what was added since the read before."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.offset = 0

    def read(self, about_bytes: int = -1) -> list[dict[str, Any]]:
        """Returns the JSON objects on new whole lines, oldest first; an empty list if there are none.

        :param about_bytes: how many bytes to read at most, plus the rest of a line, because objects take ten times the
            memory of their bytes. -1: all.

        A missing file has no objects. A file that is shorter than before was started again, so it is read from its
        start. Lines that are not a JSON object are skipped.
        """
        return [event for line in self.read_lines(about_bytes) for event in _parse(line)]

    def read_lines(self, about_bytes: int = -1) -> list[bytes]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset if self.offset <= file.seek(0, os.SEEK_END) else 0)
                start, data = file.tell(), file.read(about_bytes) + file.readline()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self.offset = start + len(whole)
        return whole.split(b"\n")[:-1]


def _from_json(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value if name in TEXT_FIELDS else from_json(value) for name, value in event.items()}


def _parse(line: bytes) -> list[dict[str, Any]]:
    """Returns the events of a line: none if it is no JSON object, many if they were written as one."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return []
    if not isinstance(event, dict):
        return []
    if _COLUMNS not in event:
        return [_from_json(event)]
    columns, count = event.pop(_COLUMNS), event.pop(_COUNT)
    return [_from_json({**event, **row}) for row in rows_of(columns, count)]
