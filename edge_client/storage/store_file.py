"""Handles the store's file: it is created completely or not at all, and one process at a time uses it.

It is created under another name, synced and renamed, so a file with the right name is always complete. A file of an
earlier schema is upgraded in one transaction.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hushfleet.at_need import at_need
from hushfleet.atomic_file import PART_SUFFIX, sync_folder
from hushfleet.edge_client.storage.state_files import LOCK_SUFFIX, REMNANTS, SQLITE_SUFFIXES
from hushfleet.edge_client.storage.tables import SCHEMA
from hushfleet.errors import LostStore, StoreError
from hushfleet.privacy.ledger import Ledger
from hushfleet.wire.format.identity import Identity

if TYPE_CHECKING:
    from hushfleet.edge_client.storage import migrations
else:  # not in `optional`, which names users of the store
    migrations = at_need("hushfleet.edge_client.storage.migrations")

SCHEMA_VERSION = b"6"
OLDEST_SCHEMA = b"1"  # the oldest that `migrations` upgrades

# A simulation writes thousands of stores. Larger pages make a model's bytes cheaper, and each of the seventeen tables
# and indexes has at least one. A board keeps SQLite's small ones: most commits change a few bytes, and flash wears.
_SIMULATED_PAGE_BYTES = 1 << 13


class StoreLock:
    """A lock that is held while the process lives; the kernel releases it after any crash. Raises `StoreError`.

    Its file is empty until there is a store: after an interrupted first start it is empty, beside a lost store not.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(_beside(path, LOCK_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreError(
                f"the store {path} is in use by another process (pid {owner}); "
                "stop that client, or give this one its own state_dir"
            ) from error

    def claim(self, *, durable: bool) -> None:
        """Writes the holder's pid, which also marks that there is a store; called once it exists. Raises `OSError`."""
        first = os.fstat(self._fd).st_size == 0
        os.pwrite(self._fd, str(os.getpid()).ljust(32).encode(), 0)  # truncating takes milliseconds
        if first and durable:
            os.fsync(self._fd)

    def release(self) -> None:
        os.close(self._fd)


def is_in_use(path: Path) -> bool:
    """Returns whether a client has the store open. It does not try the lock: a client that starts now could fail."""
    with contextlib.suppress(OSError):
        inode = str(_beside(path, LOCK_SUFFIX).stat().st_ino)
        held = (line.split() for line in Path("/proc/locks").read_text("ascii").splitlines())
        return any(words[1] == "FLOCK" and words[5].endswith(f":{inode}") for words in held if len(words) > 5)
    return False


def connect(path: Path) -> sqlite3.Connection:
    """Opens a connection with explicit transactions; one thread at a time owns it, though this may change."""
    return sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)


def way_on(path: Path, *, device: str, in_fleet: bool) -> str:
    """Returns the steps that a person takes if the store must not be used, or is missing."""
    if in_fleet:
        return (
            f"on the operator's machine run `hushfleet fleet renew DIR {device} --new-card`, so that the next card "
            f"counts what was spent; then write the card anew with `hushfleet flash`, or move {path.parent} away on "
            "the board and use `hushfleet push`"
        )
    return (
        f"move {path.parent} away, give the device a new id, and count what the old id has spent as spent: lower "
        "limits.epsilon_server by it (result.json of each aggregator lists it)"
    )


def advice(way_on: str) -> str:
    """Returns the reason why the store is not replaced, and the steps that a person takes."""
    return (
        "It also holds the privacy ledger, so it is not replaced automatically, and an old backup of it would count "
        f"too little: {way_on}"
    )


def is_there(path: Path, *, way_on: str) -> bool:
    """Returns whether there is a store; False before the first start.

    Raises `LostStore` if the store is empty, or missing although its remnants exist.
    """
    if path.exists():
        if path.stat().st_size == 0:
            raise LostStore(f"the store {path} is damaged: it is empty. {advice(way_on)}")
        return True
    if found := _left_of_a_client(path):
        raise LostStore(
            f"the store {path} is missing, but beside it there is still {', '.join(found)}. {advice(way_on)}"
        )
    return False


def _left_of_a_client(path: Path) -> list[str]:
    """Returns the names beside the store's path that only a client with a store leaves there. Raises `OSError`."""
    # its own name may be there as a link to a disk that is not mounted
    left = {path.name, *(path.name + suffix for suffix in SQLITE_SUFFIXES), *REMNANTS}
    lock = _beside(path, LOCK_SUFFIX)
    if lock.exists() and lock.stat().st_size:
        left.add(lock.name)
    names = os.listdir(path.parent) if path.parent.exists() else []
    return sorted(name for name in names if name.removesuffix(PART_SUFFIX) in left)


@contextlib.contextmanager
def held(path: Path, create: Callable[[Path], None], *, way_on: str, durable: bool) -> Iterator[None]:
    """Holds the store's file for this process, and creates it at the first start.

    Raises `StoreError`, `OSError` or `sqlite3.Error`.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = StoreLock(path)
    try:
        if not is_there(path, way_on=way_on):
            create(path)
        lock.claim(durable=durable)
        yield
    finally:
        lock.release()


def create(path: Path, *, device: str, durable: bool, identity: Identity | None) -> None:
    """Creates a store with an empty ledger and a new key, or the given one. Raises `OSError` or `sqlite3.Error`."""
    fresh = _beside(path, ".new")
    for leftover in (fresh, _beside(fresh, "-journal")):
        leftover.unlink(missing_ok=True)
    os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # it will contain a private key
    connection = connect(fresh)
    try:
        if not durable:
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute(f"PRAGMA page_size = {_SIMULATED_PAGE_BYTES}")
        connection.executescript("BEGIN IMMEDIATE;" + SCHEMA)  # one transaction until COMMIT: one sync
        Ledger(connection, device=device).create_schema()
        key = identity or Identity.generate()
        facts = {"schema": SCHEMA_VERSION, "device": device.encode(), "identity": key.to_bytes()}
        connection.executemany("INSERT INTO facts VALUES (?, ?)", facts.items())
        connection.execute("COMMIT")
    finally:
        connection.close()
    os.replace(fresh, path)
    if durable:
        sync_folder(path.parent)


def checked_key(connection: sqlite3.Connection, path: Path, *, device: str, inspect: bool) -> bytes:
    """Returns the private key if the file is intact and has this version and device; upgrades an older version.

    :param inspect: if true, nothing is written, so an older version is refused.

    Raises `sqlite3.Error` for a damaged file, and `StoreError`.
    """
    run = connection.execute
    run("PRAGMA query_only = ON")  # nothing is written to a file that turns out to be damaged
    findings = [row[0] for row in run("PRAGMA quick_check(1)")]
    if findings != ["ok"]:
        raise sqlite3.DatabaseError("; ".join(map(str, findings)))
    facts = dict(run("SELECT name, value FROM facts WHERE name IN ('schema', 'device', 'identity')"))
    if len(facts) < 3 or not all(isinstance(value, bytes) for value in facts.values()):
        raise sqlite3.DatabaseError("it names no device")
    schema, owner = facts["schema"], facts["device"].decode()
    if not inspect and owner == device:
        run("PRAGMA query_only = OFF")
        schema = schema if schema == SCHEMA_VERSION else migrations.bring_up_to_date(connection, schema)
    if schema != SCHEMA_VERSION:
        raise StoreError(
            f"the store {path} has version {schema.decode()}, this client reads {SCHEMA_VERSION.decode()}; "
            "install the matching client"
        )
    if owner != device:
        raise StoreError(
            f"the store {path} belongs to the device {owner!r}, not to {device!r}; give each device its own state_dir"
        )
    return bytes(facts["identity"])


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
