"""A card is lost: the next one begins with what was spent under its id, whatever the network does."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.fleet.trust.enrolment import carried_rounds
from hushfleet.aggregator.payloads.checks import terms_of
from hushfleet.aggregator.rounds.charge_book import ChargeBook
from hushfleet.aggregator.storage.activity import RefusedBirth
from hushfleet.aggregator.storage.board import Board
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import LedgerError
from hushfleet.privacy.charge import Charge
from hushfleet.schema import pack, unpack
from hushfleet.simulator.world.hub import LocalHub
from support.whole import Whole, prepared_digits

TASK = "small-00000000"


def charge(multiplier: float = 2.0, **fields: Any) -> Charge:
    return Charge("device", "one device's update", "gaussian", multiplier, **fields)


@given(st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)))
def test_carried_rounds_are_the_charged_ones(first: set[int], second: set[int]) -> None:
    second -= first
    cheap, raw = pack(charge(8.0)), pack(charge(1.0, raw=("accuracy",), steps=3))
    rows = sorted([(TASK, number, cheap) for number in first] + [(TASK, number, raw) for number in second])
    told = {
        number: each.noise_multiplier
        for each in carried_rounds(rows)
        for start, stop in each.rounds
        for number in range(start, stop)
    }
    assert told == {**dict.fromkeys(first, 8.0), **dict.fromkeys(second, 1.0)}
    assert len(carried_rounds(rows)) == bool(first) + bool(second)


def test_the_ledger_of_a_new_card_begins_with_what_was_spent(tmp_path: Path) -> None:
    spent = [(TASK, number, pack(charge())) for number in (1, 2, 5)]
    path = tmp_path / "store.sqlite"
    with DeviceStore(path, device="board-1", durable=False) as store:
        store.note_enrolled(carried_rounds(spent))
        once = store.ledger.epsilon_server(delta=1e-5)
        store.note_enrolled(carried_rounds(spent))  # the answer came twice
    with DeviceStore(path, device="board-1", durable=False) as store:
        assert store.is_enrolled
        assert [(entry.round, entry.charge) for entry in store.ledger.entries()] == [(n, charge()) for n in (1, 2, 5)]
        assert store.ledger.epsilon_server(delta=1e-5) == once > 0
        assert store.is_charged(TASK, 5)
        assert not store.is_charged(TASK, 4)
        with pytest.raises(LedgerError, match="already charged"), store._transaction("charge twice"):
            store.ledger.charge(charge(), task=TASK, round=5, payload_digest=bytes(32))


def test_what_a_store_has_charged_itself_is_not_charged_again(tmp_path: Path) -> None:
    with DeviceStore(tmp_path / "store.sqlite", device="board-1", durable=False) as store:
        with store._transaction("charge"):
            store.ledger.charge(charge(), task=TASK, round=1, payload_digest=bytes(32))
        store.note_enrolled(carried_rounds([(TASK, 1, pack(charge())), (TASK, 2, pack(charge()))]))
        assert [entry.round for entry in store.ledger.entries()] == [1, 2]
        before = store.ledger.entries()
        store.note_enrolled(carried_rounds([(TASK, 9, pack(charge()))]))  # it was enrolled: its ledger knows more
        assert store.ledger.entries() == before


def spent_by(register: DeviceRegister) -> dict[str, list[int]]:
    return {row.device: [number for _, number, _ in register.charges(row.device)] for row in register.devices()}


def test_the_register_knows_at_least_what_every_board_may_have_spent(make_fleet: Callable[..., Any]) -> None:
    fleet = make_fleet(devices=4, min_updates=1)
    answered, silent, declined, absent = fleet.names
    with DeviceRegister(fleet.folder, durable=False) as register:
        register.add(Board(name, public_key=fleet.devices.identities[name].public_key) for name in fleet.names)
        book = ChargeBook(register, fleet.engine)
        book.expect(fleet.names)
        assert not any(spent_by(register).values()), "no round is open"
        plan = fleet.open([answered, silent, declined])
        book.expect([answered, silent, declined, absent])
        assert spent_by(register) == {answered: [1], silent: [1], declined: [1], absent: []}
        assert fleet.engine.accept(answered, fleet.update(answered).data).acknowledged
        fleet.engine.decline(declined, "budget", "", round=1)
        fleet.engine.close()
        del book
        fleet.restart()  # a kill before the book was told
        book = ChargeBook(register, fleet.engine)
        assert spent_by(register) == {answered: [1], silent: [1], declined: [1], absent: []}
        nominal = fleet.engine.method.charge(terms_of(plan))
        (row,) = fleet.store.charges(1)
        told = unpack(Charge, register.charges(answered)[0][2], what="a charge")
        assert (told.noise_multiplier, told.unit, told.raw) == (row.noise_multiplier, nominal.unit, nominal.raw)
        assert unpack(Charge, register.charges(silent)[0][2], what="a charge") == nominal
        fleet.open([answered])
        book.expect([answered])
        book.expect([answered])
        fleet.restart()
        ChargeBook(register, fleet.engine).expect([answered, silent])
        assert spent_by(register)[answered] == [1, 2]
        register.forget(answered)
        assert [number for _, number, _ in register.charges(answered)] == [1, 2], "whoever has the id later"


@pytest.mark.parametrize("killed", [False, True])
def test_what_an_accepted_update_declares_is_noted_before_its_round_closes(
    make_fleet: Callable[..., Any], killed: bool
) -> None:
    """The next card may ask at once, and its board had chosen less noise than the standard."""
    fleet = make_fleet(devices=2, min_updates=1, method="apdp-fl")
    with DeviceRegister(fleet.folder, durable=False) as register:
        book = ChargeBook(register, fleet.engine)
        fleet.open()
        book.expect(fleet.names)
        one, other = fleet.names
        assert fleet.engine.accept(one, fleet.update(one, preference=0.5).data).code == "accepted"
        if killed:
            fleet.restart()
            book = ChargeBook(register, fleet.engine)
        else:
            book.accepted(one, 1)
        noted = [unpack(Charge, register.charges(name)[0][2], what="a charge") for name in (one, other)]
        assert noted[0].noise_multiplier == pytest.approx(noted[1].noise_multiplier / 2)


def test_a_board_that_declined_and_was_told_again_may_have_spent(make_fleet: Callable[..., Any]) -> None:
    """An extended round makes it train after all, and its bytes may be on their way when the round closes."""
    fleet = make_fleet(devices=3, min_updates=1)
    answered, declined, killed = fleet.names
    with DeviceRegister(fleet.folder, durable=False) as register:
        register.add(Board(name, public_key=fleet.devices.identities[name].public_key) for name in fleet.names)
        book = ChargeBook(register, fleet.engine)
        fleet.open()
        book.expect(fleet.names)
        fleet.engine.decline(declined, "busy", "", round=1)
        fleet.engine.decline(killed, "paused", "", round=1)
        book.expect([declined])
        fleet.engine.accept(answered, fleet.update(answered).data)
        fleet.engine.close()
        book.closed(1)
        assert spent_by(register) == {answered: [1], declined: [1], killed: []}
        fleet.open()
        book.expect(fleet.names)
        fleet.engine.decline(killed, "paused", "", round=2)
        fleet.restart()  # the board, too, which is told by the next process that it may train
        book = ChargeBook(register, fleet.engine)
        book.expect([killed])
        fleet.engine.accept(answered, fleet.update(answered).data)
        fleet.engine.close()
        book.closed(2)
        assert spent_by(register)[killed] == [2]


OLD_REGISTER = """
CREATE TABLE devices (
    id TEXT PRIMARY KEY, public_key BLOB UNIQUE, pinned INTEGER NOT NULL, blocked TEXT,
    board TEXT NOT NULL DEFAULT '', rounds INTEGER NOT NULL DEFAULT 0, last_seen REAL
) WITHOUT ROWID;
CREATE TABLE knocks (
    id TEXT NOT NULL, public_key BLOB NOT NULL, count INTEGER NOT NULL, last_seen REAL NOT NULL,
    PRIMARY KEY (id, public_key)
) WITHOUT ROWID;
INSERT INTO devices VALUES ('board-1', zeroblob(32), 1, NULL, 'pi', 7, 9.0);
INSERT INTO devices VALUES ('board-2', NULL, 0, 'stolen', '', 0, NULL);
INSERT INTO knocks VALUES ('who', zeroblob(32), 3, 9.0);
"""
OLD_CHARGES = """
CREATE TABLE charges (
    id TEXT NOT NULL, task TEXT NOT NULL, round INTEGER NOT NULL, charge BLOB NOT NULL, PRIMARY KEY (id, task, round)
) WITHOUT ROWID;
INSERT INTO charges VALUES ('board-1', 't-1', 1, x'01');
"""


@pytest.mark.parametrize("version", [1, 2])
def test_a_register_of_an_earlier_version_keeps_working(tmp_path: Path, version: int) -> None:
    with contextlib.closing(sqlite3.connect(DeviceRegister.file_of(tmp_path))) as old:
        old.executescript(OLD_REGISTER + OLD_CHARGES * (version == 2) + f"PRAGMA user_version = {version};")
    with DeviceRegister(tmp_path, durable=False) as register:
        assert register.devices() == [
            Board("board-1", public_key=bytes(32), standing="pinned"),
            Board("board-2", standing="blocked", reason="stolen"),
        ]
        assert register.refused_births() == [RefusedBirth("who", bytes(32), 3, 9.0)]
        assert register.charges("board-1") == [("t-1", 1, b"\1")] * (version == 2)
        assert (register.first_charged_at("board-1") > 0) == (version == 2), "now, since the day is not known"


@pytest.mark.parametrize("how", ["told", "not told", "killed"])
def test_a_new_card_in_a_round_of_the_old_one_is_no_copy(tmp_path: Path, how: str) -> None:
    """The plan names the state that the old card has; the new one has never been in it.

    An aggregator that is killed when it has just opened a round has told nobody of it, so nothing may have been spent.
    """
    whole = Whole(tmp_path, LocalHub().link)
    try:
        prepared = prepared_digits("glp", method="fedglp-adp")  # it has a public state
        whole.begin(prepared)
        book = ChargeBook(whole.coordinator.enrolment.register, whole.coordinator.engine)
        whole.coordinator.rounds.charges = book
        old, other = whole.board("board-1"), whole.board("board-2")
        engine, task = whole.coordinator.engine, prepared.spec.task
        assert whole.drive(lambda: engine.closed_rounds == 1 and engine.plan is not None)
        assert engine.plan.cohort["board-1"] != old.agent.tasks.runtime.newcomer_digest
        whole.lose(old)
        whole.boards.remove(other)  # it takes its time
        with DeviceRegister(tmp_path / task, durable=False) as register:
            state = tmp_path / "new-card"
            with DeviceStore(state / "store.sqlite", device="board-1", durable=False) as store:
                charges = register.charges("board-1")
                assert [number for _, number, _ in charges] == [1, 2]
                store.note_enrolled(carried_rounds(charges if how == "told" else charges[:1]))
                key = store.identity.public_key
            register.forget("board-1")
            register.add([Board("board-1", public_key=key)])
        whole.now += 2.0
        if how == "killed":
            whole.end()
            engine = whole.begin(prepared).engine
        new = whole.board("board-1", state)
        whole.drive(lambda: new.agent.rounds.decline or new.entry_status(task, 2) or new.stopped)
        assert (new.stopped, engine.plan.round) == (None, 2)
        whole.boards.append(other)
        assert whole.drive(lambda: engine.finished or new.stopped is not None)
        assert new.stopped is None
        assert [entry.round for entry in new.store.ledger.entries()] == [1, 2, 3]
        assert [other.entry_status(task, number) for number in (1, 2, 3)] == ["acked"] * 3
        took_part = None if how == "told" else "acked"
        assert [new.entry_status(task, number) for number in (1, 2, 3)] == [None, took_part, "acked"]
    finally:
        whole.close()


def test_a_round_whose_cards_have_all_been_replaced_does_not_wait_out_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boards that were told what the earlier cards may have sent in it say no, and the next round has them."""
    whole = Whole(tmp_path, LocalHub().link)
    try:
        prepared = prepared_digits("all")
        whole.begin(prepared)
        engine, task = whole.coordinator.engine, prepared.spec.task
        book, accepted = ChargeBook(whole.coordinator.enrolment.register, engine), list[tuple[str, int]]()
        whole.coordinator.rounds.charges = book
        monkeypatch.setattr(book, "accepted", lambda device, round: accepted.append((device, round)))
        old = [whole.board(name) for name in ("board-1", "board-2")]
        assert whole.drive(lambda: engine.closed_rounds == 1 and engine.plan is not None)
        assert sorted(accepted) == [("board-1", 1), ("board-2", 1)]
        deadline = engine.responses.deadline
        for board in old:
            whole.lose(board)
        states = {board.name: tmp_path / f"new-{board.name}" for board in old}
        with DeviceRegister(tmp_path / task, durable=False) as register:
            for name, state in states.items():
                with DeviceStore(state / "store.sqlite", device=name, durable=False) as store:
                    store.note_enrolled(carried_rounds(register.charges(name)))
                    register.forget(name)
                    register.add([Board(name, public_key=store.identity.public_key)])
        whole.now += 2.0
        new = [whole.board(name, state) for name, state in states.items()]
        assert whole.drive(lambda: engine.finished)
        assert whole.now < deadline
        assert [[entry.round for entry in board.store.ledger.entries()] for board in new] == [[1, 2, 3]] * 2
        assert [[board.entry_status(task, number) for number in (2, 3)] for board in new] == [[None, "acked"]] * 2
    finally:
        whole.close()
