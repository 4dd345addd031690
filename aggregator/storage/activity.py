"""Keeps what an aggregator writes about devices, in one small SQLite file: whom it has blocked, charges, strangers.

It is a separate file because the operator changes it while the aggregator runs (`hushfleet fleet`), and the run's
store is locked by the process that has it open. It decides nothing in a fleet: who is a member is in a list that the
fleet signs (`fleet_members`). The run's store has only the session and public state of each device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path

from hushfleet.privacy.charge import Charge
from hushfleet.schema import unpack
from hushfleet.sqlite_file import Row, SqliteFile

SCHEMA_VERSION = 5
FILE_NAME = "devices.sqlite"
FILES = (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm")
"""The file, and the files that SQLite keeps next to it."""

# `devices` are those of a run without a fleet; in a fleet's file it has only those that the aggregator has blocked.
_SCHEMA = """
CREATE TABLE devices (
    id TEXT PRIMARY KEY, public_key BLOB UNIQUE, pinned INTEGER NOT NULL, blocked TEXT
) WITHOUT ROWID;
CREATE TABLE refused_births (
    id TEXT NOT NULL, public_key BLOB NOT NULL, count INTEGER NOT NULL, last_seen REAL NOT NULL,
    PRIMARY KEY (id, public_key)
) WITHOUT ROWID;
"""
# In a fleet: the charges of each id in all runs and with all its cards, as far as the aggregator knows them.
_CHARGES = """
CREATE TABLE charges (
    id TEXT NOT NULL, task TEXT NOT NULL, round INTEGER NOT NULL, charge BLOB NOT NULL, PRIMARY KEY (id, task, round)
) WITHOUT ROWID
"""
_NOTED_AT = "ALTER TABLE charges ADD COLUMN at INTEGER NOT NULL DEFAULT 0"  # unix seconds at which it was first stored
_NEWEST = "CREATE TABLE newest_list (id INTEGER PRIMARY KEY CHECK (id = 0), number INTEGER NOT NULL)"

_UPGRADES = {
    1: (_CHARGES,),
    2: (  # the run's event log has these
        *(f"ALTER TABLE devices DROP COLUMN {name}" for name in ("board", "rounds", "last_seen")),
        "ALTER TABLE knocks RENAME TO refused_births",
    ),
    3: (_NOTED_AT, "UPDATE charges SET at = strftime('%s', 'now')"),  # dates are not known: a period counts all charges
    # until version 4 a fleet's own lock-outs were written here, too
    4: (_NEWEST, "DELETE FROM devices WHERE blocked LIKE 'by the fleet''s operator: %'"),
}


@dataclass(frozen=True)
class RefusedBirth:
    """A device that asked to take part and was not accepted.

    :param count: how often it has asked with this key.
    :param last_seen: unix seconds.
    """

    device: str
    public_key: bytes
    count: int
    last_seen: float


class ActivityStore(SqliteFile):
    """The aggregator's file in a folder. Many processes may have it open; each change is one transaction.

    :param folder: created, together with the file, if it does not exist.
    :param durable: False leaves syncing to the operating system, for simulations only.
    :param wall: unix seconds.

    Raises `StoreError` for a file that is damaged or of another version.
    """

    def __init__(self, folder: Path, *, durable: bool = True, wall: Callable[[], float] = time.time) -> None:
        super().__init__(
            self.file_of(folder),
            schema=f"{_SCHEMA}{_CHARGES};{_NOTED_AT};{_NEWEST}",
            version=SCHEMA_VERSION,
            upgrades=_UPGRADES,
            durable=durable,
        )
        self._seen_version, self._wall = self._data_version(), wall

    @staticmethod
    def file_of(folder: Path) -> Path:
        return Path(folder) / FILE_NAME

    @classmethod
    def exists(cls, folder: Path) -> bool:
        return cls.file_of(folder).exists()

    def _data_version(self) -> Row | None:
        """Returns a value that changes after each change by another process, and never after our own changes."""
        return self.row("PRAGMA data_version")

    def was_changed(self) -> bool:
        """Returns whether another process has changed the file since the last call."""
        before, self._seen_version = self._seen_version, self._data_version()
        return before != self._seen_version

    def state(self) -> tuple[object, ...]:
        """Returns a value that differs after each change, by any process."""
        return self._data_version(), self.changes

    # who is blocked

    def blocked(self) -> dict[str, str]:
        """Returns why each device is blocked that is blocked here, by id."""
        return dict(self.rows("SELECT id, blocked FROM devices WHERE blocked IS NOT NULL"))

    def block(self, device: str, reason: str) -> None:
        """Blocks a device, also one that was never seen."""
        self.write(
            "INSERT INTO devices (id, pinned, blocked) VALUES (?1, 0, ?2) ON CONFLICT (id) DO UPDATE SET blocked = ?2",
            (device, reason),
        )

    def unblock(self, device: str) -> bool:
        """Lifts a block; returns False if there was none."""
        return self.write("UPDATE devices SET blocked = NULL WHERE id = ? AND blocked IS NOT NULL", (device,)) > 0

    # what was spent

    def note_charges(self, task: str, round: int, charges: Mapping[str, bytes], *, certain: bool) -> None:
        """Stores the packed `Charge` of each device.

        :param certain: whether the device has spent it; if it only may have, a stored charge is never replaced.
        """
        do = "UPDATE SET charge = excluded.charge" if certain else "NOTHING"
        with self.transaction():
            self.write_all(
                f"INSERT INTO charges VALUES (?, ?, ?, ?, ?) ON CONFLICT DO {do}",
                [(device, task, round, charge, int(self._wall())) for device, charge in charges.items()],
            )

    def drop_charges(self, task: str, round: int, devices: Iterable[str]) -> None:
        """Drops the charges of devices that declined before they trained."""
        self.drop_rounds(task, [(device, round) for device in devices])

    def drop_rounds(self, task: str, rounds: Iterable[tuple[str, int]]) -> None:
        """Drops charges of a task that were not spent, given by device and round."""
        with self.transaction():
            self.write_all(
                "DELETE FROM charges WHERE id = ? AND task = ? AND round = ?",
                [(device, task, round) for device, round in rounds],
            )

    def charges_between(self, task: str, device: str, after: int, before: int) -> list[tuple[int, bytes]]:
        """Returns (round, packed `Charge`) of a device's stored charges of a task, for rounds between two others."""
        query = "SELECT round, charge FROM charges WHERE id = ? AND task = ? AND round > ? AND round < ?"
        return [(round, charge) for round, charge in self.rows(query, (device, task, after, before))]

    def charges(
        self, device: str, *, after: tuple[str, int] | None = None, at_most: int = -1
    ) -> list[tuple[str, int, bytes]]:
        """Returns (task, round, packed `Charge`) of each round that was or may have been charged, by task and round.

        :param after: only charges after this task and round; :param at_most: at most this number of them, -1: all.
        """
        query = "SELECT task, round, charge FROM charges WHERE id = ? AND (task, round) > (?, ?) ORDER BY task, round"
        rows = self.rows(f"{query} LIMIT ?", (device, *(after or ("", -1)), at_most))
        return [(task, round, charge) for task, round, charge in rows]

    def dated_charges(self, device: str) -> list[tuple[str, int, bytes, int]]:
        """Returns (task, round, packed `Charge`, unix seconds when it was first stored) of each charged round."""
        query = "SELECT task, round, charge, at FROM charges WHERE id = ? ORDER BY at, task, round"
        return [(task, round, charge, at) for task, round, charge, at in self.rows(query, (device,))]

    def charged_devices(self) -> list[str]:
        """Returns the ids that have charges."""
        return [device for (device,) in self.rows("SELECT DISTINCT id FROM charges")]

    def first_charged_at(self, device: str) -> int:
        """Returns when the first charge of the device was stored, unix seconds; 0 without charges."""
        return int(self.rows("SELECT MIN(at) FROM charges WHERE id = ?", (device,))[0][0] or 0)

    def charge_counts(self, device: str, *, since: int = 0, of: str | None = None) -> list[tuple[bytes, int]]:
        """Returns each different packed `Charge` of the device, and how often it was charged.

        :param since: only charges that were stored at this time or later, unix seconds.
        :param of: with a task here, `since` applies only to its charges, and all charges of other tasks count.
        """
        return [
            (packed, rounds)
            for packed, rounds in self.rows(
                "SELECT charge, COUNT(*) FROM charges WHERE id = ?1 AND (at >= ?2 OR task != ?3) GROUP BY charge",
                (device, since, of),
            )
        ]

    def all_charge_counts(self, *, since: int = 0) -> dict[str, list[tuple[bytes, int]]]:
        """Returns the result of `charge_counts` for every device that has such charges, by id."""
        found = dict[str, list[tuple[bytes, int]]]()
        query = "SELECT id, charge, COUNT(*) FROM charges WHERE at >= ? GROUP BY id, charge"
        for device, packed, rounds in self.rows(query, (since,)):
            found.setdefault(device, []).append((packed, rounds))
        return found

    # who was refused

    def put_refused_births(self, refused: Iterable[RefusedBirth]) -> None:
        """Replaces all refused births, and leaves out those of devices that are now accepted."""
        with self.transaction():
            self.write("DELETE FROM refused_births")
            self.write_all(
                "INSERT INTO refused_births SELECT ?1, ?2, ?3, ?4 WHERE NOT EXISTS "
                "(SELECT 1 FROM devices WHERE id = ?1 AND public_key = ?2 AND blocked IS NULL)",
                [astuple(birth) for birth in refused],
            )

    def refused_births(self) -> list[RefusedBirth]:
        """Returns all refused births, the latest first."""
        return [RefusedBirth(*row) for row in self.rows("SELECT * FROM refused_births ORDER BY last_seen DESC, id")]


def counted_charges(counts: Iterable[tuple[bytes, int]]) -> list[Charge]:
    """Joins rounds of equal cost to one charge each, because a board may have hundreds of rounds.

    :param counts: as `ActivityStore.charge_counts` returns them.
    """
    charges = [(unpack(Charge, packed, what="a charge"), rounds) for packed, rounds in counts]
    return [replace(charge, steps=charge.steps * rounds) for charge, rounds in charges]
