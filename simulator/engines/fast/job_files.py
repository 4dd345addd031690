"""Which files of a run folder a job touches, so that it can be done where the folder is not.

A job that is done on this machine opens them in place. One that travels takes copies along and brings back what it
has changed; `whole` makes a store one file that can be copied, whatever a killed process has left beside it.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hushfleet.errors import StoreError

_BESIDE = ("-journal", "-wal", "-shm")


@dataclass(frozen=True)
class JobFiles:
    """Paths in a run folder.

    :param inputs: are only read, and hold the same bytes as long as they are there.
    :param stores: SQLite files, read and changed; they may not exist yet. One job at a time has them.
    :param appended: lines are added at the end, and nothing of them is read.
    """

    inputs: tuple[Path, ...] = ()
    stores: tuple[Path, ...] = ()
    appended: tuple[Path, ...] = ()


class TravellingJob(Protocol):
    """A job that finds all its files under `path`, the run folder, wherever that is.

    A dataclass with a field `path`, or with fields that are such jobs.
    """

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> JobFiles: ...


def travels(item: object) -> bool:
    """Whether it is a `TravellingJob`."""
    return dataclasses.is_dataclass(item) and hasattr(type(item), "files")


def moved(job: Any, path: Path) -> Any:
    """The same job in another run folder."""
    values = {field.name: getattr(job, field.name) for field in dataclasses.fields(job)}
    if "path" in values:
        return dataclasses.replace(job, path=path)
    return dataclasses.replace(job, **{name: moved(each, path) for name, each in values.items() if travels(each)})


def whole(store: Path) -> None:
    """Moves what is still in a journal or a log into the SQLite file, or out of it, and leaves that file alone.

    The caller owns the store. Raises `StoreError` where the file is damaged, or gone while its log is there.
    """
    beside = [store.with_name(store.name + suffix) for suffix in _BESIDE]
    if not any(path.exists() for path in beside):
        return
    if not store.exists():
        raise StoreError(f"{store} is gone, but its journal is still there; put the store back, or begin a new run")
    try:
        with closing(sqlite3.connect(store, isolation_level=None, timeout=1.0)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # rolls back a cut transaction
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"the store {store} is damaged or not readable: {error}") from error
    for path in beside:
        path.unlink(missing_ok=True)  # a finished transaction's journal is kept by journal_mode = PERSIST


def replace_file(path: Path, data: memoryview | bytes) -> None:
    """The file holds all of `data`, or what it held before. For its owner only: a store holds a private key."""
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    with open(part, "xb", opener=_private) as file:
        file.write(data)
    os.replace(part, path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
