"""Finds which boards of a fleet can pay for the next round, by the register's charges and the limits of their cards.

The board's own ledger decides. The register's charges are an upper bound (`charge_book`), and the limits are those with
which cards were written: a board that has spent more than they allow has an owner who raised them, so it can pay.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from hushfleet.aggregator.storage.activity import ActivityStore, counted_charges
from hushfleet.durations import Period
from hushfleet.errors import StoreError
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of

MOST_KEPT = 10_000
Counts = Sequence[tuple[bytes, int]]

log = logging.getLogger("hushfleet.aggregator")


class Budgets:
    """Computed again only when the register has changed, a period has ended or rounds cost something else.

    :param clock: unix seconds.
    """

    def __init__(self, register: ActivityStore, budget: Budget, *, clock: Callable[[], float] = time.time) -> None:
        self._register, self.budget, self._clock = register, budget, clock
        self._state: tuple[object, ...] | None = None
        self._spent: Mapping[str, float] = {}
        self._epsilons: dict[tuple[tuple[tuple[bytes, int], ...], Charge | None], float] = {}  # boards spend alike

    def period(self, at: float) -> Period | None:
        """Returns the period that contains `at`, unix seconds; None without periods."""
        return Period.of(at, self.budget.period_s) if self.budget.limits_periods else None

    def spent(self, following: Charge) -> Mapping[str, float]:
        """Returns the boards that cannot pay for a round with this charge, and when they can, unix seconds: at the end
        of the present period, or never (infinity)."""
        period = self.period(self._clock())
        try:
            state = self._register.state(), period, following
            if state != self._state:
                self._spent, self._state = self._find(following, period), state
        except StoreError as error:
            log.warning("%s", error)
        return self._spent

    def _find(self, following: Charge, period: Period | None) -> dict[str, float]:
        if len(self._epsilons) > MOST_KEPT:
            self._epsilons.clear()
        budget, found = self.budget, dict[str, float]()
        limits = [] if period is None else [(budget.in_period, period.start, float(period.stop))]
        for limit, since, frees in (*limits, (budget.lifetime, 0, math.inf)):  # the later one holds for longer
            for device, counts in self._register.all_charge_counts(since=since).items():
                if self._epsilon(counts, None) <= limit < self._epsilon(counts, following):
                    found[device] = frees
        return found

    def _epsilon(self, counts: Counts, following: Charge | None) -> float:
        key = tuple(counts), following
        if key not in self._epsilons:
            more = [] if following is None else [following]
            self._epsilons[key] = epsilon_server_of([*counted_charges(counts), *more], delta=self.budget.delta)
        return self._epsilons[key]
