"""Keeps the devices that an aggregator accepts, in one small SQLite file in the run's folder.

It is a separate file because the operator changes it while the aggregator runs (`hushfleet fleet`), and the run's
store is locked by the process that has it open. Without a fleet the register alone decides about membership: the
operator adds devices, or they come while enrolment is open. In a fleet one function derives it from the fleet's
registry (`aggregator.fleet.access.derive_register`): the aggregator may neither read nor write the registry, because
anyone who can write it can admit boards. The run's store has only the session and public state of each device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from hushfleet.errors import BadInput
from hushfleet.public_keys import can_have_owner
from hushfleet.sqlite_file import Row, SqliteFile

SCHEMA_VERSION = 4
FILE_NAME = "devices.sqlite"
FILES = (FILE_NAME, f"{FILE_NAME}-wal", f"{FILE_NAME}-shm")
"""The register's file, and the files that SQLite keeps next to it."""

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

_UPGRADES = {
    1: (_CHARGES,),
    2: (  # the run's event log has these
        *(f"ALTER TABLE devices DROP COLUMN {name}" for name in ("board", "rounds", "last_seen")),
        "ALTER TABLE knocks RENAME TO refused_births",
    ),
    3: (_NOTED_AT, "UPDATE charges SET at = strftime('%s', 'now')"),  # dates are not known: a period counts all charges
}

_SELECT = "SELECT id, public_key, pinned, blocked FROM devices"


@dataclass(frozen=True)
class KnownDevice:
    """A device of the register.

    :param public_key: None: the broker's access list binds the id to a certificate, and no key was seen yet.
    :param pinned: whether the key is the first one that was seen, and was not given by the operator.
    :param blocked: why it is blocked; None for a device that may take part.
    """

    device: str
    public_key: bytes | None = None
    pinned: bool = False
    blocked: str | None = None

    @property
    def state(self) -> str:
        if self.blocked is not None:
            return "blocked"
        if self.public_key is None:
            return "expected"
        return "pinned" if self.pinned else "known"


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


class DeviceRegister(SqliteFile):
    """The register of a run folder. Many processes may have it open; each change is one transaction.

    :param folder: created, together with the file, if it does not exist.
    :param durable: False leaves syncing to the operating system, for simulations only.
    :param wall: unix seconds.

    Raises `StoreError` for a file that is damaged or of another version.
    """

    def __init__(self, folder: Path, *, durable: bool = True, wall: Callable[[], float] = time.time) -> None:
        super().__init__(
            self.file_of(folder),
            schema=f"{_SCHEMA}{_CHARGES};{_NOTED_AT}",
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
        """Returns whether another process has changed the register since the last call."""
        before, self._seen_version = self._seen_version, self._data_version()
        return before != self._seen_version

    def state(self) -> tuple[object, ...]:
        """Returns a value that differs after each change, by any process."""
        return self._data_version(), self.changes

    # devices

    def devices(self) -> list[KnownDevice]:
        """Returns all entries, by id."""
        return [_known(row) for row in self.rows(f"{_SELECT} ORDER BY id")]

    def roster_keys(self) -> dict[str, bytes]:
        """Returns the keys of the accepted devices, by id, for a roster.

        An earlier version may have added a device with a key that nobody can own: it can never take part.
        """
        accepted = {row.device: row.public_key for row in self.devices() if row.blocked is None}
        return {device: key for device, key in accepted.items() if key is not None and can_have_owner(key)}

    def device(self, device: str) -> KnownDevice | None:
        row = self.row(f"{_SELECT} WHERE id = ?", (device,))
        return None if row is None else _known(row)

    def add(self, devices: Iterable[KnownDevice]) -> None:
        """Adds devices that the operator accepts, or has blocked.

        A device that is known already stays unchanged, so that a list can be given again at each start; a key is added
        if none was known. Raises `BadInput`, and adds no device, if two devices would have the same key, or one device
        two keys.
        """
        with self.transaction():
            for new in devices:
                device, key = new.device, new.public_key
                row = self.device(device)
                held = None if row is None else row.public_key
                if held is not None and key is not None and key != held:
                    raise BadInput(
                        f"{device} is known with the key {held.hex()}, not with {key.hex()}. If its card was "
                        f"flashed anew: hushfleet fleet forget {self.path.parent} {device}"
                    )
                owner = self.row("SELECT id FROM devices WHERE public_key = ?", (key,))
                if key is not None and owner is not None and owner[0] != device:
                    raise BadInput(f"the key {key.hex()} belongs to {owner[0]}; {device} needs a key of its own")
                self.write(
                    "INSERT INTO devices (id, public_key, pinned, blocked) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) "
                    "DO UPDATE SET public_key = ifnull(?2, public_key), pinned = (?3 AND pinned)",
                    (device, key, new.pinned, new.blocked),
                )
                self.write("DELETE FROM refused_births WHERE id = ?", (device,))

    def approve(self, device: str, public_key: bytes) -> None:
        """Accepts a device that has asked with this key. Raises `BadInput` for the key of another device."""
        self.add([KnownDevice(device, public_key)])

    def take_over(self, devices: Iterable[KnownDevice]) -> None:
        """Inserts whole rows unchanged; rows of devices that are known already stay."""
        with self.transaction():
            self.write_all(
                "INSERT INTO devices (id, public_key, pinned, blocked) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                [(row.device, row.public_key, row.pinned, row.blocked) for row in devices],
            )

    def pin(self, keys: Mapping[str, bytes], *, may_add: bool) -> None:
        """Stores keys that were seen for the first time, in one transaction.

        :param may_add: whether to add devices that are not in the register.
        """
        with self.transaction():
            first_seen = "UPDATE devices SET public_key = ?2, pinned = 1 WHERE id = ?1 AND public_key IS NULL"
            self.write_all(first_seen, keys.items())
            if may_add:
                added = "INSERT INTO devices (id, public_key, pinned) VALUES (?, ?, 1) ON CONFLICT (id) DO NOTHING"
                self.write_all(added, keys.items())

    def forget(self, device: str) -> bool:
        """Removes the device and its key; returns False if it was not there."""
        return self.write("DELETE FROM devices WHERE id = ?", (device,)) > 0

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


def _known(row: Row) -> KnownDevice:
    device, key, pinned, blocked = row
    return KnownDevice(device, key, bool(pinned), blocked)
