"""Which boards a fleet has, in one SQLite file: tokens, certificates, what each has spent before, what it said last.

Commands and the fleet service have it open at the same time; each change is one transaction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.errors import BadInput
from hushfleet.sqlite_file import Row, SqliteFile

SCHEMA_VERSION = 1
FILE_NAME = "fleet.sqlite"

_SCHEMA = """
CREATE TABLE boards (
    id TEXT PRIMARY KEY, board TEXT NOT NULL, place TEXT NOT NULL DEFAULT '', wifi TEXT NOT NULL DEFAULT '',
    labels TEXT NOT NULL DEFAULT '{}', public_key BLOB UNIQUE, state TEXT NOT NULL DEFAULT 'new', reason TEXT,
    certificate BLOB, certificate_end REAL, enrolled REAL
) WITHOUT ROWID;
CREATE TABLE tokens (
    digest BLOB PRIMARY KEY, id TEXT NOT NULL REFERENCES boards ON DELETE CASCADE, expires REAL NOT NULL,
    uses_left INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE sightings (
    id TEXT PRIMARY KEY, public_key BLOB NOT NULL, state TEXT NOT NULL, session INTEGER NOT NULL,
    version TEXT NOT NULL, seen REAL NOT NULL, health BLOB, health_at REAL
) WITHOUT ROWID;
CREATE TABLE processes (name TEXT PRIMARY KEY, state TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
"""

_COLUMNS = "id, board, place, wifi, labels, public_key, state, reason, certificate_end, enrolled"


@dataclass(frozen=True)
class RegisteredBoard:
    """A board of the fleet.

    :param board: its profile, as `hushfleet boards` lists them.
    :param wifi: name of the Wi-Fi profile on its card.
    :param public_key: of its identity; None before it has enrolled.
    :param state: `new`: no card has come yet; `pending`: it waits for `approve`; `enrolled`; `blocked`.
    :param reason: why it is blocked, or waits.
    :param certificate_end, enrolled: unix seconds.
    """

    device: str
    board: str
    place: str = ""
    wifi: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    public_key: bytes | None = None
    state: str = "new"
    reason: str | None = None
    certificate_end: float | None = None
    enrolled: float | None = None


class FleetRegistry(SqliteFile):
    """The registry of the fleet in `folder`. Raises `StoreError` for a file that is damaged or of another version."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Path(folder) / FILE_NAME, schema=_SCHEMA, version=SCHEMA_VERSION)

    def boards(self) -> list[RegisteredBoard]:
        """By id."""
        return [_board(row) for row in self.rows(f"SELECT {_COLUMNS} FROM boards ORDER BY id")]

    def board(self, device: str) -> RegisteredBoard | None:
        row = self.row(f"SELECT {_COLUMNS} FROM boards WHERE id = ?", (device,))
        return None if row is None else _board(row)

    def add(self, boards: Iterable[RegisteredBoard]) -> None:
        """All of them or none. Raises `BadInput` where one is there already."""
        with self.transaction():
            for new in boards:
                if self.board(new.device) is not None:
                    raise BadInput(f"{new.device} is in this fleet already; nothing was added")
                self.write(
                    "INSERT INTO boards (id, board, place, wifi, labels, public_key) VALUES (?, ?, ?, ?, ?, ?)",
                    (new.device, new.board, new.place, new.wifi, json.dumps(dict(new.labels)), new.public_key),
                )

    def add_token(self, device: str, token: bytes, *, expires: float, uses: int = 1) -> None:
        """Keeps the SHA-256 of a new token for `device`, whose earlier ones hold no longer.

        :param expires: unix seconds.
        """
        with self.transaction():
            self.write("DELETE FROM tokens WHERE id = ?", (device,))
            digest = hashlib.sha256(token).digest()
            self.write("INSERT INTO tokens VALUES (?, ?, ?, ?)", (digest, device, expires, uses))


def _board(row: Row) -> RegisteredBoard:
    device, board, place, wifi, labels, *rest = row
    return RegisteredBoard(device, board, place, wifi, json.loads(labels), *rest)
