"""A ledger's totals: equal to a slow composition of all entries, and a round's work does not grow with the rounds."""

from __future__ import annotations

import gc
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hushfleet.durations import Period
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import LedgerError
from hushfleet.privacy.accountant import _exactly
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import DEVICE_ADJACENCY, RECORD_ADJACENCY, Charge
from hushfleet.privacy.ledger import CountedTime, Ledger, epsilon_server_of
from support.stores import memory_ledger

DAY, DELTA = 86400, 1e-5
DEVICE = Charge("device", DEVICE_ADJACENCY, "gaussian", 3.0, noise_split=4)
KINDS = [
    DEVICE,
    Charge("device", DEVICE_ADJACENCY, "gaussian", 7.5),
    Charge("record", RECORD_ADJACENCY, "gaussian", 1.1, sample_rate=0.01, steps=50),
    Charge("device", DEVICE_ADJACENCY, "gaussian", 9.0, raw=("clip norms", "loss")),
    Charge("device", DEVICE_ADJACENCY, "none", 0.0),
]
ONE_ROUND = st.tuples(
    st.sampled_from(["committed", "rolled back", "read inside"]),
    st.sampled_from(["t", "u"]),
    st.integers(0, 9),
    st.sampled_from(KINDS[:3]) | st.sampled_from(KINDS),
    st.integers(0, 40).map(lambda days: days * DAY),
    st.none() | st.integers(1, 40).map(lambda day: Period.of(day * DAY, 7 * DAY)),
)
TIME = st.tuples(
    st.just("time"),
    st.builds(
        CountedTime,
        st.integers(1, 30 * DAY),
        st.integers(1, 9 * DAY),
        st.booleans(),
        st.none() | st.integers(0, DAY),
        st.just(0),
    ),
    st.integers(0, 20 * DAY),
)
EVENTS = st.lists(ONE_ROUND | TIME | st.just(("doubt",)) | st.just(("reopened",)), max_size=20)


def charged(ledger: Ledger, how: str, task: str, round: int, charge: Charge, at: int, window: Period | None) -> None:
    run = ledger._connection.execute
    run("BEGIN")
    try:
        ledger.charge(charge, task=task, round=round, payload_digest=bytes(32), at=at, window=window)
    except LedgerError:
        how = "charged before"
    if how == "read inside":
        compare(ledger)
    run("COMMIT" if how in ("committed", "read inside") else "ROLLBACK")


def compare(ledger: Ledger) -> None:
    """All that is read of totals, beside the same of all entries of a ledger that has read nothing before."""
    entries = Ledger(ledger._connection, device="board-7").entries()
    for task in (None, "t", "u", "none"):
        some = [entry for entry in entries if task in (None, entry.task)]
        windows = [entry.window for entry in some if entry.window is not None]
        totals = ledger.totals(task)
        assert dict(totals.kinds) == Counter(entry.charge for entry in some)
        assert totals.rounds == len({(entry.task, entry.round) for entry in some})
        assert totals.window == (windows[-1] if windows else None)
        assert ledger.raw_values(task) == tuple(dict.fromkeys(raw for entry in some for raw in entry.charge.raw))
        assert totals.weight == pytest.approx(sum(entry.charge.weight for entry in some), rel=1e-12)
    assert ledger.latest() == max((entry.at for entry in entries), default=0)
    for day in range(0, 60, 7):
        later = [entry.charge for entry in entries if entry.at >= day * DAY]
        assert steps_by_kind(ledger.charged_since(day * DAY)) == steps_by_kind(later)


def steps_by_kind(charges: list[Charge]) -> Counter[tuple[object, ...]]:
    counts: Counter[tuple[object, ...]] = Counter()
    for each in charges:
        counts[each.unit, each.noise_multiplier, each.sample_rate, each.noise_split, each.raw] += each.steps
    return counts


@settings(max_examples=40, deadline=None)
@given(EVENTS)
@example([("committed", "t", 0, DEVICE, 5, None), ("time", CountedTime(20 * DAY, 21 * DAY), 0)])
@example([("time", CountedTime(2, 2), 0), ("committed", "t", 0, DEVICE, 0, None), ("time", CountedTime(1, 1), 0)])
def test_totals_are_those_of_all_entries(events: list[tuple]) -> None:
    with memory_ledger() as ledger:
        for kind, *values in events:
            if kind == "time":
                ledger.keep_counted(values[0], moved=values[1])
            elif kind == "doubt":
                ledger.doubt_times()
            elif kind == "reopened":
                ledger = Ledger(ledger._connection, device="board-7")
            else:
                charged(ledger, kind, *values)
            compare(ledger)
        for task, accountant in ((None, "exact"), (None, "rdp"), ("t", "exact")):
            slow = epsilon_server_of(
                [entry.charge for entry in ledger.entries(task)], delta=DELTA, accountant=accountant
            )
            assert ledger.epsilon_server(delta=DELTA, task=task, accountant=accountant) == slow


def test_a_rewritten_chain_is_found_while_the_process_runs(tmp_path: Path) -> None:
    """Each hash is right, as another program writes them that puts a cheaper ledger in place of this one."""
    paths = [tmp_path / name for name in ("store.sqlite", "cheaper.sqlite")]
    with closing(sqlite3.connect(paths[0], isolation_level=None)) as connection:
        ledger = Ledger(connection, device="board-7")
        ledger.create_schema()
        for round in range(3):
            charged(ledger, "committed", "t", round, DEVICE, 0, None)
        before = ledger.totals()
        for rounds in (2, 3, 4):  # fewer entries, as many, and more
            with closing(sqlite3.connect(paths[1], isolation_level=None)) as other:
                cheaper = Ledger(other, device="board-7")
                cheaper.create_schema()
                for round in range(cheaper.count, rounds):
                    charged(cheaper, "committed", "t", round, KINDS[1], 0, None)
                copy_into(other, paths[0])
            for read in (ledger.totals, ledger.entries, lambda: ledger.charges_of("t", 0)):
                with pytest.raises(LedgerError, match="what was spent is no longer known"):
                    read()
        assert Ledger(connection, device="board-7").totals().kinds == ((KINDS[1], 4),), "a new process cannot see it"
        assert before.kinds == ((DEVICE, 3),)


def copy_into(source: sqlite3.Connection, path: Path) -> None:
    with closing(sqlite3.connect(path)) as target:
        source.backup(target)


STEPS = 50


def operations(connection: sqlite3.Connection, work: Callable[[], object]) -> tuple[int, int]:
    """Steps of SQLite's machine and calls of Python functions; no time is measured."""
    steps = calls = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    def call(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    connection.set_progress_handler(step, 1)
    gc.disable()  # what other tests have left behind would be counted
    sys.setprofile(call)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
        connection.set_progress_handler(None, 0)
    return steps, calls


def test_a_rounds_work_does_not_grow_with_the_rounds_before(tmp_path: Path) -> None:
    budget = Budget(delta=DELTA, lifetime=1e6, in_period=1e5, period_s=90 * DAY)
    with DeviceStore(tmp_path / "store.sqlite", device="board-7", durable=False) as store:
        ledger, connection = store.ledger, store._connection
        ledger.keep_counted(CountedTime(1, 1))

        def work(round: int) -> None:
            at = round * DAY
            budget.check(ledger, DEVICE, now=at)
            with store._transaction("charge"):
                ledger.charge(DEVICE, task="t", round=round, payload_digest=bytes(32), at=at)
            ledger.epsilon_server(delta=DELTA, task="t", extra=DEVICE)
            ledger.charges_of("t", round)
            ledger.totals()

        _exactly.cache_clear()  # other tests may have asked for the epsilon of one of both rounds
        found = {}
        for round in range(1, 302):
            if round in (3, 301):
                found[round] = operations(connection, partial(work, round))
            else:
                work(round)
    (steps, calls), (later_steps, later_calls) = found[3], found[301]
    assert later_steps <= steps + STEPS, found
    assert later_calls <= calls + STEPS, found
