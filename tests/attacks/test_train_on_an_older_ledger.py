"""The attacker puts back a board's store of before an earlier task, so that the board spends again what it has spent.

The record of the present run shows nothing of it: the board sits between two tasks, and its store lacks a whole one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hushfleet.aggregator.storage.charged_keys import ChargedKeys
from hushfleet.edge_client.store_check import StoreCheck
from hushfleet.errors import CopiedStore, LedgerError
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.wire.format.messages import Known, SeenCharges
from support.whole import Board, Whole, prepared_digits

NAMES = ("board-1", "board-2")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Whole]:
    bench = Whole(tmp_path, LocalHub().link)
    yield bench
    bench.close()


def play(bench: Whole, run_id: str) -> None:
    """One task from its first round to its last, with an aggregator's folder of its own."""
    bench.begin(prepared_digits(run_id, rounds=1))
    assert bench.drive(lambda: bench.coordinator.engine.finished)
    bench.end()


def put_back(bench: Whole) -> tuple[Board, Board]:
    """Two tasks, and in the third a board with its store of before the second; also returns the other board."""
    victim, twin = (bench.board(name) for name in NAMES)
    play(bench, "one")
    bench.lose(victim)
    old = bench.copy(victim, "old")
    newest = bench.board(victim.name, victim.state_dir)
    play(bench, "two")
    bench.lose(newest)
    bench.begin(prepared_digits("three", rounds=1))
    return bench.board(victim.name, old), twin


def test_the_attack_on_a_board_that_looks_at_the_present_run_alone(
    bench: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreCheck, "_compare", lambda *_: None)
    victim, twin = put_back(bench)
    assert bench.drive(lambda: bench.coordinator.engine.finished)
    assert victim.stopped is None
    assert (victim.store.ledger.rounds_charged(), twin.store.ledger.rounds_charged()) == (2, 3)
    assert len(bench.noisings(victim.name)) == 3, "it has spent three rounds, and counts two"


def test_a_board_with_an_older_ledger_stops_for_good_before_it_trains(bench: Whole) -> None:
    victim, _ = put_back(bench)
    bench.drive(lambda: victim.stopped is not None)
    assert isinstance(victim.stopped, CopiedStore)
    said = str(victim.stopped)
    assert "the fleet has seen 2 charged rounds of this board's key" in said
    assert "and this store has 1, with the sum 0.25" in said
    assert "old copy" in said
    assert "docs/field.md" in said
    assert len(bench.noisings(victim.name)) == 2


def test_the_newest_store_goes_on_also_with_updates_that_nobody_has_taken(bench: Whole) -> None:
    """A ledger may have more than was seen: rounds whose updates never left, or that went to another federation."""
    victim, _ = (bench.board(name) for name in NAMES)
    play(bench, "one")
    with victim.store._transaction("charge a round that nobody sees"):
        charge = victim.store.ledger.entries()[0].charge
        victim.store.ledger.charge(charge, task="elsewhere", round=1, payload_digest=bytes(32))
    play(bench, "two")
    bench.begin(prepared_digits("three", rounds=1))
    assert bench.drive(lambda: bench.coordinator.engine.finished)
    assert victim.stopped is None
    assert victim.store.ledger.rounds_charged() == 4


@pytest.mark.parametrize("field", ["rounds", "weight", "round", "task"])
def test_each_part_of_what_was_seen_is_compared(bench: Whole, field: str) -> None:
    victim, _ = (bench.board(name) for name in NAMES)
    play(bench, "one")
    play(bench, "two")
    with ChargedKeys(bench.key, durable=False) as charged:
        seen = charged.of(victim.store.identity.public_key)
    assert seen is not None
    entries = victim.store.ledger.entries()
    assert (seen.rounds, seen.task, seen.round) == (2, "digits-two", 1)
    assert seen.weight == pytest.approx(sum(each.charge.weight for each in entries)) == 2 / 2.0**2
    larger = {"rounds": 9, "weight": seen.weight * 9, "round": 9, "task": "another"}[field]
    known = Known(1, victim.agent.store_check._nonce, 1, True, "a", 1, "open", 0, b"", replace(seen, **{field: larger}))
    with pytest.raises(CopiedStore, match="old copy"):
        victim.agent.store_check.on_known(known, 0.0)


def test_a_ledger_that_was_changed_by_hand_is_each_rounds_own_problem(
    bench: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board goes on to tell it, and declines; it is no copy."""
    victim, _ = (bench.board(name) for name in NAMES)
    play(bench, "one")

    def changed(*_: object) -> None:
        raise LedgerError("the privacy ledger was changed")

    monkeypatch.setattr(victim.store.ledger, "totals", changed)
    check = victim.agent.store_check
    assert check.on_known(Known(1, check._nonce, 1, True, "a", 1, "open", 0, b"", SeenCharges(9, 9.0, "b", 9)), 0.0)


def test_an_aggregator_that_lies_can_stop_a_board_and_never_make_it_spend_more(bench: Whole) -> None:
    """It says that it has seen less, or nothing: then the board is as it was without this comparison."""
    victim, _ = (bench.board(name) for name in NAMES)
    play(bench, "one")
    before = victim.store.ledger.entries()
    check = victim.agent.store_check
    for seen in (None, SeenCharges(1, 0.0, before[0].task, 1)):
        assert check.on_known(Known(1, check._nonce, 1, True, "a", 1, "open", 0, b"", seen), 0.0)
    assert victim.store.ledger.entries() == before
