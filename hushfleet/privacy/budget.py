"""The owner's limits on what a device may spend against the server: in each period, and over its lifetime.

Time is counted time (`hushfleet.edge_client.board.budget_clock`), which a wrong clock cannot set forward. The lifetime
limit needs no clock, because it is composed over all entries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hushfleet.durations import describe_duration, duration_s
from hushfleet.errors import BudgetExceeded
from hushfleet.privacy.ledger import LedgerEntry, LedgerView, epsilon_server_of
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.periods import Period
from hushfleet.schema import require

DEFAULT_DELTA = 1e-5


@dataclass(frozen=True)
class Budget:
    """The limits of one device.

    :param delta: of every epsilon here.
    :param lifetime: the largest epsilon of all charges together; inf: no limit.
    :param in_period: the largest epsilon of the charges of one period; inf: no limit.
    :param period_s: length of a period, seconds; 0: no periods.
    """

    delta: float
    lifetime: float = math.inf
    in_period: float = math.inf
    period_s: float = 0.0

    @classmethod
    def of(cls, limits: Mapping[str, Any]) -> Budget | None:
        """Returns the budget that `[limits]` of a DEVICE.toml sets; None if it sets none. Raises `ValueError`."""
        limit, delta = limits.get("epsilon_server"), limits.get("delta", DEFAULT_DELTA)
        require(isinstance(delta, int | float) and 0 < delta < 1, "delta", delta, "between 0 and 1")
        if limit is None:
            return None
        require(isinstance(limit, int | float) and limit > 0, "epsilon_server", limit, "positive")
        per, lifetime = limits.get("per"), limits.get("epsilon_lifetime")
        if per is None and lifetime is None:
            return cls(float(delta), float(limit))
        require(per is not None, "per", per, 'given together with epsilon_lifetime, such as "90d"')
        try:
            length_s = duration_s(str(per))
        except ValueError as error:
            raise ValueError(f"per = {error}") from error
        require(length_s >= 3600, "per", per, "an hour or more")
        in_order = isinstance(lifetime, int | float) and lifetime >= limit
        least = f"given together with per, and at least epsilon_server = {limit:g} (inf: no limit)"
        require(in_order, "epsilon_lifetime", lifetime, least)
        return cls(float(delta), float(lifetime or 0.0), float(limit), length_s)

    def check(self, ledger: LedgerView, charge: Charge, *, now: int) -> None:
        """Checks, before any training, that one more charge is within both limits. Raises `BudgetExceeded`.

        :param now: counted unix seconds.
        """
        ledger.check_budget(charge, delta=self.delta, epsilon_limit=self.lifetime)
        if not self.period_s or self.in_period == math.inf:
            return
        entries = ledger.entries()
        charged, period = self.charged_in_period(entries, now), self.period(entries, now)
        after = epsilon_server_of([*charged, charge], delta=self.delta)
        if after > self.in_period:
            spent = epsilon_server_of(charged, delta=self.delta)
            length, left = describe_duration(self.period_s), describe_duration(max(1.0, period.stop - now))
            alone = epsilon_server_of([charge], delta=self.delta)
            if alone > self.in_period:
                raise BudgetExceeded(
                    f"device {ledger.device!r} may spend epsilon {self.in_period:g} in {length}, delta {self.delta:g}; "
                    f"this round alone costs {alone:.3f}, so no period allows it: put more noise into the task or "
                    "raise the device's limit"
                )
            raise BudgetExceeded(
                f"device {ledger.device!r} has spent epsilon {spent:.3f} of the {self.in_period:g} that its owner "
                f"allows in {length}, delta {self.delta:g}; this round would make it {after:.3f}. It is free again, "
                f"and takes part again, in {left} of its own time"
            )

    def period(self, entries: Sequence[LedgerEntry], now: int) -> Period:
        """Returns the current period. A `now` before the latest entry counts as that entry's time."""
        return Period.of(max([now, *(entry.at for entry in entries)]), self.period_s)

    def charged_in_period(self, entries: Sequence[LedgerEntry], now: int) -> list[Charge]:
        """Returns the charges of the current period."""
        period = self.period(entries, now)
        return [entry.charge for entry in entries if entry.at >= period.start]


def describe_period(spent: float, budget: Budget, *, left_s: float) -> str:
    """Describes the current period: `1.2 of 2 in these 90 days, which end in 31 days`.

    :param spent: epsilon in it.
    :param left_s: seconds until it ends.
    """
    length, left = describe_duration(budget.period_s), describe_duration(max(1.0, left_s))
    return f"{spent:.3g} of {budget.in_period:.3g} in these {length}, which end in {left}"


def describe_since(at: int) -> str:
    """Describes since when something is counted, by the local clock: ` since May 2026`; empty if it is not known."""
    return time.strftime(" since %B %Y", time.localtime(at)) if at else ""


def windows_of(entries: Sequence[LedgerEntry]) -> list[Period]:
    """Returns the sample windows that were used for training, in order of time."""
    return sorted({entry.window for entry in entries if entry.window is not None})


def charges_on(window: Period, entries: Sequence[LedgerEntry]) -> list[Charge]:
    """Returns the charges that count for a person who appears only in this sample window.

    An entry without a window may have trained on any sample, so it counts in each window.
    """
    return [entry.charge for entry in entries if entry.window is None or entry.window.meets(window)]
