"""Upgrades the store of an earlier version, step by step."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import zlib
from dataclasses import replace

from hushfleet.edge_client.storage import answers, arrivals
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.tables import OWN_MODELS, PUBLIC_DIGESTS
from hushfleet.errors import Malformed
from hushfleet.privacy.ledger import Ledger
from hushfleet.schema import pack, unpack


def bring_up_to_date(connection: sqlite3.Connection, schema: bytes) -> bytes:
    """Upgrades an older schema step by step, each in one transaction. Returns the schema afterwards."""
    steps = (
        (b"1", _keep_public_digests),
        (b"2", _keep_answers),
        (b"3", _keep_times),
        (b"4", _keep_lag),
        (b"5", _keep_personalized_models),
    )
    for older, upgrade in steps:
        if schema == older:
            schema = str(int(older) + 1).encode()
            connection.execute("BEGIN IMMEDIATE")
            upgrade(connection)
            connection.execute("UPDATE facts SET value = ? WHERE name = 'schema'", (schema,))
            connection.execute("COMMIT")
    return schema


def _keep_public_digests(connection: sqlite3.Connection) -> None:
    """Upgrades schema 1, which forgot the public states of earlier rounds."""
    run = connection.execute
    run("ALTER TABLE outbox ADD COLUMN attached_digest BLOB")
    run("UPDATE outbox SET attached_digest = x''")  # it may have been attached; nobody noted it
    run(PUBLIC_DIGESTS)
    states = run("SELECT task, public_before FROM outbox UNION ALL SELECT task, public FROM states").fetchall()
    for task, state in states:
        # `PublicState.digest` of `PublicState.to_bytes`, which needs the model's size to be read as a whole
        try:
            digest = hashlib.sha256(state[:4] + zlib.decompress(state[4:])).digest()[:16]
        except zlib.error as error:
            raise sqlite3.DatabaseError(f"a public state of task {task} does not unpack: {error}") from error
        run("INSERT OR IGNORE INTO public_digests VALUES (?, ?)", (task, digest))


def _keep_answers(connection: sqlite3.Connection) -> None:
    """Upgrades schema 2, which knew no secure aggregation."""
    connection.execute("ALTER TABLE outbox ADD COLUMN context BLOB")
    connection.execute(answers.SCHEMA)


def _keep_times(connection: sqlite3.Connection) -> None:
    """Upgrades schema 3, which knew neither when charges were made nor when samples arrived."""
    connection.execute(arrivals.SCHEMA)
    _keep_lag(connection)


def _keep_lag(connection: sqlite3.Connection) -> None:
    """Upgrades schema 4, which did not know how far the counted time is behind the true time."""
    (device,) = connection.execute("SELECT value FROM facts WHERE name = 'device'").fetchone()
    Ledger(connection, device=device.decode()).upgrade_schema()


def _keep_personalized_models(connection: sqlite3.Connection) -> None:
    """Upgrades schema 5, which kept one personalized head, of the task in use if the device predicted with it."""
    run = connection.execute
    run(OWN_MODELS)
    facts = dict(run("SELECT name, value FROM facts WHERE name IN ('mixture', 'task_digest')"))
    with contextlib.suppress(Malformed):  # a damaged head is made anew
        if len(facts) == 2:
            head = replace(
                unpack(KeptModel, facts["mixture"], what="the personalized head"), package=facts["task_digest"]
            )
            run("INSERT INTO own_models VALUES (?, ?)", (head.task, pack(head)))
    run("DELETE FROM facts WHERE name IN ('mixture', 'own_head')")  # the second up to version 0.3.0
