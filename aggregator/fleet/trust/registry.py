"""The registry of a fleet in one SQLite file: boards, tokens, certificates, releases, roll-outs.

It decides which boards belong to the fleet, and no aggregator may write or read it: that gets a signed list of the
members (`access.apply`). Commands and the fleet service have it open at the same time; each change is one transaction.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from hushfleet.aggregator.fleet.trust.authority import Issued, tls_key_of
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Board, with_blocked
from hushfleet.errors import BadInput, Malformed, StoreError
from hushfleet.schema import pack, unpack
from hushfleet.sqlite_file import Row, SqliteFile
from hushfleet.wire.format.fleet_messages import token_seed
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.identity import Identity

SCHEMA_VERSION = 4
FILE_NAME = "fleet.sqlite"
MAX_REFUSED_REQUESTS = 8
LISTED_AFTER_END_S = 86400.0
KEPT_AFTER_END_S = 366 * 86400.0  # a clock that is ahead by less than this, and then corrected, does no harm
MOST_HEALTHS = 1 << 17  # so many messages stay unpacked
_WHILE_BLOCKED, _FOR_GOOD = 1, 2  # how a certificate is revoked

_SCHEMA = """
CREATE TABLE boards (
    id TEXT PRIMARY KEY, board TEXT NOT NULL, place TEXT NOT NULL DEFAULT '', wifi TEXT NOT NULL DEFAULT '',
    labels TEXT NOT NULL DEFAULT '{}', public_key BLOB UNIQUE, standing TEXT NOT NULL DEFAULT 'new', reason TEXT,
    certificate_end REAL, enrolled REAL,
    state TEXT NOT NULL DEFAULT 'absent', session INTEGER NOT NULL DEFAULT 0, version TEXT NOT NULL DEFAULT '',
    seen REAL, health BLOB, health_at REAL
) WITHOUT ROWID;
CREATE TABLE tokens (
    public_key BLOB PRIMARY KEY, id TEXT NOT NULL REFERENCES boards ON DELETE CASCADE, expires REAL NOT NULL,
    uses_left INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE processes (name TEXT PRIMARY KEY, state TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE certificates (
    serial TEXT PRIMARY KEY, id TEXT NOT NULL, public_key BLOB NOT NULL, tls_key BLOB NOT NULL, pem BLOB NOT NULL,
    not_after REAL NOT NULL, revoked INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE refused_requests (
    id TEXT NOT NULL, public_key BLOB NOT NULL, has_token INTEGER NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (id, public_key)
) WITHOUT ROWID;
CREATE TABLE releases (
    version TEXT NOT NULL, platform TEXT NOT NULL, file TEXT NOT NULL, head BLOB NOT NULL, digest BLOB NOT NULL,
    size INTEGER NOT NULL, PRIMARY KEY (version, platform)
) WITHOUT ROWID;
CREATE TABLE rollouts (
    number INTEGER PRIMARY KEY, version TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    stage INTEGER NOT NULL DEFAULT 0, began REAL NOT NULL
);
CREATE TABLE offered (
    number INTEGER NOT NULL, id TEXT NOT NULL, at REAL NOT NULL, good_at REAL, PRIMARY KEY (number, id)
) WITHOUT ROWID;
"""

# Version 1 had SHA-256 of tokens, with which anyone who could read them could enrol, and of signing requests.
_UPGRADES = {
    1: (
        "PRAGMA secure_delete = ON",
        "ALTER TABLE tokens RENAME COLUMN digest TO public_key",
        "UPDATE tokens SET public_key = key_of_token_digest(public_key)",
        "ALTER TABLE certificates RENAME COLUMN request TO tls_key",
        "UPDATE certificates SET tls_key = tls_key_of(pem)",
    ),
    2: ("ALTER TABLE knocks RENAME TO refused_requests",),
    3: (
        "ALTER TABLE boards RENAME COLUMN state TO standing",
        "ALTER TABLE boards ADD COLUMN state TEXT NOT NULL DEFAULT 'absent'",
        "ALTER TABLE boards ADD COLUMN session INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE boards ADD COLUMN version TEXT NOT NULL DEFAULT ''",
        *(f"ALTER TABLE boards ADD COLUMN {name}" for name in ("seen REAL", "health BLOB", "health_at REAL")),
        "UPDATE boards SET (state, session, version, seen, health, health_at) = (SELECT sightings.state, "
        "sightings.session, sightings.version, sightings.seen, sightings.health, sightings.health_at FROM sightings "
        "WHERE sightings.id = boards.id AND sightings.public_key = boards.public_key) "
        "WHERE (id, public_key) IN (SELECT id, public_key FROM sightings)",
        "DROP TABLE sightings",
    ),
}

_HEARD = "state, session, version, seen, health, health_at"
_FIELDS = tuple(each.name for each in fields(Board))[:16]
"""The fields of `Board` that the registry has, in the order of `_COLUMNS`."""
_COLUMNS = f"id, board, place, wifi, labels, public_key, standing, reason, certificate_end, enrolled, {_HEARD}"


@dataclass(frozen=True)
class RefusedRequest:
    """A request for a certificate that was not granted.

    :param has_token: whether the board has shown a valid token.
    :param at: unix seconds.
    """

    device: str
    public_key: bytes
    has_token: bool
    reason: str
    at: float


class FleetRegistry(SqliteFile):
    """The registry of the fleet in `folder`. Raises `StoreError` for a file that is damaged or of another version."""

    def __init__(self, folder: Path) -> None:
        functions = {"key_of_token_digest": _key_of_token_digest, "tls_key_of": tls_key_of}
        super().__init__(
            Path(folder) / FILE_NAME, schema=_SCHEMA, version=SCHEMA_VERSION, upgrades=_UPGRADES, functions=functions
        )
        self._seen_version = self.row("PRAGMA data_version")

    def was_changed(self) -> bool:
        """Returns whether another connection has changed the registry since the last call."""
        before, self._seen_version = self._seen_version, self.row("PRAGMA data_version")
        return before != self._seen_version

    def boards(self) -> list[Board]:
        """Returns all boards, sorted by id."""
        return [_board(row) for row in self.rows(f"SELECT {_COLUMNS} FROM boards ORDER BY id")]

    def board(self, device: str) -> Board | None:
        row = self.row(f"SELECT {_COLUMNS} FROM boards WHERE id = ?", (device,))
        return None if row is None else _board(row)

    def key_of(self, device: str) -> bytes | None:
        """Returns the key that must have signed a board's messages; None: none is known, so they are refused."""
        found = self.board(device)
        return None if found is None else found.public_key

    def hear(self, boards: Iterable[Board]) -> None:
        """Stores what was heard of boards; call it inside `transaction`. A board that has another key now has none."""
        self.write_all(
            f"UPDATE boards SET ({_HEARD}) = (?, ?, ?, ?, ?, ?) WHERE id = ? AND public_key = ?",
            [(*_heard(board), board.device, board.public_key) for board in boards],
        )

    def processes(self) -> dict[str, tuple[str, float]]:
        """Returns the state of the fleet's processes, and since when it is known (unix seconds)."""
        return {name: (state, at) for name, state, at in self.rows("SELECT name, state, at FROM processes")}

    def note_processes(self, states: Mapping[str, str], *, at: float) -> None:
        """Notes the state of processes, known at `at` (unix seconds); call it inside `transaction`."""
        rows = [(name, state, at) for name, state in states.items()]
        self.write_all("INSERT OR REPLACE INTO processes VALUES (?, ?, ?)", rows)

    def add(self, boards: Iterable[Board], *, along: Callable[[], None] | None = None) -> None:
        """Adds all boards or none. Raises `BadInput` if the fleet has one of them, or its key, already.

        :param along: called after all checks; if it raises, no board is added.
        """
        with self.transaction():
            for new in boards:
                if self.board(new.device) is not None:
                    raise BadInput(f"{new.device} is in this fleet already; nothing was added")
                same_key = self.row("SELECT id FROM boards WHERE public_key = ?", (new.public_key,))
                if same_key is not None:
                    raise BadInput(
                        f"{new.device} has the key of {same_key[0]}; each board needs a key of its own; "
                        "nothing was added"
                    )
                self.write(
                    "INSERT INTO boards (id, board, place, wifi, labels, public_key) VALUES (?, ?, ?, ?, ?, ?)",
                    (new.device, new.board, new.place, new.wifi, json.dumps(dict(new.labels)), new.public_key),
                )
            if along is not None:
                along()

    def add_token(self, device: str, token: bytes, *, expires: float) -> None:
        """Stores the public key of a new token for `device`; its earlier tokens become invalid.

        :param expires: unix seconds.
        """
        with self.transaction():
            self.write("DELETE FROM tokens WHERE id = ?", (device,))
            key = _key_of_token_digest(hashlib.sha256(token).digest())
            self.write("INSERT INTO tokens VALUES (?, ?, ?, 1)", (key, device, expires))

    def tokens(self, device: str, *, now: float) -> list[bytes]:
        """Returns the public keys of valid tokens: a proof of a token is a signature by its key."""
        query = "SELECT public_key FROM tokens WHERE id = ? AND expires > ? AND uses_left > 0"
        return [key for (key,) in self.rows(query, (device, now))]

    # certificates

    def certificates(self, device: str, public_key: bytes, tls_key: bytes, *, now: float) -> list[bytes]:
        """Returns the valid certificates for a TLS key of the board, PEM.

        :param tls_key: SHA-256 of the TLS key.
        """
        query = (
            "SELECT pem FROM certificates WHERE id = ? AND public_key = ? AND tls_key = ? AND not_after > ? "
            "AND revoked = 0 ORDER BY not_after DESC"
        )
        return [pem for (pem,) in self.rows(query, (device, public_key, tls_key, now))]

    def tls_keys(self, device: str, public_key: bytes, *, now: float) -> set[bytes]:
        """Returns SHA-256 of the TLS keys for which the board has valid certificates."""
        query = (
            "SELECT DISTINCT tls_key FROM certificates WHERE id = ? AND public_key = ? AND not_after > ? "
            "AND revoked = 0"
        )
        return {key for (key,) in self.rows(query, (device, public_key, now))}

    def grant(
        self,
        board: Board,
        public_key: bytes,
        issued: Issued,
        *,
        tls_key: bytes,
        token: bytes | None,
        now: float,
    ) -> None:
        """Enrols the board with this key and certificate, and uses up one use of the token.

        :param board: as it was when this was decided. Raises `StoreError` if its operator has changed it since.
        :param tls_key: SHA-256 of the TLS key that the certificate is for.
        :param token: public key of the token; None if none was needed.
        """
        device = board.device
        with self.transaction():
            if self.board(device) != board:
                raise StoreError(f"{device} was changed while its certificate was made; it asks again")
            self.write(
                "INSERT INTO certificates VALUES (?, ?, ?, ?, ?, ?, 0)",
                (f"{issued.serial:x}", device, public_key, tls_key, issued.pem, issued.not_after),
            )
            self.write(
                "UPDATE boards SET public_key = ?2, standing = 'enrolled', reason = NULL, certificate_end = ?3, "
                "enrolled = ifnull(enrolled, ?4) WHERE id = ?1",
                (device, public_key, issued.not_after, now),
            )
            if token is not None:
                self.write("UPDATE tokens SET uses_left = uses_left - 1 WHERE public_key = ?", (token,))
            self.write("DELETE FROM certificates WHERE not_after <= ?", (now - KEPT_AFTER_END_S,))
            self.write("DELETE FROM tokens WHERE uses_left < 1 OR expires <= ?", (now,))
            self.write("DELETE FROM refused_requests WHERE id = ?", (device,))

    def revoked_serials(self, *, now: float) -> set[int]:
        """Returns the revocation list's serials. One that ended a day ago is left out, because its date refuses it."""
        query = "SELECT serial FROM certificates WHERE revoked AND not_after > ?"
        return {int(serial, 16) for (serial,) in self.rows(query, (now - LISTED_AFTER_END_S,))}

    def locked_out(self) -> list[str]:
        """Returns ids that must not connect: blocked, forgotten, or with a revoked card that has no successor yet."""
        query = (
            "SELECT id FROM boards WHERE standing = 'blocked' UNION "
            "SELECT id FROM certificates WHERE revoked AND id NOT IN "
            "(SELECT id FROM boards WHERE standing = 'enrolled')"
        )
        return sorted(device for (device,) in self.rows(query))

    # requests that were not granted

    def add_refused_request(self, refused: RefusedRequest) -> None:
        """Stores a refused request; keeps `MAX_REFUSED_REQUESTS` per board: with a token first, then the latest."""
        with self.transaction():
            self.write("INSERT OR REPLACE INTO refused_requests VALUES (?, ?, ?, ?, ?)", astuple(refused))
            self.write(
                "DELETE FROM refused_requests WHERE id = ?1 AND public_key NOT IN "
                "(SELECT public_key FROM refused_requests WHERE id = ?1 ORDER BY has_token DESC, at DESC LIMIT ?2)",
                (refused.device, MAX_REFUSED_REQUESTS),
            )
            self.write(
                "UPDATE boards SET standing = 'pending', reason = ?2 WHERE id = ?1 AND standing IN ('new', 'pending')",
                (refused.device, refused.reason),
            )

    def refused_requests(self, device: str | None = None) -> list[RefusedRequest]:
        """Returns refused requests of one board or of all: by id, then those with a token first, then the latest."""
        query = "SELECT * FROM refused_requests WHERE ?1 IS NULL OR id = ?1 ORDER BY id, has_token DESC, at DESC"
        return [
            RefusedRequest(name, key, bool(token), reason, at)
            for name, key, token, reason, at in self.rows(query, (device,))
        ]

    # decisions of the operator

    def approve(self, device: str, public_key: bytes) -> None:
        """Accepts the board's key, so that it gets a certificate when it asks again.

        Raises `BadInput` for the key of another board.
        """
        with self.transaction():
            owner = self.row("SELECT id FROM boards WHERE public_key = ? AND id != ?", (public_key, device))
            if owner is not None:
                raise BadInput(f"{device} asks with the key of {owner[0]}; each board needs a key of its own")
            self.write("UPDATE boards SET public_key = ?2, reason = NULL WHERE id = ?1", (device, public_key))
            self.write("DELETE FROM refused_requests WHERE id = ?", (device,))

    def expect_new_card(self, device: str) -> None:
        """Revokes the former key and its certificates, and accepts the board's next card.

        No card is written for a board that is locked out, so its token belongs to a former card and is removed here.
        """
        with self.transaction():
            self._drop_card(device)
            blocked = "SELECT id FROM boards WHERE id = ? AND standing = 'blocked'"
            self.write(f"DELETE FROM tokens WHERE id IN ({blocked})", (device,))
            self.write(
                "UPDATE boards SET public_key = NULL, standing = 'new', reason = NULL, certificate_end = NULL, "
                "enrolled = NULL WHERE id = ?",
                (device,),
            )

    def block(self, device: str, reason: str) -> None:
        with self.transaction():
            self.write("UPDATE certificates SET revoked = max(revoked, ?2) WHERE id = ?1", (device, _WHILE_BLOCKED))
            self.write("UPDATE boards SET standing = 'blocked', reason = ?2 WHERE id = ?1", (device, reason))

    def unblock(self, device: str) -> None:
        with self.transaction():
            self.write("UPDATE certificates SET revoked = 0 WHERE id = ?1 AND revoked = ?2", (device, _WHILE_BLOCKED))
            self.write(
                "UPDATE boards SET reason = NULL, standing = CASE WHEN enrolled IS NULL THEN 'new' ELSE 'enrolled' END "
                "WHERE id = ? AND standing = 'blocked'",
                (device,),
            )

    def forget(self, device: str) -> None:
        """Removes the board from the fleet. Its charges stay in the aggregator's register."""
        with self.transaction():
            self._drop_card(device)
            for table in ("tokens", "refused_requests", "boards"):
                self.write(f"DELETE FROM {table} WHERE id = ?", (device,))

    def _drop_card(self, device: str) -> None:
        """Revokes the board's certificates, and removes what was heard and offered: the next card has nothing yet."""
        self.write("UPDATE certificates SET revoked = ?2 WHERE id = ?1", (device, _FOR_GOOD))
        self.write("DELETE FROM offered WHERE id = ?", (device,))
        self.write(f"UPDATE boards SET ({_HEARD}) = ('absent', 0, '', NULL, NULL, NULL) WHERE id = ?", (device,))


def _key_of_token_digest(digest: bytes) -> bytes:
    """Returns the public key of the token with this SHA-256."""
    return Identity.from_bytes(token_seed(digest)).public_key


def _heard(board: Board) -> tuple[Any, ...]:
    """Returns the values of `_HEARD`."""
    packed = board.health and pack(board.health)
    return board.state, board.session, board.version, board.seen, packed, board.health_at


def _board(row: Row) -> Board:
    found = dict(zip(_FIELDS, row, strict=True))
    return Board(**found | {"labels": json.loads(found["labels"]), "health": _health(found["health"])})


@lru_cache(MOST_HEALTHS)
def _health(body: bytes | None) -> Health | None:
    """Unpacks a health message; returns None also for one of another version."""
    with contextlib.suppress(Malformed):
        return None if body is None else unpack(Health, body, what="the health")
    return None


def boards_of(folder: FleetFolder) -> list[Board]:
    """Returns the boards of a fleet, with those that its aggregator has blocked. Raises `StoreError`."""
    with FleetRegistry(folder.path) as registry:
        boards = registry.boards()
    if not boards or not ActivityStore.exists(folder.aggregator):
        return boards
    with ActivityStore(folder.aggregator) as activity:
        return with_blocked(boards, activity.blocked())
