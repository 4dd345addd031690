"""Stores that earlier versions of the client wrote are brought up to date, and the ledger is kept to the last bit.

`old_stores` has what the client of an earlier commit left behind after three rounds of two tasks, as SQL text: of each
schema the first and the last client that wrote it.
"""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hushfleet.edge_client.fleet.trial import check_release, drop_copy
from hushfleet.edge_client.storage.round_commit import RoundCommit
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.storage.store_file import OLDEST_SCHEMA, SCHEMA_VERSION
from hushfleet.errors import StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.mechanism import GaussianMechanism
from support.kill import KillPoints, forked

FOLDER = Path(__file__).parent / "old_stores"
DEVICE, SIZE = "greenhouse-07", 24
EPSILON = 4.018825325029768  # of noise multipliers 4, 2.5 and 1.25, at delta 1e-5
CHARGED = [("beans-1", 1, 4.0, 1), ("beans-1", 2, 2.5, 3), ("beans-2", 1, 1.25, 1)]

old = pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.sql")))


def load(name: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FOLDER / f"{name}.sql").read_text())
    return path


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def ledger_of(path: Path, columns: str) -> list[tuple[Any, ...]]:
    return rows(path, f"SELECT {columns} FROM privacy_ledger ORDER BY seq") + rows(
        path, "SELECT * FROM privacy_ledger_head"
    )


def columns_of(path: Path) -> str:
    return ", ".join(row[1] for row in rows(path, "PRAGMA table_info(privacy_ledger)"))


def state_after(round: int) -> PublicState:
    return PublicState(np.arange(SIZE) % 3 == round % 3, round)


def check(path: Path) -> None:
    with DeviceStore(path, device=DEVICE, durable=False) as store:
        entries = [
            (e.task, e.round, e.charge.noise_multiplier, e.charge.noise_split) for e in store.ledger.entries()
        ]  # of a verified chain
        assert entries == CHARGED
        assert store.ledger.epsilon_server(delta=1e-5) == pytest.approx(EPSILON, rel=1e-12)
        assert (store.last_session, store.server_key) == (2, bytes(range(32)))
        assert [store.outbox("beans-1", round).status for round in (1, 2)] == ["acked", "refused:late"]
        assert store.waiting() == [("beans-2", 1)]
        assert store.outbox("beans-2", 1).data == b"\x01" * 40
        state = store.load_state("beans-1")
        assert state.public.digest() == state_after(2).digest()
        np.testing.assert_array_equal(state.own, np.full(SIZE, 2, np.float32))
        np.testing.assert_array_equal(state.private["norms"], [1.5, 2.0])
        assert store.has_been("beans-1", state_after(1).digest())
        assert store.has_been("beans-1", state_after(2).digest())
        assert store.blob(store.global_digest) == b"a global model" * 3


@old
def test_an_old_store_is_brought_up_to_date(name: str, tmp_path: Path) -> None:
    path = load(name, tmp_path / "state" / "store.sqlite")
    columns = columns_of(path)
    before = ledger_of(path, columns)
    check(path)
    check(path)
    assert ledger_of(path, columns) == before, "to the last bit"
    assert rows(path, "SELECT value FROM facts WHERE name = 'schema'") == [(SCHEMA_VERSION,)]
    with DeviceStore(path, device=DEVICE, durable=False) as store:
        store.commit_round(
            RoundCommit(
                task="beans-2",
                round=2,
                charge=GaussianMechanism(3.0).charge(),
                state=DeviceState(state_after(2), np.zeros(SIZE, np.float32)),
                update=b"next",
                public_before=state_after(1).to_bytes(),
            )
        )
        assert len(store.ledger.entries()) == 4


@old
def test_a_release_on_trial_reads_an_old_store_and_leaves_it_as_it_is(name: str, tmp_path: Path) -> None:
    path = load(name, tmp_path / "store.sqlite")
    before = hashlib.sha256(path.read_bytes()).digest()
    copy = check_release(tmp_path, path, device=DEVICE)
    assert copy is not None
    with copy:
        assert len(copy.ledger.entries()) == 3
    drop_copy(tmp_path)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert [each.name for each in tmp_path.iterdir()] == ["store.sqlite"]


@pytest.mark.parametrize(("name", "spread"), [("schema-1-first", 40), ("schema-2-first", 20)])
def test_killed_while_it_is_brought_up_to_date_nothing_is_lost(name: str, spread: int, tmp_path: Path) -> None:
    def play(path: Path) -> None:
        DeviceStore(path, device=DEVICE, durable=False).close()

    points, result = KillPoints(("edge_client/storage", "hushfleet/privacy"), {}), tmp_path / "result"
    calm = load(name, tmp_path / "calm" / "store.sqlite")
    labels = points.labels(lambda: play(calm), result)
    for point in points.chosen(labels, spread=spread):
        path = load(name, tmp_path / str(point) / "store.sqlite")
        points.kill(lambda: play(path), point, result)  # noqa: B023
        assert forked(lambda: check(path), result) == 0, labels[point]  # noqa: B023


def test_each_schema_since_the_oldest_is_here() -> None:
    found = {path.stem.split("-")[1] for path in FOLDER.glob("*.sql")}
    assert found == {str(each) for each in range(int(OLDEST_SCHEMA), int(SCHEMA_VERSION) + 1)}


@pytest.mark.parametrize("version", [b"0", str(int(SCHEMA_VERSION) + 1).encode()])
def test_a_store_of_another_version_is_refused_in_words(version: bytes, tmp_path: Path) -> None:
    path = load("schema-3-first", tmp_path / "store.sqlite")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE facts SET value = ? WHERE name = 'schema'", (version,))
    with pytest.raises(StoreError, match=f"has version {version.decode()}"):
        DeviceStore(path, device=DEVICE)


@pytest.mark.parametrize("name", ["schema-5-last", "schema-6-first"])
def test_the_personalized_head_of_a_board_is_kept_with_the_package_of_its_task(name: str, tmp_path: Path) -> None:
    path = load(name, tmp_path / "store.sqlite")
    with DeviceStore(path, device=DEVICE, durable=False) as store:
        [kept] = store.personalized_models()
        assert (kept.task, kept.package, kept.round) == ("beans-2", store.task_digest, 0)
        assert kept.choice is not None
        assert (kept.choice.images, kept.choice.right) == (20, 16)
        np.testing.assert_array_equal(kept.params, np.arange(6, dtype=np.float32))
