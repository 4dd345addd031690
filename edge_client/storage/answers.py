"""Stores the answers of a device as a committee member: one set of devices for each round, for ever.

Two answers for two sets of one round could open two sums that differ by one device. Therefore the answer is stored
before it is sent, and a row is never replaced.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hushfleet.errors import PrivacyError, StoreError

SCHEMA = """
CREATE TABLE answers (
    task TEXT NOT NULL, round INTEGER NOT NULL, included BLOB NOT NULL, digest BLOB NOT NULL, data BLOB,
    status TEXT NOT NULL, PRIMARY KEY (task, round));
"""


@dataclass(frozen=True)
class AnswerEntry:
    """A stored answer; its bytes never change.

    :param included: SHA-256 of the bitmap of the devices in the sum.
    :param data: the encoded answer; empty after an answer for another round was stored.
    :param digest: SHA-256 of `data`.
    :param status: `pending`, `acked`, or `refused:<code>`.
    """

    task: str
    round: int
    included: bytes
    data: bytes
    digest: bytes
    status: str

    @property
    def pending(self) -> bool:
        return self.status == "pending"


class Answers:
    """The table of answers in a `DeviceStore`, which provides its connection and its transactions with their errors."""

    def __init__(
        self, connection: sqlite3.Connection, transaction: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._connection = connection
        self._transaction = transaction

    def of(self, task: str, round: int) -> AnswerEntry | None:
        """Returns the answer of a round, or None if there is none."""
        query = "SELECT included, data, digest, status FROM answers WHERE task = ? AND round = ?"
        try:
            row: tuple[Any, ...] | None = self._connection.execute(query, (task, round)).fetchone()
        except sqlite3.Error as error:
            raise StoreError(f"the answers of this device cannot be read: {error}") from error
        if row is None:
            return None
        included, data, digest, status = row
        if data is not None and hashlib.sha256(data).digest() != digest:
            raise StoreError(f"the answer of round {round} of {task} is damaged in the store")
        return AnswerEntry(task, round, included, data or b"", digest, status)

    def commit(self, task: str, round: int, *, included: bytes, data: bytes) -> AnswerEntry:
        """Stores and syncs an answer. Raises `PrivacyError` if the round already has an answer."""
        digest = hashlib.sha256(data).digest()
        with self._transaction(f"store the answer of round {round} of task {task}"):
            run = self._connection.execute
            if run("SELECT 1 FROM answers WHERE task = ? AND round = ?", (task, round)).fetchone() is not None:
                raise PrivacyError(f"round {round} of {task} is answered already; a second answer is never made")
            run("INSERT INTO answers VALUES (?, ?, ?, ?, ?, 'pending')", (task, round, included, digest, data))
            run("UPDATE answers SET data = NULL WHERE NOT (task = ? AND round = ?)", (task, round))
        return AnswerEntry(task, round, included, data, digest, "pending")

    def set_status(self, task: str, round: int, status: str) -> None:
        """Stores the status of an answer, see `DeviceStore.set_status`."""
        with self._transaction("note what became of an answer"):
            self._connection.execute(
                "UPDATE answers SET status = ? WHERE task = ? AND round = ?", (status, task, round)
            )
