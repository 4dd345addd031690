"""Stores of 0.3 are brought up to date: the registry with what it has heard, and the aggregator's file of a fleet."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from hushfleet.aggregator.commands.of_fleet import members_of
from hushfleet.aggregator.fleet.trust.access import apply
from hushfleet.aggregator.fleet.trust.registry import FILE_NAME, FleetRegistry
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.schema import pack
from hushfleet.wire.format.health import Health
from hushfleet.wire.format.identity import Identity
from support.desk import make_folder

KEY, FORMER = (Identity.generate().public_key for _ in range(2))
HEALTH = Health("greenhouse-01", 7, "0.3.0", 60, 30, 40, 55, False, None, None, 0, "good")
SCHEMA_3 = """
DROP TABLE boards;
CREATE TABLE boards (
    id TEXT PRIMARY KEY, board TEXT NOT NULL, place TEXT NOT NULL DEFAULT '', wifi TEXT NOT NULL DEFAULT '',
    labels TEXT NOT NULL DEFAULT '{}', public_key BLOB UNIQUE, state TEXT NOT NULL DEFAULT 'new', reason TEXT,
    certificate_end REAL, enrolled REAL
) WITHOUT ROWID;
CREATE TABLE sightings (
    id TEXT PRIMARY KEY, public_key BLOB NOT NULL, state TEXT NOT NULL, session INTEGER NOT NULL,
    version TEXT NOT NULL, seen REAL NOT NULL, health BLOB, health_at REAL
) WITHOUT ROWID;
PRAGMA user_version = 3;
"""


def test_what_a_registry_has_heard_is_a_part_of_each_board(tmp_path: Path) -> None:
    """Of the card that is in use: what was heard of a former key is nothing."""
    folder = make_folder(tmp_path / "fleet", boards=0)
    with contextlib.closing(sqlite3.connect(folder.path / FILE_NAME, isolation_level=None)) as old:
        old.executescript(SCHEMA_3)
        boards = [("greenhouse-01", KEY, "enrolled", None), ("greenhouse-02", FORMER, "blocked", "stolen")]
        row = "INSERT INTO boards (id, board, public_key, state, reason) VALUES (?, 'generic-x86', ?, ?, ?)"
        old.executemany(row, [*boards, ("greenhouse-03", None, "new", None)])
        heard = [("greenhouse-01", KEY, "ready", 7, "0.3.0", 9.0, pack(HEALTH), 8.0)]
        heard += [(f"greenhouse-0{n}", bytes(32), "lost", 2, "0.2.0", 5.0, None, None) for n in (2, 3, 4)]
        old.executemany("INSERT INTO sightings VALUES (?, ?, ?, ?, ?, ?, ?, ?)", heard)
    with FleetRegistry(folder.path) as registry:
        first, second, third = registry.boards()
    assert (first.standing, first.state, first.session, first.version) == ("enrolled", "ready", 7, "0.3.0")
    assert (first.seen, first.health, first.health_at) == (9.0, HEALTH, 8.0)
    assert (second.standing, second.reason, second.state, second.seen) == ("blocked", "stolen", "absent", None)
    assert (third.standing, third.session, third.health) == ("new", 0, None)


def test_the_fleets_lock_outs_leave_the_aggregators_file_and_its_own_stay(tmp_path: Path) -> None:
    """Until version 4 they were copied into it; `unblock` of the fleet would not find them there any more."""
    folder = make_folder(tmp_path / "fleet", boards=3)
    with FleetRegistry(folder.path) as registry:
        names = [board.device for board in registry.boards()]
        keys = [Identity.generate().public_key for _ in names]
        for name, key in zip(names, keys, strict=True):
            registry.write("UPDATE boards SET standing = 'enrolled', public_key = ? WHERE id = ?", (key, name))
        with contextlib.closing(sqlite3.connect(ActivityStore.file_of(folder.aggregator))) as old:
            old.executescript(
                "CREATE TABLE devices (id TEXT PRIMARY KEY, public_key BLOB UNIQUE, pinned INTEGER NOT NULL, blocked "
                "TEXT) WITHOUT ROWID; CREATE TABLE refused_births (id TEXT NOT NULL, public_key BLOB NOT NULL, count "
                "INTEGER NOT NULL, last_seen REAL NOT NULL, PRIMARY KEY (id, public_key)) WITHOUT ROWID; CREATE TABLE "
                "charges (id TEXT NOT NULL, task TEXT NOT NULL, round INTEGER NOT NULL, charge BLOB NOT NULL, at "
                "INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (id, task, round)) WITHOUT ROWID; PRAGMA user_version = 4;"
            )
            why = ("by the fleet's operator: stolen", "its updates were refused in 3 rounds", None)
            old.executemany("INSERT INTO devices VALUES (?, ?, 0, ?)", zip(names, keys, why, strict=True))
            old.execute("INSERT INTO charges VALUES (?, 't-1', 1, x'01', 5)", (names[0],))
            old.commit()
        apply(folder, registry)
    with members_of(folder) as members:
        assert [board.is_blocked for board in members.devices()] == [False, True, False]
        assert members.blocked() == {names[1]: why[1]}
        assert members.charges(names[0]) == [("t-1", 1, b"\1")]
