"""The answers of a committee member: one set a round, whatever happens in between."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import PrivacyError, StoreError
from support.stores import sql

ONE, ANOTHER = b"1" * 32, b"2" * 32


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


def test_an_answer_is_there_after_reopening(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        assert store.answers.of("t", 1) is None
        made = store.answers.commit("t", 1, included=ONE, data=b"answer")
        assert (made.pending, made.digest) == (True, hashlib.sha256(b"answer").digest())
    with DeviceStore(path, device="a") as store:
        assert store.answers.of("t", 1) == made
        store.answers.set_status("t", 1, "acked")
        assert store.answers.of("t", 1).status == "acked"


def test_a_round_has_one_answer_for_ever(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        for number in (1, 2):
            store.answers.commit("t", number, included=ONE, data=b"answer %d" % number)
        store.answers.commit("u", 1, included=ANOTHER, data=b"of another task")
        before = [store.answers.of("t", number) for number in (1, 2)]
        assert [entry.data for entry in before] == [b"", b""]  # only the latest is sent again
        for number in (1, 2):
            with pytest.raises(PrivacyError, match=f"round {number} of t is answered already"):
                store.answers.commit("t", number, included=ANOTHER, data=b"a second one")
        assert [store.answers.of("t", number) for number in (1, 2)] == before


def test_a_damaged_answer_is_not_sent(path: Path) -> None:
    with DeviceStore(path, device="a") as store:
        store.answers.commit("t", 1, included=ONE, data=b"answer")
        sql(store, "UPDATE answers SET data = x'00'")
        with pytest.raises(StoreError, match="the answer of round 1 of t is damaged"):
            store.answers.of("t", 1)
