"""The owner's two limits: in each period, and over everything; checked against a slow composition of all charges."""

from __future__ import annotations

import math
import random
import time
from datetime import UTC, datetime

import pytest

from hushfleet.durations import Period
from hushfleet.errors import BudgetExceeded
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.ledger import CountedTime, epsilon_server_of
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.spending import charges_on, describe_since, windows_of
from support.stores import memory_ledger

DAY = 86400
BUDGET = Budget(delta=1e-5, lifetime=8.0, in_period=2.0, period_s=90 * DAY)
START = 220 * 90 * DAY  # the beginning of a period, in 2024


@pytest.fixture
def ledger():
    with memory_ledger() as made:
        yield made


def charge(ledger, round, at, multiplier=4.0, window=None):
    ledger._connection.execute("BEGIN")
    what = GaussianMechanism(multiplier).charge()
    ledger.charge(what, task="t", round=round, payload_digest=bytes(32), at=at, window=window)
    ledger._connection.execute("COMMIT")


def slowly(entries, delta=1e-5):
    """Composes Gaussian charges one by one, as the mean shifts of their privacy losses add up."""
    shift = math.sqrt(math.fsum(1 / entry.charge.noise_multiplier**2 for entry in entries))
    return epsilon([Step(1 / shift, 1.0, 1)], delta=delta) if entries else 0.0


def test_a_period_that_is_spent_is_free_again_when_it_is_over(ledger):
    one, rounds = GaussianMechanism(4.0).charge(), 0
    while True:
        try:
            BUDGET.check(ledger, one, now=START + rounds)
        except BudgetExceeded as error:
            said = str(error)
            break
        charge(ledger, rounds, START + rounds)
        rounds += 1
    assert epsilon([Step(4.0, 1.0, rounds)], delta=1e-5) <= 2.0 < epsilon([Step(4.0, 1.0, rounds + 1)], delta=1e-5)
    assert "of the 2 that its owner allows in 90 days" in said
    assert "takes part again, in 90 days" in said
    with pytest.raises(BudgetExceeded, match="in 1 day"):
        BUDGET.check(ledger, one, now=START + 89 * DAY)
    BUDGET.check(ledger, one, now=START + 90 * DAY)


def test_a_round_that_no_period_pays_for_is_not_put_off_to_the_next(ledger):
    with pytest.raises(BudgetExceeded, match=r"this round alone costs .*, so no period allows it"):
        BUDGET.check(ledger, GaussianMechanism(1.0).charge(), now=START)


def test_a_time_that_goes_backwards_refreshes_nothing(ledger):
    one = GaussianMechanism(4.0).charge()
    for round in range(4):
        charge(ledger, round, START + 90 * DAY + round)
    for now in (0, START, START + 90 * DAY - 1):
        assert [each.steps for each in BUDGET.charged_in_period(ledger, now)] == [4]
        with pytest.raises(BudgetExceeded, match="in 90 days"):
            BUDGET.check(ledger, one, now=now)


def test_lifetime_is_composed_over_all_periods(ledger):
    one, period = GaussianMechanism(4.0).charge(), 0
    while epsilon([Step(4.0, 1.0, period + 1)], delta=1e-5) <= 8.0:
        BUDGET.check(ledger, one, now=START + period * 90 * DAY)
        charge(ledger, period, START + period * 90 * DAY)
        period += 1
    with pytest.raises(BudgetExceeded, match="above its limit of 8"):
        BUDGET.check(ledger, one, now=START + period * 90 * DAY)
    assert ledger.epsilon_server(delta=1e-5) == pytest.approx(epsilon([Step(4.0, 1.0, period)], delta=1e-5))
    assert ledger.epsilon_server(delta=1e-5) <= 8.0


def test_what_was_charged_before_time_was_counted_counts_from_then(ledger):
    for round in range(4):
        charge(ledger, round, 0)
    ledger.keep_counted(CountedTime(START + 5, START + 9))
    one = GaussianMechanism(4.0).charge()
    with pytest.raises(BudgetExceeded, match="in 80 days"):
        BUDGET.check(ledger, one, now=START + 10 * DAY)
    BUDGET.check(ledger, one, now=START + 90 * DAY)
    charge(ledger, 4, 0)
    assert ledger.entries()[-1].at == START + 9, "no time was given, so the one that was kept last"


@pytest.mark.parametrize("seed", range(5))
def test_periods_and_windows_agree_with_a_slow_composition(ledger, seed):
    drawn, at = random.Random(seed), START
    for round in range(30):
        at += drawn.randrange(20 * DAY)
        window = drawn.choice([None, Period.of(at, 30 * DAY), Period.of(at, 7 * DAY)])
        charge(ledger, round, at, drawn.choice([3.0, 8.0, 20.0]), window)
    entries = ledger.entries()
    of_period = BUDGET.charged_in_period(ledger, at)
    in_it = [entry for entry in entries if entry.at // (90 * DAY) == at // (90 * DAY)]
    assert epsilon_server_of(of_period, delta=1e-5) == pytest.approx(slowly(in_it), rel=1e-9)
    assert ledger.epsilon_server(delta=1e-5) == pytest.approx(slowly(entries), rel=1e-9)
    for window in windows_of(entries):
        touched = [
            entry
            for entry in entries
            if entry.window is None or set(range(*window, DAY)) & set(range(*entry.window, DAY))
        ]
        assert epsilon_server_of(charges_on(window, entries), delta=1e-5) == pytest.approx(slowly(touched), rel=1e-9)


def test_a_month_is_that_of_the_clock_on_the_wall(monkeypatch):
    """A round at one in the night of the first of July, in Berlin, is in June by UTC; days of a report are local."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert describe_since(int(datetime(2026, 6, 30, 23, 30, tzinfo=UTC).timestamp())) == " since July 2026"
    finally:
        monkeypatch.undo()
        time.tzset()
