"""The devices that an aggregator accepts, in one small SQLite file in the run's folder.

A file of its own: the operator changes it while the aggregator runs (`hushfleet devices`), and the run's store is
locked by its one opener. A device is in it because the operator added it, or because enrolment is open and it came.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from hushfleet.errors import BadInput, StoreError

SCHEMA_VERSION = 1
FILE_NAME = "devices.sqlite"

_SCHEMA = """
CREATE TABLE devices (
    id TEXT PRIMARY KEY, public_key BLOB UNIQUE, pinned INTEGER NOT NULL, blocked TEXT,
    board TEXT NOT NULL DEFAULT '', rounds INTEGER NOT NULL DEFAULT 0, last_seen REAL
) WITHOUT ROWID;
CREATE TABLE knocks (
    id TEXT NOT NULL, public_key BLOB NOT NULL, count INTEGER NOT NULL, last_seen REAL NOT NULL,
    PRIMARY KEY (id, public_key)
) WITHOUT ROWID;
"""

_SELECT = "SELECT id, public_key, pinned, blocked, board, rounds, last_seen FROM devices"


@dataclass(frozen=True)
class KnownDevice:
    """A device of the register.

    :param public_key: None: the broker's access list binds the id to a certificate, and no key was seen yet.
    :param pinned: the key was taken at first sight, not given by the operator.
    :param blocked: why it is blocked; None for a device that may take part.
    :param board, rounds, last_seen: what the aggregator noted; unix seconds.
    """

    device: str
    public_key: bytes | None = None
    pinned: bool = False
    blocked: str | None = None
    board: str = ""
    rounds: int = 0
    last_seen: float | None = None

    @property
    def state(self) -> str:
        if self.blocked is not None:
            return "blocked"
        if self.public_key is None:
            return "expected"
        return "pinned" if self.pinned else "known"


@dataclass(frozen=True)
class Knock:
    """A device that asked to take part and was not accepted.

    :param count: how often with this key; :param last_seen: unix seconds.
    """

    device: str
    public_key: bytes
    count: int
    last_seen: float


class DeviceRegister:
    """The register of a run folder. Many processes may have it open; each change is one transaction.

    :param folder: made if it is not there, as the file is.
    :param durable: False leaves syncing to the operating system: for simulations only.

    Raises `StoreError` for a file that is damaged or of another version.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self.path = self.file_of(folder)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the folder {self.path.parent} cannot be made: {error.strerror}") from error
        with self._errors():
            self._db = sqlite3.connect(self.path, isolation_level=None, timeout=5.0)
        try:
            with self._errors():
                self._open(durable)
        except BaseException:
            self._db.close()
            raise
        self._seen_version = self._data_version()

    @staticmethod
    def file_of(folder: Path) -> Path:
        return Path(folder) / FILE_NAME

    @classmethod
    def exists(cls, folder: Path) -> bool:
        return cls.file_of(folder).exists()

    def _open(self, durable: bool) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise StoreError(f"{self.path} has schema {version}, this Hushfleet reads {SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> DeviceRegister:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.path} cannot be used: {error}") from error

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    def _data_version(self) -> int:
        """Another number after each change by another opener, and after no change of our own."""
        with self._errors():
            return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def was_changed(self) -> bool:
        """Whether another process has changed it since the last call."""
        before, self._seen_version = self._seen_version, self._data_version()
        return before != self._seen_version

    # devices

    def devices(self) -> list[KnownDevice]:
        """By id."""
        with self._errors():
            return [_known(row) for row in self._db.execute(f"{_SELECT} ORDER BY id")]

    def device(self, device: str) -> KnownDevice | None:
        with self._errors():
            row = self._db.execute(f"{_SELECT} WHERE id = ?", (device,)).fetchone()
        return None if row is None else _known(row)

    def add(self, devices: Iterable[KnownDevice]) -> None:
        """Devices that the operator accepts, or has blocked.

        One that is known already stays as it is, so that a list may be given again at each start; a key is added
        where none was known. Raises `BadInput`, and adds none of them, where two devices would have one key, or a
        device two keys.
        """
        with self._transaction():
            for new in devices:
                device, key = new.device, new.public_key
                row = self.device(device)
                if row is not None and row.public_key is not None and key not in (None, row.public_key):
                    raise BadInput(
                        f"{device} is known with the key {row.public_key.hex()}, not with {key.hex()}. If its card was "
                        f"flashed anew: hushfleet devices forget {self.path.parent} {device}"
                    )
                owner = self._db.execute("SELECT id FROM devices WHERE public_key = ?", (key,)).fetchone()
                if owner is not None and owner[0] != device:
                    raise BadInput(f"{device} cannot have the key of {owner[0]}, {key.hex()}; no two may share one")
                self._db.execute(
                    "INSERT INTO devices (id, public_key, pinned, blocked) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) "
                    "DO UPDATE SET public_key = ifnull(?2, public_key), pinned = (?3 AND pinned)",
                    (device, key, new.pinned, new.blocked),
                )
                self._db.execute("DELETE FROM knocks WHERE id = ?", (device,))

    def take_over(self, devices: Iterable[KnownDevice]) -> None:
        """Puts whole rows, as they are; those of devices that are known already stay."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO devices (id, public_key, pinned, blocked) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [(row.device, row.public_key, row.pinned, row.blocked) for row in devices],
            )

    def pin(self, keys: Mapping[str, bytes], *, may_add: bool) -> None:
        """Keys that were seen for the first time, in one transaction.

        :param may_add: also of devices that are not in the register.
        """
        with self._transaction():
            first_seen = "UPDATE devices SET public_key = ?2, pinned = 1 WHERE id = ?1 AND public_key IS NULL"
            self._db.executemany(first_seen, keys.items())
            if may_add:
                added = "INSERT INTO devices (id, public_key, pinned) VALUES (?, ?, 1) ON CONFLICT (id) DO NOTHING"
                self._db.executemany(added, keys.items())

    def forget(self, device: str) -> bool:
        """Removes the device and its key; False if it was not there."""
        with self._transaction():
            return self._db.execute("DELETE FROM devices WHERE id = ?", (device,)).rowcount > 0

    def block(self, device: str, reason: str) -> None:
        """Also a device that was never seen."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO devices (id, pinned, blocked) VALUES (?1, 0, ?2) "
                "ON CONFLICT (id) DO UPDATE SET blocked = ?2",
                (device, reason),
            )

    def unblock(self, device: str) -> bool:
        """False if it was not blocked."""
        with self._transaction():
            changed = "UPDATE devices SET blocked = NULL WHERE id = ? AND blocked IS NOT NULL"
            return self._db.execute(changed, (device,)).rowcount > 0

    # what the aggregator notes for the operator

    def note(
        self, *, seen: Mapping[str, tuple[str, float]], rounds: Mapping[str, int], knocks: Iterable[Knock]
    ) -> None:
        """In one transaction: who was seen (board or "", and unix seconds), accepted rounds, and all knocks anew."""
        with self._transaction():
            self._db.executemany(
                "UPDATE devices SET board = CASE ?2 WHEN '' THEN board ELSE ?2 END, last_seen = ?3 WHERE id = ?1",
                [(device, *fields) for device, fields in seen.items()],
            )
            self._db.executemany("UPDATE devices SET rounds = ?2 WHERE id = ?1", rounds.items())
            self._db.execute("DELETE FROM knocks")
            self._db.executemany(
                "INSERT INTO knocks SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS "
                "(SELECT 1 FROM devices WHERE id = ?1 AND public_key = ?2 AND blocked IS NULL)",
                [astuple(knock) for knock in knocks],
            )

    def knocks(self) -> list[Knock]:
        """The latest first."""
        with self._errors():
            return [Knock(*row) for row in self._db.execute("SELECT * FROM knocks ORDER BY last_seen DESC, id")]


def _known(row: tuple[str, bytes | None, int, str | None, str, int, float | None]) -> KnownDevice:
    device, key, pinned, *rest = row
    return KnownDevice(device, key, bool(pinned), *rest)
