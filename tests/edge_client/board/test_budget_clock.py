"""Counted time: a wrong clock never sets it forward, and the clock with the service's word together do.

After a start nothing is spent until the time was heard, or an hour was counted.
"""

from __future__ import annotations

import pytest

from hushfleet.durations import Period
from hushfleet.edge_client.board.budget_clock import LISTEN_S, SAVE_EVERY_S, SAVE_EVERY_WAITING_S, BudgetClock
from hushfleet.errors import BudgetExceeded, LedgerError
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.ledger import CountedTime, Ledger
from hushfleet.privacy.mechanism import GaussianMechanism
from support.stores import memory_ledger

TODAY, HOUR, DAY = 1_750_000_000, 3600, 86400
ONE = GaussianMechanism(4.0).charge()
BUDGET = Budget(1e-5, 8.0, 2.0, 90 * DAY)


class Times:
    def __init__(self) -> None:
        self.wall, self.ran, self.said = float(TODAY), 0.0, 0.0

    def clock(self, ledger: Ledger) -> BudgetClock:
        return BudgetClock(ledger, wall=lambda: self.wall, monotonic=lambda: self.ran, witness=lambda: self.said)

    def run(self, seconds: float) -> None:
        self.wall, self.ran = self.wall + seconds, self.ran + seconds

    def restart(self, ledger: Ledger, clock: BudgetClock | None = None, *, off: float = 0.0) -> BudgetClock:
        """:param clock: stopped cleanly; None: the client was killed."""
        if clock is not None:
            clock.save()
        self.wall, self.ran = self.wall + off, 0.0
        return self.clock(ledger)


def is_free(ledger: Ledger, clock: BudgetClock) -> bool:
    """Whether a round is allowed now; else the board must say that it has just started."""
    try:
        BUDGET.check(ledger, ONE, now=clock.now())
    except BudgetExceeded as error:
        if "After a start it spends nothing until it hears from its fleet what time it is" in str(error):
            return False
        raise
    return True


@pytest.fixture
def ledger():
    with memory_ledger() as made:
        yield made


def charge(ledger: Ledger, at: int, round: int | None = None) -> None:
    ledger._connection.execute("BEGIN")
    of = len(ledger.entries()) if round is None else round
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
    assert [entry.at for entry in ledger.entries()] == 4 * [TODAY - 600], "ten minutes before that"
    with pytest.raises(BudgetExceeded, match="takes part again, in"):
        budget.check(ledger, one, now=clock.now())
    times.run(DAY)
    times.said = times.wall
    clock.now()
    times.wall += 200 * DAY  # without power
    clock = times.clock(ledger)
    times.said = times.wall
    budget.check(ledger, one, now=clock.now())
    assert ledger.entries()[0].at == TODAY - 600, "only the first time"


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


def started_again(ledger: Ledger, *, off: float = 100 * DAY) -> tuple[Times, BudgetClock]:
    """A board that has heard the time and was charged once, was off, and starts."""
    times = Times()
    clock = times.clock(ledger)
    times.said = times.wall
    charge(ledger, clock.now())
    clock = times.restart(ledger, clock, off=off)
    clock.tick()
    return times, clock


def test_after_a_start_nothing_is_spent_until_a_statement_agrees_with_the_clock(ledger: Ledger) -> None:
    times, clock = started_again(ledger)
    assert not is_free(ledger, clock)
    times.said += DAY
    times.run(60.0)
    assert not is_free(ledger, clock), "a statement of long ago, which somebody kept"
    times.said = times.wall - 7 * HOUR
    assert is_free(ledger, clock)
    assert clock.now() == times.said
    assert ledger.counted() == CountedTime(TODAY, int(times.said), True, 7 * HOUR, 0)


def test_a_statement_of_before_the_start_ends_no_wait_also_if_the_clock_stood_with_it(ledger: Ledger) -> None:
    times, clock = started_again(ledger)
    times.wall = times.said + 60  # as saved at the shutdown
    assert not is_free(ledger, clock)
    times.run(HOUR - 1)
    assert not is_free(ledger, clock)
    times.run(1)
    assert is_free(ledger, clock), "the hour is over"


def test_the_hour_is_not_shorter_because_the_clock_and_an_earlier_statement_set_the_time_forward(
    ledger: Ledger,
) -> None:
    times, clock = started_again(ledger, off=0.0)
    times.said = TODAY + DAY  # heard in the last minute
    clock = times.restart(ledger)
    times.wall = TODAY + DAY
    assert clock.now() == TODAY + DAY
    assert not is_free(ledger, clock)
    times.run(HOUR)
    assert is_free(ledger, clock)


def test_a_board_that_nobody_tells_the_time_waits_for_an_hour(ledger: Ledger) -> None:
    times = Times()

    def started() -> BudgetClock:
        return BudgetClock(ledger, wall=lambda: times.wall, monotonic=lambda: times.ran)

    clock = started()
    assert is_free(ledger, clock), "before the first charge there is nothing to spend twice"
    charge(ledger, clock.now())
    assert is_free(ledger, clock)
    clock = started()
    assert not is_free(ledger, clock)
    assert not clock.listens(), "nothing can come"
    times.run(HOUR)
    assert is_free(ledger, clock)
    assert ledger.counted().lag == 0, "nothing ever sets its time forward"


def test_a_simulation_waits_for_nothing(ledger: Ledger) -> None:
    times = Times()
    charge(ledger, times.clock(ledger).now())
    assert is_free(ledger, BudgetClock(ledger, wall=lambda: times.wall, monotonic=lambda: times.ran, waits=False))


@pytest.mark.parametrize("killed", [False, True])
def test_a_board_that_restarts_every_fifty_minutes_neither_starves_nor_skips_the_wait(
    ledger: Ledger, killed: bool
) -> None:
    times, clock = started_again(ledger)
    free = []
    for _ in range(6):
        minutes = []
        for minute in range(50):
            if is_free(ledger, clock):
                minutes.append(minute)
            times.run(60.0)
        free.append(len(minutes))
        if minutes:
            charge(ledger, clock.now())  # and what follows is another start of a board that has spent
        clock = times.restart(ledger, None if killed else clock, off=600.0)
    assert free[::2] == 3 * [0], "each second run is within the hour"
    lost = SAVE_EVERY_WAITING_S // 60 if killed else 0
    assert all(40 - lost <= each <= 40 for each in free[1::2])


def test_a_clean_stop_loses_no_time(ledger: Ledger) -> None:
    times, clock = started_again(ledger, off=0.0)
    times.run(HOUR + 1711.0)
    clock = times.restart(ledger, clock)
    assert clock.now() == TODAY + HOUR + 1711
    times.run(47.0)
    assert times.restart(ledger).now() == TODAY + HOUR + 1711, "a kill does"


def test_a_round_may_wait_two_minutes_for_the_statement(ledger: Ledger) -> None:
    times, clock = started_again(ledger)
    assert clock.listens()
    times.run(LISTEN_S - 1)
    assert clock.listens()
    times.run(1)
    assert not clock.listens(), "it is declined, and says for how long"
    times, clock = started_again(ledger)
    times.said = times.wall
    assert not clock.listens(), "it is allowed"


def test_while_the_lag_is_not_known_charges_count_for_a_whole_periods_length(ledger: Ledger) -> None:
    """A board that is far behind would else spend two of its periods in a minute, and then a true one."""
    times, clock = started_again(ledger)
    period = Period.of(TODAY, BUDGET.period_s)
    times.run(period.stop - 60 - TODAY)
    rounds = 0
    while is_within_limit(ledger, clock):
        rounds += 1
        charge(ledger, clock.now(), rounds)
    assert rounds == 3
    times.run(120.0)
    assert clock.now() > period.stop
    with pytest.raises(BudgetExceeded, match="in 90 days of its own time"):
        BUDGET.check(ledger, ONE, now=clock.now())
    times.run(DAY)
    lost = times.wall - clock.now()
    times.said = times.wall
    assert clock.now() == times.wall
    assert {entry.at for entry in ledger.entries()[1:]} == {period.stop - 60 + lost}, "as long ago as it was"
    times.run(90 * DAY)
    assert is_within_limit(ledger, clock)


def is_within_limit(ledger: Ledger, clock: BudgetClock) -> bool:
    try:
        BUDGET.check(ledger, ONE, now=clock.now())
    except BudgetExceeded:
        return False
    return True


def test_a_charge_counts_no_earlier_than_it_may_have_been_made(ledger: Ledger) -> None:
    """The last statement is 20 hours old, and the clock may be right: so may a period that begins in between."""
    times, clock = started_again(ledger, off=10 * DAY)
    times.said = times.wall - 20 * HOUR
    charge(ledger, clock.now())
    assert clock.now() == TODAY + 10 * DAY - 20 * HOUR
    times.run(5.0)
    charge(ledger, clock.now())
    made = [TODAY, TODAY + 10 * DAY, TODAY + 10 * DAY + 5]
    assert [entry.at for entry in ledger.entries()] == made
    times.said = times.wall
    assert clock.now() == TODAY + 10 * DAY + 5
    assert [entry.at for entry in ledger.entries()] == made, "they were sure, and stay"


def test_a_damaged_time_of_an_entry_stops_the_rounds(ledger: Ledger) -> None:
    times, clock = started_again(ledger)
    times.run(HOUR)
    charge(ledger, clock.now())
    ledger._connection.execute("UPDATE privacy_ledger_unsure SET at = 'x'")
    with pytest.raises(LedgerError, match="the counted time of device 'board-7' is damaged"):
        BUDGET.check(ledger, ONE, now=clock.now())


@pytest.mark.parametrize(("period_s", "stale_s"), [(HOUR, 60), (DAY, 1440), (90 * DAY, SAVE_EVERY_S)])
def test_what_status_reads_is_a_sixtieth_of_a_period_old_at_most(
    ledger: Ledger, period_s: float, stale_s: float
) -> None:
    """With a period of an hour, `status` said that it ends in 1.72 hours."""
    times = Times()
    times.clock(ledger).now()
    charge(ledger, TODAY)
    times.said = TODAY + 1
    clock = BudgetClock(ledger, monotonic=lambda: times.ran, waits=False, period_s=period_s)
    budget = Budget(1e-5, 8.0, 2.0, period_s)
    for _ in range(int(2 * stale_s / 10)):
        times.run(10.0)
        clock.tick()
        kept = ledger.counted()
        assert kept is not None
        assert clock.now() - kept.now <= stale_s
        assert budget.free_at(ledger, kept.now) - clock.now() <= period_s
    killed = BudgetClock(ledger, monotonic=lambda: 0.0, waits=False, period_s=period_s)
    assert clock.now() - stale_s <= killed.now() <= clock.now(), "never ahead of the time that was counted"
