"""The aggregator's store: transactions, second openers, damage, full disks, and checkpoints."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import FILE_NAME, AggregatorStore, ChargeRow, UpdateRow, refuse_used
from hushfleet.errors import BadInput, StoreError, StoreFull
from hushfleet.params import ParamLayout

LAYOUT = ParamLayout(("a.weight", "a.bias", "b.weight"), ((2, 3), (2,), (4,)))
KEY = bytes(range(32))


@pytest.fixture
def store(tmp_path: Path) -> AggregatorStore:
    return AggregatorStore(tmp_path / "run", durable=False)


def charge(device: str, round: int, **changes: float) -> ChargeRow:
    row = ChargeRow(
        round=round,
        device=device,
        unit="device",
        adjacency="add or remove",
        noise_multiplier=1.5,
        noise_split=3,
        sample_rate=1.0,
        steps=1,
        device_rounds=1,
        device_epsilon=2.0,
    )
    return replace(row, **changes)


def update_row(device: str, digest: bytes = b"d" * 32) -> UpdateRow:
    return UpdateRow(device, digest, b"p" * 32, 10, 7, -0.5, 2.5, 0.25)


def test_what_is_written_is_there_after_reopening(tmp_path: Path) -> None:
    with AggregatorStore(tmp_path) as store:
        store.put("task", b"t-1")
        store.add_device("dev", public_key=KEY, board="pi", session=3)
        store.open_round(1, cohort={"dev": b"\x01" * 16}, global_digest=b"g" * 32, at=10.0)
        with store.transaction():
            store.put_update(1, update_row("dev"), data=b"update", public_before=b"before")
            store.put_public_state("dev", digest=b"\x02" * 16, state=b"state")
            store.put_charge(charge("dev", 1, device_epsilon=math.inf))
        store.put_decline(1, "other", code="budget", reason="spent")
        store.count_refusal("dev", "late")
        store.count_refusal("dev", "late", count=4)
    with AggregatorStore(tmp_path) as store:
        assert store.get("task") == b"t-1"
        assert store.get("nothing") is None
        (device,) = store.devices()
        assert (device.device, device.public_key, device.board) == ("dev", KEY, "pi")
        assert (device.last_session, device.public_digest) == (3, b"\x02" * 16)
        assert store.public_state("dev") == b"state"
        assert store.update_data(1, "dev") == (b"update", b"before")
        assert store.update(1, "dev") == replace(update_row("dev"), round=1)
        assert store.charges() == [charge("dev", 1, device_epsilon=math.inf)]
        assert store.declines(1) == store.declines() == [(1, "other", "budget", "spent")]
        assert store.declines(2) == []
        assert store.refusals() == {"dev": {"late": 5}}
        last = store.last_round()
        assert last is not None
        assert (last.phase, last.cohort, last.metrics) == ("open", {"dev": b"\x01" * 16}, None)


def test_closing_a_round_drops_the_bytes_and_keeps_the_record(store: AggregatorStore) -> None:
    store.open_round(1, cohort={}, global_digest=b"g" * 32, at=10.0)
    store.put_update(1, update_row("dev"), data=b"update", public_before=b"before")
    with store.transaction():
        store.close_round(1, result_digest=b"r" * 32, metrics={"loss": 0.5}, at=12.0)
    assert store.update_data(1, "dev") is None
    assert store.updates(1) == [replace(update_row("dev"), round=1)]
    (row,) = store.rounds()
    assert (row.phase, row.result_digest, row.metrics, row.closed_at) == ("closed", b"r" * 32, {"loss": 0.5}, 12.0)


def test_a_transaction_inside_another_is_a_part_of_it(store: AggregatorStore) -> None:
    def put(*names: str, fails: bool) -> None:
        with store.transaction():
            for name in names:
                store.put(name, b"1")
            if fails:
                raise KeyError

    def put_inside(*, fails: bool) -> None:
        with store.transaction():
            put("one", fails=False)
            for name in ("two", "three"):
                with pytest.raises(KeyError):
                    put(name, fails=True)
            put("four", fails=fails)

    names = ("one", "two", "three", "four")
    with pytest.raises(KeyError):
        put_inside(fails=True)
    assert [store.get(name) for name in names] == [None] * 4
    put_inside(fails=False)
    assert [store.get(name) for name in names] == [b"1", None, None, b"1"]


def test_a_transaction_happens_whole_or_not_at_all(store: AggregatorStore) -> None:
    store.put("before", b"1")
    with pytest.raises(ZeroDivisionError):
        _half_written(store)
    assert store.get("before") == b"1"
    assert store.get("inside") is None
    store.put("after", b"3")
    assert store.get("after") == b"3"


def _half_written(store: AggregatorStore) -> None:
    with store.transaction():
        store.put("inside", b"2")
        store.put("never", bytes(1 // len(b"")))


def _put_two(store: AggregatorStore) -> None:
    with store.transaction():
        store.put("first", b"changed")
        store.put("large", bytes(1 << 20))


def test_a_device_with_another_key_is_another_device(store: AggregatorStore) -> None:
    store.add_device("dev", public_key=KEY, board="pi", session=3)
    store.put_public_state("dev", digest=b"\x02" * 16, state=b"state")
    store.add_device("dev", public_key=KEY, board="jetson", session=2)
    row = store.device("dev")
    assert row is not None
    assert (row.public_key, row.board, row.last_session, row.public_digest) == (KEY, "jetson", 3, b"\x02" * 16)
    store.add_device("dev", public_key=bytes(32), board="pi", session=1)
    row = store.device("dev")
    assert row is not None
    assert (row.public_key, row.board, row.last_session, row.public_digest) == (bytes(32), "pi", 1, None)
    assert store.public_state("dev") is None
    assert store.device("stranger") is None


def test_an_update_of_the_open_round_is_found(store: AggregatorStore) -> None:
    for number in (1, 2):
        store.open_round(number, cohort={}, global_digest=b"g" * 32, at=0.0)
        store.put_update(number, update_row("dev"), data=b"", public_before=b"")
        assert store.has_open_update("dev")
        assert not store.has_open_update("other")
        with store.transaction():
            store.close_round(number, result_digest=b"r" * 32, metrics={}, at=1.0)
        assert not store.has_open_update("dev")


def test_one_update_and_one_charge_for_each_device_and_round(store: AggregatorStore) -> None:
    store.put_update(1, update_row("dev"), data=b"1", public_before=b"")
    store.put_charge(charge("dev", 1))
    with pytest.raises(StoreError):
        store.put_update(1, update_row("dev"), data=b"2", public_before=b"")
    with pytest.raises(StoreError):
        store.put_charge(charge("dev", 1))


def test_a_second_aggregator_on_the_same_store_is_refused(tmp_path: Path) -> None:
    with AggregatorStore(tmp_path), pytest.raises(StoreError, match="in use by another process"):
        AggregatorStore(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with AggregatorStore(tmp_path) as store:
        for index in range(200):
            store.put(f"key-{index}", bytes(500))
    path = tmp_path / FILE_NAME
    data = bytearray(path.read_bytes())
    data[4096:40960] = b"\xa5" * (40960 - 4096)
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError, match=r"damaged|malformed"):
        AggregatorStore(tmp_path)
    path.write_bytes(b"not a database, and longer than a header " * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        AggregatorStore(tmp_path)


def test_a_run_of_the_schema_before_goes_on(tmp_path: Path) -> None:
    with AggregatorStore(tmp_path) as store:
        store.put_update(1, update_row("dev-0"), data=b"update", public_before=b"before")
        store.put_charge(charge("dev-0", 1))
    with closing(sqlite3.connect(tmp_path / "aggregator.sqlite")) as database:
        database.execute("ALTER TABLE privacy DROP COLUMN raw")
        database.execute("ALTER TABLE rounds DROP COLUMN secure")
        database.execute("DROP TABLE answers")
        database.execute("DROP TABLE new_cards")
        database.execute("DROP INDEX updates_of_sum")
        database.execute("ALTER TABLE updates DROP COLUMN summed_in")
        database.execute("PRAGMA user_version = 1")
        database.commit()
    for _ in range(2):
        with AggregatorStore(tmp_path) as store:
            assert store.charges()[0] == store.charges(1)[0] == charge("dev-0", 1)
            assert [row.device for row in store.updates(1)] == ["dev-0"]
            assert store.new_cards(1) == set()
    with AggregatorStore(tmp_path) as store:
        store.put_charge(replace(charge("dev-0", 2), raw="loss"))
        assert [row.raw for row in store.charges()] == ["", "loss"]


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    AggregatorStore(tmp_path).close()
    with sqlite3.connect(tmp_path / FILE_NAME) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreError, match="schema 99"):
        AggregatorStore(tmp_path)


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be made"):
        AggregatorStore(tmp_path / "file" / "run")


def test_a_full_disk_is_an_error_of_its_own_and_changes_nothing(store: AggregatorStore) -> None:
    store.put("first", bytes(100))
    store.rows("PRAGMA max_page_count = 16")
    with pytest.raises(StoreFull, match="free some space"):
        _put_two(store)
    assert store.get("first") == bytes(100)
    assert store.get("large") is None
    store.rows("PRAGMA max_page_count = 100000")
    store.put("large", bytes(1 << 20))
    assert store.get("large") == bytes(1 << 20)


def test_a_used_folder_is_refused_for_a_new_run(tmp_path: Path) -> None:
    refuse_used(tmp_path)
    AggregatorStore(tmp_path).close()
    with pytest.raises(BadInput, match="--resume"):
        refuse_used(tmp_path)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LAYOUT)
    params = np.random.default_rng(1).normal(size=12).astype(np.float32)
    params[3] = -0.0
    checkpoints.write(7, params)
    assert checkpoints.read(7).tobytes() == params.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["global-7.safetensors"]


def test_the_same_model_makes_the_same_file(tmp_path: Path) -> None:
    params = np.arange(12, dtype=np.float32)
    files = []
    for _ in range(10):
        Checkpoints(tmp_path, LAYOUT).write(1, params)
        files.append((tmp_path / "global-1.safetensors").read_bytes())
    assert len(set(files)) == 1


def test_a_checkpoint_that_cannot_be_trusted_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LAYOUT, durable=False)
    with pytest.raises(StoreError, match="cannot be read"):
        checkpoints.read(0)
    checkpoints.write(0, np.zeros(12, np.float32))
    whole = checkpoints.path(0).read_bytes()
    checkpoints.path(0).write_bytes(whole[:-5])
    with pytest.raises(StoreError, match="damaged"):
        checkpoints.read(0)
    other = Checkpoints(tmp_path, ParamLayout(("a.weight",), ((12,),)), durable=False)
    other.write(0, np.zeros(12, np.float32))
    with pytest.raises(StoreError, match="another model"):
        checkpoints.read(0)
