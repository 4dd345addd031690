"""Counted time: a wrong clock never sets it forward, and the clock with the service's word together do."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from hushfleet.edge_client.board.budget_clock import SAVE_EVERY_S, BudgetClock
from hushfleet.errors import BudgetExceeded, LedgerError
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.ledger import CountedTime, Ledger
from hushfleet.privacy.mechanism import GaussianMechanism

TODAY, DAY = 1_750_000_000, 86400


class Times:
    def __init__(self) -> None:
        self.wall, self.ran, self.said = float(TODAY), 0.0, 0.0

    def clock(self, ledger: Ledger) -> BudgetClock:
        return BudgetClock(ledger, wall=lambda: self.wall, monotonic=lambda: self.ran, witness=lambda: self.said)

    def run(self, seconds: float) -> None:
        self.wall, self.ran = self.wall + seconds, self.ran + seconds


@pytest.fixture
def ledger():
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        made = Ledger(connection, device="board-7")
        made.create_schema()
        yield made


def charge(ledger: Ledger, at: int, round: int | None = None) -> None:
    ledger._connection.execute("BEGIN")
    of = at if round is None else round
    ledger.charge(GaussianMechanism(4.0).charge(), task="t", round=of, payload_digest=bytes(32), at=at)
    ledger._connection.execute("COMMIT")


def test_it_counts_what_the_client_runs_and_ignores_jumps(ledger: Ledger) -> None:
    times = Times()
    clock = times.clock(ledger)
    assert clock.now() == TODAY
    charge(ledger, TODAY)
    times.run(DAY)
    assert clock.now() == TODAY + DAY
    times.wall += 3650 * DAY
    assert clock.now() == TODAY + DAY, "a jump forward"
    times.wall = 0.0
    assert clock.now() == TODAY + DAY, "a jump back"
    times.ran -= 5.0
    assert clock.now() == TODAY + DAY


def test_time_without_power_counts_by_clock_and_word_together(ledger: Ledger) -> None:
    times = Times()
    times.clock(ledger).now()
    charge(ledger, TODAY)
    times.wall += 100 * DAY  # without power
    clock = times.clock(ledger)
    assert clock.now() == TODAY, "the clock alone"
    times.said = TODAY + 99 * DAY
    assert clock.now() == TODAY + 99 * DAY, "as far as both say"
    times.said = TODAY + 4000 * DAY
    assert clock.now() == TODAY + 99 * DAY, "the word alone"


@pytest.mark.parametrize("who", ["a broker with old words", "a false time server"])
def test_the_periods_that_a_board_slept_through_cannot_be_opened_one_after_the_other(ledger: Ledger, who: str) -> None:
    times = Times()
    times.clock(ledger).now()
    charge(ledger, TODAY)
    times.wall = times.said = TODAY + 400 * DAY  # without power
    clock = times.clock(ledger)
    for day in range(0, 396, 9):
        if who == "a broker with old words":
            times.said = TODAY + day * DAY
        else:
            times.wall = TODAY + day * DAY
        assert clock.now() == TODAY
    times.wall = times.said = TODAY + 400 * DAY
    assert clock.now() == TODAY + 400 * DAY


def test_it_survives_restarts_and_loses_no_more_than_an_hour(ledger: Ledger) -> None:
    times = Times()
    clock = times.clock(ledger)
    clock.now()
    charge(ledger, TODAY)
    for _ in range(10):
        times.run(SAVE_EVERY_S)
        clock.tick()
    times.run(SAVE_EVERY_S - 1)
    clock.tick()
    times.wall, times.ran = 0.0, 0.0
    assert times.clock(ledger).now() == TODAY + 10 * SAVE_EVERY_S
    charge(ledger, TODAY + 20 * SAVE_EVERY_S)
    assert times.clock(ledger).now() == TODAY + 20 * SAVE_EVERY_S, "no earlier than the last charge"


@pytest.mark.parametrize("behind", [TODAY - 300 * DAY, 60.0], ids=["by months", "in 1970"])
@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_charged_by_a_clock_that_was_behind_counts_as_of_the_first_word(
    ledger: Ledger, restarts: bool, behind: float
) -> None:
    """A new card begins with its image's date, and what it inherits must not count in a period of that time."""
    times, budget, one = Times(), Budget(1e-5, 8.0, 2.0, 90 * DAY), GaussianMechanism(4.0).charge()
    for round in (1, 2, 3):
        charge(ledger, 0, round)  # inherited: of no known time
    times.wall = behind
    clock = times.clock(ledger)
    charge(ledger, clock.now(), 4)
    with pytest.raises(BudgetExceeded):
        budget.check(ledger, one, now=clock.now())
    times.run(600.0)
    times.said = TODAY
    clock.now()
    if restarts:
        clock = times.clock(ledger)
    times.wall = TODAY
    assert clock.now() == TODAY
    assert [entry.at for entry in ledger.entries()] == 4 * [TODAY]
    with pytest.raises(BudgetExceeded, match="takes part again, in"):
        budget.check(ledger, one, now=clock.now())
    times.wall = times.said = TODAY + 200 * DAY  # without power
    clock = times.clock(ledger)
    budget.check(ledger, one, now=clock.now())
    assert ledger.entries()[0].at == TODAY, "only the first time"


def test_a_clock_that_is_right_moves_no_charge(ledger: Ledger) -> None:
    times = Times()
    clock = times.clock(ledger)
    charge(ledger, clock.now())
    times.run(50 * DAY)
    times.said = times.wall
    assert clock.now() == TODAY + 50 * DAY
    assert ledger.entries()[0].at == TODAY
    assert ledger.counted() == CountedTime(TODAY, TODAY + 50 * DAY, confirmed=True)


def test_on_a_full_disk_the_first_word_waits(ledger: Ledger) -> None:
    times = Times()
    clock = times.clock(ledger)
    charge(ledger, clock.now())
    times.wall = times.said = TODAY + 100 * DAY
    ledger._connection.execute("PRAGMA query_only = ON")
    assert clock.now() == TODAY
    ledger._connection.execute("PRAGMA query_only = OFF")
    assert clock.now() == TODAY + 100 * DAY
    assert ledger.entries()[0].at == TODAY + 100 * DAY


def test_a_damaged_time_is_told_and_stops_the_rounds_alone(ledger: Ledger) -> None:
    times = Times()
    charge(ledger, times.clock(ledger).now())
    ledger._connection.execute("UPDATE privacy_ledger_time SET now = 'x'")
    clock = times.clock(ledger)
    clock.tick()
    with pytest.raises(LedgerError, match="the counted time of device 'board-7' is damaged"):
        clock.now()


def test_before_the_first_charge_the_clock_counts(ledger: Ledger) -> None:
    times = Times()
    times.wall = 5.0
    assert times.clock(ledger).now() == 5
    times.wall = TODAY
    assert times.clock(ledger).now() == TODAY
