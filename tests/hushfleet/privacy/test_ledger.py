"""The ledger on real SQLite: one charge a round, budgets, tampering, and kill -9 in the middle of it."""

from __future__ import annotations

import hashlib
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from hushfleet.errors import BudgetExceeded, LedgerError, PrivacyError
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.charge import RECORD_ADJACENCY, Charge
from hushfleet.privacy.ledger import Ledger, LedgerEntry, epsilon_server_of
from hushfleet.privacy.mechanism import GaussianMechanism

DIGEST = hashlib.sha256(b"update").digest()
DEVICE_CHARGE = GaussianMechanism(4.0, noise_split=4).charge()  # 2.0 in the server's view
RECORD_CHARGE = Charge("record", RECORD_ADJACENCY, "gaussian", 1.1, sample_rate=0.01, steps=50)


@pytest.fixture
def connection(tmp_path):
    with closing(sqlite3.connect(tmp_path / "device.sqlite", isolation_level=None)) as opened:
        yield opened


@pytest.fixture
def ledger(connection):
    ledger = Ledger(connection, device="board-7")
    ledger.create_schema()
    return ledger


def charge(ledger: Ledger, connection: sqlite3.Connection, round: int, task: str = "t", what: Charge = DEVICE_CHARGE):
    connection.execute("BEGIN")
    ledger.charge(what, task=task, round=round, payload_digest=DIGEST)
    connection.execute("COMMIT")


def tamper(connection: sqlite3.Connection, *statements: str) -> None:
    """What someone does who edits the file, by another connection: the triggers are no obstacle."""
    ((path,),) = connection.execute("SELECT file FROM pragma_database_list")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("DROP TRIGGER privacy_ledger_keep")
        other.execute("DROP TRIGGER privacy_ledger_fix")
        for statement in statements:
            assert other.execute(statement).rowcount >= 1, statement


def test_an_empty_ledger(ledger):
    assert ledger.entries() == []
    assert ledger.rounds_charged() == 0
    assert ledger.epsilon_server(delta=0.1) == 0.0
    ledger.entries()


def test_entries_come_back_as_they_were_written(ledger, connection):
    charge(ledger, connection, 0)
    charge(ledger, connection, 0, task="other", what=RECORD_CHARGE)
    assert ledger.entries() == [
        LedgerEntry("t", 0, DEVICE_CHARGE, DIGEST),
        LedgerEntry("other", 0, RECORD_CHARGE, DIGEST),
    ]
    assert ledger.entries("other") == [LedgerEntry("other", 0, RECORD_CHARGE, DIGEST)]
    assert ledger.entries("none") == []


def test_epsilon_is_over_all_tasks(ledger, connection):
    for round in range(3):
        charge(ledger, connection, round)
    charge(ledger, connection, 0, task="other", what=GaussianMechanism(5.0).charge())
    assert ledger.epsilon_server(delta=0.1, task="t") == epsilon([Step(2.0, 1.0, 3)], delta=0.1)
    as_in_papers = epsilon([Step(2.0, 1.0, 3)], delta=0.1, accountant="rdp")
    assert ledger.epsilon_server(delta=0.1, task="t", accountant="rdp") == as_in_papers
    together = epsilon([Step(2.0, 1.0, 3), Step(5.0, 1.0, 1)], delta=0.1)
    assert ledger.epsilon_server(delta=0.1) == pytest.approx(together, rel=1e-12)
    after = epsilon([Step(2.0, 1.0, 4), Step(5.0, 1.0, 1)], delta=0.1)
    assert ledger.epsilon_server(delta=0.1, extra=DEVICE_CHARGE) == pytest.approx(after, rel=1e-12)
    assert ledger.rounds_charged() == 4
    assert ledger.rounds_charged("t") == 3


def test_no_noise_is_charged_as_no_privacy(ledger, connection):
    charge(ledger, connection, 0, what=GaussianMechanism(0.0).charge())
    assert ledger.epsilon_server(delta=0.1) == math.inf


def test_mixed_units_give_the_number_of_a_record(ledger, connection):
    charge(ledger, connection, 0)
    assert ledger.unit() == "device"
    assert ledger.unit(extra=RECORD_CHARGE) == "record"
    charge(ledger, connection, 1, what=RECORD_CHARGE)
    assert ledger.unit() == "record"
    expected = epsilon([Step(1.0, 1.0, 1), Step(1.1, 0.01, 50)], delta=1e-5)
    assert ledger.epsilon_server(delta=1e-5) == pytest.approx(expected, rel=1e-12)


def test_replacing_a_record_moves_an_update_by_two_clip_norms_and_no_more(ledger, connection):
    charge(ledger, connection, 0)
    charge(ledger, connection, 1, what=RECORD_CHARGE)
    charges = [entry.charge for entry in ledger.entries()]
    expected = epsilon([Step(2.0, 1.0, 1), Step(1.1, 0.01, 50)], delta=1e-5, adjacency="replace-one")
    assert epsilon_server_of(charges, delta=1e-5, adjacency="replace-one") == pytest.approx(expected, rel=1e-12)


def test_one_round_can_be_charged_for_each_unit_once(ledger, connection):
    charge(ledger, connection, 0)
    charge(ledger, connection, 0, what=RECORD_CHARGE)
    assert ledger.rounds_charged() == 1
    with pytest.raises(LedgerError, match="send the stored bytes again"):
        charge(ledger, connection, 0)
    connection.execute("ROLLBACK")
    assert len(ledger.entries()) == 2


def test_the_callers_rollback_takes_the_entry_back(ledger, connection):
    charge(ledger, connection, 0)
    connection.execute("BEGIN")
    ledger.charge(DEVICE_CHARGE, task="t", round=1, payload_digest=DIGEST)
    assert ledger.rounds_charged() == 2
    connection.execute("ROLLBACK")
    assert ledger.rounds_charged() == 1
    charge(ledger, connection, 1)
    assert ledger.rounds_charged() == 2


def test_a_charge_outside_a_transaction_is_refused(ledger):
    with pytest.raises(LedgerError, match="no transaction is open"):
        ledger.charge(DEVICE_CHARGE, task="t", round=0, payload_digest=DIGEST)
    assert ledger.entries() == []


def test_pythons_implicit_transactions_hold_the_entry_too(tmp_path):
    with closing(sqlite3.connect(tmp_path / "implicit.sqlite")) as connection:
        ledger = Ledger(connection, device="board-7")
        ledger.create_schema()
        connection.commit()
        ledger.charge(DEVICE_CHARGE, task="t", round=0, payload_digest=DIGEST)
        assert connection.in_transaction
        connection.rollback()
        assert ledger.entries() == []


@pytest.mark.parametrize(
    "change", [{"task": ""}, {"round": -1}, {"round": 1.0}, {"round": True}, {"payload_digest": b"short"}]
)
def test_entries_outside_their_range_are_refused(ledger, connection, change):
    connection.execute("BEGIN")
    with pytest.raises(LedgerError, match="an entry needs"):
        ledger.charge(DEVICE_CHARGE, **({"task": "t", "round": 0, "payload_digest": DIGEST} | change))


def test_the_budget_is_checked_before_with_the_numbers(ledger, connection):
    one = epsilon([Step(2.0, 1.0, 1)], delta=0.1)
    two = epsilon([Step(2.0, 1.0, 2)], delta=0.1)
    ledger.check_budget(DEVICE_CHARGE, delta=0.1, epsilon_limit=two)
    charge(ledger, connection, 0)
    ledger.check_budget(DEVICE_CHARGE, delta=0.1, epsilon_limit=two)
    with pytest.raises(BudgetExceeded) as caught:
        ledger.check_budget(DEVICE_CHARGE, delta=0.1, epsilon_limit=two * 0.999)
    text = str(caught.value)
    assert "board-7" in text
    for number in (f"{one:.3f}", f"{two:.3f}", f"{two * 0.999:g}", "0.1"):
        assert number in text
    assert ledger.rounds_charged() == 1


def test_no_finite_budget_lets_unprotected_values_out(ledger):
    unprotected = GaussianMechanism(0.0).charge()
    with pytest.raises(BudgetExceeded):
        ledger.check_budget(unprotected, delta=0.1, epsilon_limit=1e300)
    ledger.check_budget(unprotected, delta=0.1, epsilon_limit=math.inf)


@pytest.mark.parametrize("limit", [math.nan, -1.0])
def test_budgets_outside_their_range_are_refused(ledger, limit):
    with pytest.raises(PrivacyError, match="budget"):
        ledger.check_budget(DEVICE_CHARGE, delta=0.1, epsilon_limit=limit)


def test_the_database_itself_refuses_changes(ledger, connection):
    charge(ledger, connection, 0)
    for statement in ("DELETE FROM privacy_ledger", "UPDATE privacy_ledger SET steps = 2"):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            connection.execute(statement)


COLUMNS = {
    "task": "'u'",
    "round": "9",
    "unit": "'record'",
    "adjacency": "'none'",
    "mechanism": "'none'",
    "noise_multiplier": "2.0000000000000004",
    "noise_split": "5",
    "sample_rate": "0.5",
    "steps": "2",
    "payload_digest": "zeroblob(32)",
    "hash": "zeroblob(32)",
    "raw": "'accuracy'",
    "at": "5",
    "arrived_from": "1",
    "arrived_until": "1",
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", [1, 2, 3])
def test_a_changed_entry_is_found(ledger, connection, column, row):
    for round in range(3):
        charge(ledger, connection, round)
    ledger.entries()
    tamper(connection, f"UPDATE privacy_ledger SET {column} = {COLUMNS[column]} WHERE seq = {row}")
    for read in (ledger.entries, ledger.rounds_charged):
        with pytest.raises(LedgerError, match=f"changed at entry {row}"):
            read()
    with pytest.raises(LedgerError):
        ledger.epsilon_server(delta=0.1)
    with pytest.raises(LedgerError):
        ledger.check_budget(DEVICE_CHARGE, delta=0.1, epsilon_limit=math.inf)


def test_an_entry_that_is_changed_between_two_charges_is_found(ledger, connection):
    for round in range(3):
        charge(ledger, connection, round)
    ledger.totals()
    tamper(connection, "UPDATE privacy_ledger SET noise_multiplier = 200.0 WHERE seq = 1")
    charge(ledger, connection, 3)
    with pytest.raises(LedgerError, match="changed at entry 1"):
        ledger.totals()


def test_raw_values_are_kept_and_cost_infinity(ledger, connection):
    raw = ("accuracy and loss on the own samples", "clip norms")
    charge(ledger, connection, 0)
    charge(ledger, connection, 1, what=replace(DEVICE_CHARGE, raw=raw))
    charge(ledger, connection, 2, what=replace(DEVICE_CHARGE, raw=raw[:1]))
    assert [entry.charge.raw for entry in ledger.entries()] == [(), raw, raw[:1]]
    assert ledger.raw_values() == raw
    assert ledger.raw_values("another") == ()
    assert ledger.epsilon_server(delta=0.1) == math.inf
    assert ledger.epsilon_noised(delta=0.1) == pytest.approx(epsilon([Step(2.0, 1.0, 3)], delta=0.1))
    with pytest.raises(BudgetExceeded, match=r"earlier rounds have sent without noise: accuracy.*no finite limit"):
        ledger.check_budget(DEVICE_CHARGE, delta=0.1, epsilon_limit=1e9)
    tamper(connection, "UPDATE privacy_ledger SET raw = '' WHERE seq = 2")
    with pytest.raises(LedgerError, match="changed at entry 2"):
        ledger.epsilon_server(delta=0.1)


def test_a_ledger_of_an_earlier_version_goes_on(connection):
    """It lacks the later columns; its chain was hashed without them."""
    old = Ledger(connection, device="board-7")
    old.create_schema()
    for later in ("raw", "at", "arrived_from", "arrived_until"):
        connection.execute(f"ALTER TABLE privacy_ledger DROP COLUMN {later}")
    connection.execute("BEGIN")
    fields = ["t", 0, "device", DEVICE_CHARGE.adjacency, "gaussian", 2.0, 4, 1.0, 1, DIGEST]
    first = hashlib.sha256(bytes(32) + b"board-7").digest()
    linked = hashlib.sha256(first + msgpack.packb([1, *fields])).digest()
    connection.execute(f"INSERT INTO privacy_ledger VALUES ({', '.join('?' * 12)})", (1, *fields, linked))
    connection.execute("UPDATE privacy_ledger_head SET entries = 1, hash = ?", (linked,))
    connection.execute("COMMIT")
    again = Ledger(connection, device="board-7")
    assert [entry.charge for entry in again.entries()] == [DEVICE_CHARGE], "it can be read as it is"
    for _ in range(2):
        again.upgrade_schema()
    charge(again, connection, 1, what=replace(DEVICE_CHARGE, raw=("loss",)))
    assert [entry.charge.raw for entry in again.entries()] == [(), ("loss",)]


def test_every_column_is_tried_above(ledger, connection):
    columns = [row[1] for row in connection.execute("PRAGMA table_info(privacy_ledger)")]
    assert columns == ["seq", *COLUMNS]


@pytest.mark.parametrize(
    "statements",
    [
        ["DELETE FROM privacy_ledger WHERE seq = 1"],
        ["DELETE FROM privacy_ledger WHERE seq = 2"],
        ["DELETE FROM privacy_ledger WHERE seq = 3"],
        ["DELETE FROM privacy_ledger"],
        ["DELETE FROM privacy_ledger WHERE seq = 2", "UPDATE privacy_ledger SET seq = 2 WHERE seq = 3"],
        ["DELETE FROM privacy_ledger_head"],
        ["UPDATE privacy_ledger_head SET entries = 2"],
        ["UPDATE privacy_ledger_head SET hash = zeroblob(32)"],
        ["UPDATE privacy_ledger_head SET device = 'board-8'"],
    ],
)
def test_a_missing_entry_is_found(ledger, connection, statements):
    for round in range(3):
        charge(ledger, connection, round)
    tamper(connection, *statements)
    with pytest.raises(LedgerError):
        ledger.entries()


def test_nothing_can_be_appended_to_a_chain_without_its_head(ledger, connection):
    charge(ledger, connection, 0)
    tamper(connection, "DELETE FROM privacy_ledger_head")
    connection.execute("BEGIN")
    with pytest.raises(LedgerError, match="head"):
        ledger.charge(DEVICE_CHARGE, task="t", round=1, payload_digest=DIGEST)


def test_a_ledger_belongs_to_one_device(ledger, connection):
    charge(ledger, connection, 0)
    other = Ledger(connection, device="board-8")
    with pytest.raises(LedgerError, match="'board-7', not of 'board-8'"):
        other.create_schema()
    with pytest.raises(LedgerError):
        other.entries()
    ledger.create_schema()
    assert ledger.rounds_charged() == 1


def test_a_database_without_ledger_is_an_error_of_ours(tmp_path):
    with closing(sqlite3.connect(tmp_path / "empty.sqlite")) as connection:
        bare = Ledger(connection, device="board-7")
        with pytest.raises(LedgerError, match="cannot be read"):
            bare.entries()
        connection.execute("BEGIN")
        with pytest.raises(LedgerError, match="could not be charged"):
            bare.charge(DEVICE_CHARGE, task="t", round=0, payload_digest=DIGEST)


def test_a_read_only_database_is_an_error_of_ours(ledger, connection):
    connection.execute("PRAGMA query_only = ON")
    connection.execute("BEGIN")
    with pytest.raises(LedgerError, match="could not be charged"):
        ledger.charge(DEVICE_CHARGE, task="t", round=0, payload_digest=DIGEST)


CHILD = """
import hashlib, os, signal, sqlite3, sys
from hushfleet.privacy.ledger import Ledger
from hushfleet.privacy.mechanism import GaussianMechanism

path, die_at = sys.argv[1], sys.argv[2]
connection = sqlite3.connect(path, isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA synchronous = FULL")
connection.execute("CREATE TABLE IF NOT EXISTS outbox (round INTEGER PRIMARY KEY, data BLOB)")
ledger = Ledger(connection, device="board-7")
ledger.create_schema()
charge = GaussianMechanism(2.0).charge()

def die_here(where):
    if die_at == where:
        os.kill(os.getpid(), signal.SIGKILL)

for round in range(ledger.rounds_charged(), 10**6):
    data = os.urandom(5000)
    connection.execute("BEGIN IMMEDIATE")
    ledger.charge(charge, task="t", round=round, payload_digest=hashlib.sha256(data).digest())
    die_here("between")
    connection.execute("INSERT INTO outbox VALUES (?, ?)", (round, data))
    die_here("before commit")
    connection.execute("COMMIT")
    os.write(1, b"%d\\n" % round)
    die_here("after commit")
"""


def agreed_rounds(path: Path) -> int:
    """How many rounds ledger and outbox hold; they must hold the same ones, with the same bytes."""
    with closing(sqlite3.connect(path)) as connection:
        charged = {(e.round, e.payload_digest) for e in Ledger(connection, device="board-7").entries("t")}
        stored = connection.execute("SELECT round, data FROM outbox").fetchall()
    assert charged == {(round, hashlib.sha256(data).digest()) for round, data in stored}
    assert {round for round, _ in charged} == set(range(len(charged)))
    return len(charged)


@pytest.mark.parametrize(("die_at", "rounds"), [("between", 0), ("before commit", 0), ("after commit", 1)])
def test_a_kill_at_each_step_of_a_transaction(tmp_path, die_at, rounds):
    path = tmp_path / "device.sqlite"
    done = subprocess.run([sys.executable, "-c", CHILD, str(path), die_at], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    assert agreed_rounds(path) == rounds


def test_kills_at_any_moment_leave_ledger_and_outbox_agreeing(tmp_path):
    path, reported = tmp_path / "device.sqlite", 0
    for attempt in range(6):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), "never"], stdout=subprocess.PIPE)
        for _ in range(3 + 5 * attempt):
            reported = int(child.stdout.readline())
        time.sleep(attempt * 0.0007)  # somewhere inside a later transaction
        os.kill(child.pid, signal.SIGKILL)
        rest = child.stdout.read().split()
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
        reported = int(rest[-1]) if rest else reported
        # what was reported as committed is there; at most one commit was cut off before its report
        assert reported + 1 <= agreed_rounds(path) <= reported + 2
    assert reported >= 60
