"""SQL on a store that is open: what a damaged disk, another program or an earlier client has left in it; and a ledger
in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.privacy.ledger import Ledger


def sql(store: DeviceStore, statement: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
    """Runs the statement by a connection of its own; returns the rows."""
    with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
        return connection.execute(statement, parameters).fetchall()


@contextmanager
def memory_ledger() -> Iterator[Ledger]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        ledger = Ledger(connection, device="board-7")
        ledger.create_schema()
        yield ledger
