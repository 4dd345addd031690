"""SQL on a store that is open: what a damaged disk, another program or an earlier client has left in it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import Any

from hushfleet.edge_client.storage.store import DeviceStore


def sql(store: DeviceStore, statement: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
    """Runs the statement by a connection of its own; returns the rows."""
    with closing(sqlite3.connect(store.path, isolation_level=None)) as connection:
        return connection.execute(statement, parameters).fetchall()
