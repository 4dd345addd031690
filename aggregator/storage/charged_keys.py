"""Keeps which rounds each device's key has charged, over all runs and starts of an aggregator's key.

A device whose store was put back from an older copy cannot know what the store lacks, so it asks (`Known.seen`). The
file lies beside the aggregator's key, because it must exist longer than a run, and longer than an entry of the
register. It has only rounds that were surely charged, never what a device may have charged: a device commits its
ledger's entry, then offers the update in a signed message. So a device whose store is the newest never has less.
Rounds before this file existed are missing in it, and rounds that a device never offered.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hushfleet.sqlite_file import SqliteFile
from hushfleet.wire.format.messages import SeenCharges

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE charged (
    number INTEGER PRIMARY KEY, public_key BLOB NOT NULL, task TEXT NOT NULL, round INTEGER NOT NULL,
    weight REAL NOT NULL DEFAULT 0, UNIQUE (public_key, task, round)
)
"""


class ChargedKeys(SqliteFile):
    """The record beside the aggregator's key in `key_path`; several processes may have it open.

    :param durable: False leaves syncing to the operating system, for simulations only.

    Raises `StoreError` for a file that is damaged or of another version.
    """

    def __init__(self, key_path: Path, *, durable: bool = True) -> None:
        file = key_path.with_name(f"{key_path.name}.charged.sqlite")
        super().__init__(file, schema=_SCHEMA, version=SCHEMA_VERSION, durable=durable)

    def note(self, charged: Iterable[tuple[bytes, str, int, float]]) -> None:
        """Notes keys with the task and the round that each has charged, in one transaction.

        The last number is the weight of the charge that an accepted update declares; 0: it is not known yet.
        """
        with self.transaction():
            self.write_all(
                "INSERT INTO charged (public_key, task, round, weight) VALUES (?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE SET weight = excluded.weight WHERE excluded.weight > weight",
                charged,
            )

    def of(self, key: bytes) -> SeenCharges | None:
        """Returns what was seen of this key; None for nothing."""
        rows = self.rows("SELECT task, round, weight FROM charged WHERE public_key = ? ORDER BY number", (key,))
        return SeenCharges(len(rows), sum(weight for _, _, weight in rows), *rows[-1][:2]) if rows else None
