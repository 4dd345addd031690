"""Opens, upgrades and writes a versioned SQLite file in transactions; every failure is a `StoreError`."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushfleet.errors import StoreError, StoreFull

if TYPE_CHECKING:
    from typing import Self

Row = tuple[Any, ...]
_OUTER = "BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"
_INNER = "SAVEPOINT inner_one", "RELEASE inner_one", "ROLLBACK TO inner_one", "RELEASE inner_one"


class SqliteFile:
    """One connection to the file, for one thread. A statement outside `transaction` is a transaction of its own.

    :param schema: the statements that create the file, in one text.
    :param version: the version of `schema`.
    :param upgrades: older version -> the statements that upgrade it to the next version.
    :param functions: functions of one value each, which these statements may call by name.
    :param durable: False leaves syncing to the operating system: for simulations only.
    :param exclusive: locks the file for all others, until it is closed.
    :param page_bytes: the size of a new file's pages; larger ones make large values cheaper.
    :param timeout_s: how long to wait for the lock of another connection.

    Raises `StoreError` for a file that is damaged, locked or of another version.
    """

    def __init__(
        self,
        path: Path,
        *,
        schema: str,
        version: int,
        upgrades: Mapping[int, Sequence[str]] | None = None,
        functions: Mapping[str, Callable[[Any], Any]] | None = None,
        durable: bool = True,
        exclusive: bool = False,
        page_bytes: int = 4096,
        timeout_s: float = 5.0,
    ) -> None:
        self.path = path
        self.durable = durable
        self._errors = _Errors(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"the folder {path.parent} cannot be made: {error.strerror}") from error
        with self._errors:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=timeout_s)
            for name, function in (functions or {}).items():
                self._db.create_function(name, 1, function)
        try:
            self.row(f"PRAGMA page_size = {page_bytes}")
            self._open(schema, version, upgrades or {}, exclusive)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Closes the connection."""
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[Row]:
        """Returns all rows of a query."""
        with self._errors:
            return self._db.execute(query, parameters).fetchall()

    def row(self, query: str, parameters: Sequence[Any] = ()) -> Row | None:
        """Returns the first row; None if there is none."""
        with self._errors:
            row: Row | None = self._db.execute(query, parameters).fetchone()
            return row

    def write(self, statement: str, parameters: Sequence[Any] = ()) -> int:
        """Runs one statement; returns how many rows it has changed."""
        with self._errors:
            return self._db.execute(statement, parameters).rowcount

    def write_all(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        """Runs the statement once for each row; call it inside `transaction`."""
        with self._errors:
            self._db.executemany(statement, rows)

    @property
    def changes(self) -> int:
        """The number of rows that this connection has changed."""
        return self._db.total_changes

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Runs all writes inside it together or not at all; inside another one, they are a part of it. Raises
        `StoreFull` or `StoreError`."""
        outer = self._db.in_transaction
        begin, commit, *undo = _INNER if outer else _OUTER
        with self._errors:
            self._db.execute(begin)
            try:
                yield
                self._db.execute(commit)
            except BaseException:
                # after some errors, for example a full disk, SQLite has already rolled back
                if self._db.in_transaction:
                    for statement in undo:
                        self._db.execute(statement)
                raise

    def _open(self, schema: str, version: int, upgrades: Mapping[int, Sequence[str]], exclusive: bool) -> None:
        if exclusive:
            self.row("PRAGMA locking_mode = EXCLUSIVE")
        # an exclusive connection that need not be durable is faster without a write-ahead log
        self.row(f"PRAGMA journal_mode = {'PERSIST' if exclusive and not self.durable else 'WAL'}")
        self.write(f"PRAGMA synchronous = {'FULL' if self.durable else 'OFF'}")
        with self.transaction():  # an exclusive lock is taken here, and kept
            ((found,),) = self.rows("PRAGMA user_version")
            if self.rows("PRAGMA quick_check(1)") != [("ok",)]:
                raise StoreError(f"{self.path} is damaged; restore a copy, or start a new run in another folder")
            if found == version:
                return
            if found == 0:
                statements = schema.split(";")
            elif found in upgrades:
                statements = [statement for older in range(found, version) for statement in upgrades[older]]
            else:
                raise StoreError(
                    f"{self.path} has schema {found}, this Hushfleet reads {version}; "
                    "finish the run with the version that began it"
                )
            for statement in statements:
                self.write(statement)
            self.write(f"PRAGMA user_version = {version}")


class _Errors:
    """Turns errors of SQLite into `StoreError`; a class, since a generator takes as long as a small statement."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, sqlite3.Error):
            return
        if "full" in str(error):
            raise StoreFull(f"there is no room to write {self._path}: {error}; free some space") from error
        if "locked" in str(error):
            raise StoreError(f"{self._path} is in use by another process; stop it first") from error
        advice = "; is its disk full, or failing?" if "disk I/O" in str(error) else ""
        raise StoreError(f"{self._path} cannot be used: {error}{advice}") from error
