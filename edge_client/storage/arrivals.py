"""Stores when each sample of a board arrived: at its first sight, by its content, and unchanged after a charge.

So a sample is in one window of each length, even if its name, its folder or the clock changes. The times are part of
the store because they must not be lost: a sample that arrived a second time could be trained on in two windows.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

KEY_BYTES = 16
_ASKED = 500  # keys in one query
_PART_BYTES = 1 << 18
SCHEMA = "CREATE TABLE arrivals (sample BLOB PRIMARY KEY, arrived_at INTEGER NOT NULL) WITHOUT ROWID"


def sample_key(content: bytes) -> bytes:
    """Returns the key of a sample: a digest of its content."""
    return hashlib.sha256(content).digest()[:KEY_BYTES]


def file_key(path: str) -> bytes:
    """Returns the key of a file's content. Raises `OSError`.

    It reads the file in parts, because a file in a folder of images may be larger than the board's memory.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
    return digest.digest()[:KEY_BYTES]


class Arrivals:
    """The table of arrivals in a `DeviceStore`, which provides its connection and transactions with their errors."""

    def __init__(
        self, connection: sqlite3.Connection, transaction: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._connection = connection
        self._transaction = transaction

    def forget(self) -> None:
        """Deletes all times, while nothing was charged: the clock may have been wrong. Raises `StoreError`."""
        with self._transaction("forget the arrival of samples"):
            self._connection.execute("DELETE FROM arrivals")

    def all(self) -> tuple[tuple[bytes, int], ...]:
        """Returns the key of each sample that was seen, and when it arrived. Raises `sqlite3.Error`."""
        return tuple(self._connection.execute("SELECT sample, arrived_at FROM arrivals"))

    def of_file(self, path: str) -> float | None:
        """Returns when the content of a file arrived, counted unix seconds; None if no task with windows has read it,
        and if the file or the store cannot be read."""
        try:
            if self._connection.execute("SELECT 1 FROM arrivals LIMIT 1").fetchone() is None:
                return None  # without reading the file
            query = "SELECT arrived_at FROM arrivals WHERE sample = ?"
            found = self._connection.execute(query, (file_key(path),)).fetchone()
        except (OSError, sqlite3.Error):
            return None
        return None if found is None else float(found[0])

    def of(self, keys: Sequence[bytes], *, now: int) -> list[int]:
        """Returns when each of these samples arrived, counted unix seconds; new samples arrive `now`.

        The returned times are on the disk. Raises `StoreError`.
        """
        with self._transaction("note the arrival of samples"):
            asked, known = sorted(set(keys)), dict[bytes, int]()
            for at in range(0, len(asked), _ASKED):  # the table grows for years, and has samples deleted long ago
                part = asked[at : at + _ASKED]
                query = f"SELECT sample, arrived_at FROM arrivals WHERE sample IN ({','.join('?' * len(part))})"
                known.update(self._connection.execute(query, part))
            new = [(key, now) for key in asked if key not in known]
            self._connection.executemany("INSERT INTO arrivals VALUES (?, ?)", new)
        return [known.get(key, now) for key in keys]
