"""The store: one transaction a round, whole after any crash, and never silently replaced."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hushfleet.edge_client.storage import migrations
from hushfleet.edge_client.storage.arrays import pack_arrays, unpack_arrays
from hushfleet.edge_client.storage.round_commit import RoundCommit
from hushfleet.edge_client.storage.store import KEPT_TASKS, DeviceStore
from hushfleet.edge_client.storage.store_file import SCHEMA_VERSION
from hushfleet.errors import CopiedStore, LedgerError, StoreError
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.mechanism import GaussianMechanism
from support.stores import sql

ROOT = Path(__file__).resolve().parents[3]


def charge() -> Charge:
    return GaussianMechanism(2.0).charge()


def state(participations: int, *, size: int = 50, own: bool = True) -> DeviceState:
    mask = np.arange(size) % 3 == 0
    values = np.full(size, participations, np.float32) if own else None
    return DeviceState(PublicState(mask, participations), values, {"norms": np.array([1.5, np.nan])})


def commit(store: DeviceStore, number: int, *, task: str = "t", update: bytes | None = None) -> None:
    store.commit_round(
        RoundCommit(
            task=task,
            round=number,
            charge=charge(),
            state=state(number),
            update=update or bytes([number % 256]) * 1000,
            public_before=state(number - 1).public.to_bytes(),
        )
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.sqlite"


def test_a_committed_round_is_there_after_reopening(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        key = store.identity.public_key
        assert store.load_state("t") is None
        assert store.last_round("t") is None
        commit(store, 1)
    with DeviceStore(path, device="a") as store:
        assert store.identity.public_key == key
        entry = store.outbox("t", 1)
        assert entry.data == b"\x01" * 1000
        assert entry.digest == hashlib.sha256(entry.data).digest()
        assert entry.pending
        assert entry.public_before == state(0).public.to_bytes()
        loaded = store.load_state("t")
        assert loaded.public.participations == 1
        assert loaded.public.digest() == state(1).public.digest()
        np.testing.assert_array_equal(loaded.own, np.full(50, 1, np.float32))
        assert loaded.own.dtype == np.float32
        np.testing.assert_array_equal(loaded.private["norms"], [1.5, np.nan])
        assert [(e.task, e.round, e.payload_digest) for e in store.ledger.entries()] == [("t", 1, entry.digest)]
        assert store.waiting() == [("t", 1)]
        store.set_status("t", 1, "acked")
        assert store.outbox("t", 1).status == "acked"
        assert store.waiting() == []


def test_a_round_is_charged_once(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        commit(store, 1)
        with pytest.raises(LedgerError, match="already charged"):
            commit(store, 1, update=b"other bytes")
        assert store.outbox("t", 1).data == b"\x01" * 1000
        assert store.ledger.rounds_charged() == 1
        commit(store, 2)


def test_old_bytes_go_and_the_ledger_stays(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        for number in (1, 2, 3):
            commit(store, number)
        assert [store.outbox("t", number).data for number in (1, 2)] == [b"", b""]
        assert store.outbox("t", 2).digest == hashlib.sha256(b"\x02" * 1000).digest()
        assert store.outbox("t", 3).data == b"\x03" * 1000
        assert store.ledger.rounds_charged("t") == 3
        assert store.last_round("t") == 3
        for number in range(KEPT_TASKS + 1):
            commit(store, 1, task=f"later-{number}")
        assert store.load_state("t") is None
        assert store.load_state("later-1") is not None
        assert store.ledger.rounds_charged("t") == 3


def test_a_state_before_any_training_has_no_personalized_model(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        store.commit_round(RoundCommit("t", 1, charge(), state(1, own=False), update=b"u", public_before=b"p"))
        assert store.load_state("t").own is None


def test_questions_drop_no_state_of_a_task_that_trains(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        commit(store, 1)
        for number in range(KEPT_TASKS + 1):
            asked = RoundCommit(f"ask-{number}", 1, charge(), state(0, own=False), update=b"u", public_before=b"p")
            store.commit_round(asked)
        assert store.load_state("t") is not None
        assert store.load_state("ask-0") is None
        assert store.load_state("ask-1") is not None


def test_blobs_are_checked_when_stored_and_when_read(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        blob, digest = b"graph" * 100, hashlib.sha256(b"graph" * 100).digest()
        with pytest.raises(StoreError, match="not the blob"):
            store.put_blob(digest, blob + b"!")
        assert store.blob(digest) is None
        store.put_blob(digest, blob)
        assert store.blob(digest) == blob
        sql(store, "UPDATE blobs SET data = ?", (b"x" + blob[1:],))  # a flipped cell
        assert store.blob(digest) is None
        store.put_blob(digest, blob)
        store.drop_blobs(keep={digest})
        assert store.blob(digest) == blob
        store.drop_blobs(keep=set())
        assert store.blob(digest) is None


def test_sessions_grow_and_keys_stay(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        assert [store.next_session(), store.next_session()] == [1, 2]
        assert store.server_key is None
        store.pin_server_key(b"k" * 32)
        store.set_current(task_digest=b"t" * 32, global_digest=None)
    with DeviceStore(path, device="a") as store:
        assert store.next_session() == 3
        assert store.server_key == b"k" * 32
        assert (store.task_digest, store.global_digest) == (b"t" * 32, None)


def test_attempts_count_only_what_ended_abruptly(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        assert [store.count_attempt("round", "t/1") for _ in range(3)] == [1, 2, 3]
        assert store.count_attempt("task", "digest") == 1
    with DeviceStore(path, device="a") as store:
        assert store.count_attempt("round", "t/1") == 4
        store.end_attempt("round")
        assert store.count_attempt("round", "t/1") == 1
        assert store.count_attempt("round", "t/2") == 1


def test_a_full_disk_changes_nothing(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        commit(store, 1)
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages + 4}")
        with pytest.raises(StoreError, match="nothing was changed"):
            commit(store, 2, update=b"\x02" * 100_000)
        assert store.outbox("t", 2) is None
        assert store.outbox("t", 1).data == b"\x01" * 1000
        assert store.load_state("t").public.participations == 1
        assert store.ledger.rounds_charged() == 1
        blob = os.urandom(100_000)
        with pytest.raises(StoreError, match="disk"):
            store.put_blob(hashlib.sha256(blob).digest(), blob)
        store._connection.execute("PRAGMA max_page_count = 100000")
        commit(store, 2, update=b"\x02" * 100_000)
        assert store.ledger.rounds_charged() == 2


def run_script(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_COMMIT) + textwrap.dedent(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


_COMMIT = """
    import hashlib, os, random, resource, signal, sys, time
    from pathlib import Path
    import numpy as np
    from hushfleet.edge_client.storage.round_commit import (RoundCommit)
    from hushfleet.edge_client.storage.store import DeviceStore
    from hushfleet.errors import StoreError
    from hushfleet.methods.state import DeviceState, PublicState
    from hushfleet.privacy.mechanism import GaussianMechanism

    def commit(store, number):
        mask = np.arange(4000) < number
        store.commit_round(RoundCommit(
            task="t", round=number, charge=GaussianMechanism(2.0).charge(),
            state=DeviceState(PublicState(mask, number), np.full(4000, number, np.float32)),
            update=number.to_bytes(4, "big") * 5000,
            public_before=PublicState(mask, number - 1).to_bytes(),
        ))
"""


def test_a_write_error_of_the_file_system_changes_nothing(path: Path) -> None:
    done = run_script(
        """
        store = DeviceStore(Path(sys.argv[1]), device="a")
        commit(store, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = max(p.stat().st_size for p in Path(sys.argv[1]).parent.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 8192, resource.RLIM_INFINITY))
        try:
            commit(store, 2)
        except StoreError as error:
            print("refused:", error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(store.ledger.rounds_charged(), store.outbox("t", 2), store.load_state("t").public.participations)
        commit(store, 2)
        print(store.ledger.rounds_charged())
        """,
        path,
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("refused: could not commit round 2"), done.stderr
    assert lines[1:] == ["1 None 1", "2"]


def test_killed_at_twenty_random_moments_the_rows_always_agree(path: Path) -> None:
    done = run_script(
        """
        path, rng, rounds = Path(sys.argv[1]), random.Random(20), []
        for kill in range(20):
            committed, tell = os.pipe()
            child = os.fork()
            if child == 0:
                with DeviceStore(path, device="a") as store:
                    number = store.last_round("t") or 0
                    while True:
                        number += 1
                        commit(store, number)
                        os.write(tell, b".")
            os.close(tell)
            if kill % 2:  # else it may be killed before it has opened its store
                os.read(committed, 1)
            time.sleep(rng.uniform(0.0, 0.06))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(committed)
            with DeviceStore(path, device="a") as store:
                entries = store.ledger.entries()
                last = store.last_round("t") or 0
                if [e.round for e in entries] != list(range(1, last + 1)):
                    sys.exit(f"ledger {[e.round for e in entries]}, outbox to {last}")
                for entry in entries:
                    if store.outbox("t", entry.round).digest != entry.payload_digest:
                        sys.exit(f"digest of round {entry.round}")
                if last:
                    state, kept = store.load_state("t"), store.outbox("t", last)
                    if kept.data != last.to_bytes(4, "big") * 5000:
                        sys.exit(f"bytes of round {last}")
                    if state.public.participations != last or state.public.mask.sum() != last:
                        sys.exit(f"state of {state.public.participations} after round {last}")
                    if not (state.own == last).all():
                        sys.exit(f"personalized model after round {last}")
                rounds.append(last)
        print(*rounds)
        """,
        path,
    )
    assert done.returncode == 0, done.stderr
    rounds = [int(number) for number in done.stdout.split()]
    assert len(rounds) == 20
    assert rounds == sorted(rounds)
    assert rounds[-1] >= 5  # the kills did fall into running commits


@pytest.mark.parametrize("damage", ["header", "empty", "middle", "text", "name", "kind"])
def test_a_damaged_file_is_reported_and_left_as_it_is(path: Path, damage: str) -> None:
    with DeviceStore(path, device="a") as store:
        for number in range(1, 30):
            commit(store, number, update=os.urandom(3000))
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[:100] = bytes(100)
    elif damage == "empty":
        data = bytearray()
    elif damage == "middle":
        data[4096:20480] = os.urandom(16384)
    elif damage == "name":  # SQLite's message quotes it, and is no UTF-8 then; found by fuzzing
        data = data.replace(b"tablefacts", b"tablef\xc2cts")
    elif damage == "kind":  # of one byte of BLOB (14), a text (15)
        at = data.index(b"schema" + SCHEMA_VERSION) - 1
        assert data[at] == 14
        data[at] = 15
    else:
        data = bytearray(b"this is not a database\n" * 400)
    path.write_bytes(data)
    with pytest.raises(StoreError, match="damaged") as caught:
        DeviceStore(path, device="a")
    assert "not replaced automatically" in str(caught.value)
    assert path.read_bytes() == data


def test_a_half_made_store_is_made_anew(path: Path) -> None:
    path.parent.mkdir()
    path.with_name(path.name + ".new").write_bytes(b"half")
    with DeviceStore(path, device="a") as store:
        assert store.ledger.rounds_charged() == 0
    assert not path.with_name(path.name + ".new").exists()
    assert path.stat().st_mode & 0o077 == 0  # it holds a private key


def test_one_process_at_a_time_but_inspection_beside_it(path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        DeviceStore(path, device="a", inspect=True)
    with DeviceStore(path, device="a") as store:
        commit(store, 1)
        with pytest.raises(StoreError, match=f"in use by another process .pid {os.getpid()}"):
            DeviceStore(path, device="a")
        with DeviceStore(path, device="a", inspect=True) as other:
            assert other.ledger.rounds_charged() == 1
            with pytest.raises(StoreError, match="readonly"):
                other.next_session()
    DeviceStore(path, device="a").close()


def test_a_store_belongs_to_one_device(path: Path) -> None:
    DeviceStore(path, device="a").close()
    with pytest.raises(StoreError, match="belongs to the device 'a'"):
        DeviceStore(path, device="b")


@given(
    st.dictionaries(
        st.text(max_size=10),
        hnp.arrays(
            st.sampled_from([np.float32, np.float64, np.int64, np.bool_, np.dtype(">f8")]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=4,
    )
)
def test_private_arrays_come_back_as_they_were(arrays: dict[str, np.ndarray]) -> None:
    back = unpack_arrays(pack_arrays(arrays))
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype.newbyteorder("=")


def test_private_objects_are_not_stored() -> None:
    with pytest.raises(StoreError, match="only numbers"):
        pack_arrays({"x": np.array(["text"])})


OF_NO_TYPE = b"\x81\xa1a\x93\xa3,f8\x91\x00\xc4\x00"
NO_ARRAYS = [b"\x90", b"\x01", b"\xc0", b"\xc1", b"\x81" * 3000, b"\x81\xa1a\x01", OF_NO_TYPE]


@pytest.mark.parametrize("data", NO_ARRAYS)
def test_bytes_that_are_no_named_arrays_raise_what_load_state_expects(data: bytes) -> None:
    with pytest.raises((TypeError, ValueError), match=r"\w"):
        unpack_arrays(data)


def as_schema_1(path: Path) -> None:
    """What an earlier client has left."""
    connection = sqlite3.connect(path)
    connection.executescript(
        "DROP TABLE own_models; DROP TABLE arrivals; DROP TABLE answers; ALTER TABLE outbox DROP COLUMN context;"
        "DROP TABLE public_digests; ALTER TABLE outbox DROP COLUMN attached_digest;"
        "UPDATE facts SET value = x'31' WHERE name = 'schema';"
    )
    connection.close()


def test_a_store_of_the_first_schema_is_brought_up_to_date(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        for number in (1, 2, 3):
            commit(store, number)
        commit(store, 1, task="u")
        before = store.outbox("t", 3)
        for number in (1, 2, 3):  # an earlier client left them all
            sql(
                store,
                "UPDATE outbox SET public_before = ? WHERE round = ?",
                (state(number - 1).public.to_bytes(), number),
            )
    as_schema_1(path)
    with pytest.raises(StoreError, match="version 1"):
        DeviceStore(path, device="a", inspect=True)
    with DeviceStore(path, device="a") as store:
        known = [store.has_been("t", state(number).public.digest()) for number in range(5)]
        assert known == [True, True, True, True, False]
        assert [store.has_been("u", state(number).public.digest()) for number in range(3)] == [True, True, False]
        entry = store.outbox("t", 3)
        assert (entry.digest, entry.status) == (before.digest, before.status)
        assert entry.may_be(bytes(32))  # it may have been sent in the other form, which nobody noted
        commit(store, 4)
        assert not store.outbox("t", 4).may_be(bytes(32))
        assert store.ledger.rounds_charged() == 5
        ((left,),) = sql(store, "SELECT sum(length(public_before) > 0) FROM outbox")
        assert left == 1, "what an earlier client left is deleted, too"
    with DeviceStore(path, device="a", inspect=True) as store:
        assert store.has_been("t", state(4).public.digest())


def test_a_migration_that_is_interrupted_leaves_the_first_schema(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DeviceStore(path, device="a") as store:
        commit(store, 1)
    as_schema_1(path)
    with monkeypatch.context() as patch:
        patch.setattr(migrations.zlib, "decompress", lambda _: (_ for _ in ()).throw(zlib.error("a bit has flipped")))
        with pytest.raises(StoreError, match="damaged"):
            DeviceStore(path, device="a")
    with DeviceStore(path, device="a") as store:
        assert store.has_been("t", state(1).public.digest())


def test_what_was_sent_in_another_form_is_known_as_the_same_update(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        commit(store, 1)
        entry = store.outbox("t", 1)
        assert entry.may_be(entry.digest)
        assert not entry.may_be(b"x" * 32)
        store.note_attached("t", 1, b"x" * 32)
        assert store.outbox("t", 1).may_be(b"x" * 32)
        assert store.outbox("t", 1).may_be(entry.digest)


def test_a_store_that_has_stopped_is_opened_to_be_looked_at_only(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        assert store.stopped_because is None
        store.stop_for_good("it is a copy")
    for _ in range(2):
        with pytest.raises(CopiedStore, match="it is a copy"):
            DeviceStore(path, device="a")
    with DeviceStore(path, device="a", inspect=True) as store:
        assert store.stopped_because == "it is a copy"


def test_the_newest_start_of_each_aggregator_is_kept(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        assert store.epoch("default/ab") == 0
        store.pin_epoch("default/ab", 7)
        store.pin_epoch("default/cd", 3)
    with DeviceStore(path, device="a") as store:
        assert (store.epoch("default/ab"), store.epoch("default/cd"), store.epoch("other/ab")) == (7, 3, 0)


def test_years_of_rounds_with_masks_do_not_fill_the_card(path: Path) -> None:
    rng, size = np.random.default_rng(0), 80_000
    before, pages = PublicState(np.zeros(size, bool), 0), []
    with DeviceStore(path, device="a") as store:
        for number in range(1, 41):
            after = PublicState(rng.random(size) < 0.5, number)
            left = DeviceState(after, None, {})
            store.commit_round(
                RoundCommit("t", number, charge(), left, update=bytes(100), public_before=before.to_bytes())
            )
            entry = store.outbox("t", number)
            assert entry is not None
            assert entry.public_before == before.to_bytes()
            before = after
            ((count,),) = sql(store, "PRAGMA page_count")
            pages.append(count)
        assert pages[-1] - pages[10] < 30, "not a page a round, where a mask takes three"
        assert store.outbox("t", 39).public_before == b""
