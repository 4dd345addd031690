"""The owner's limits on what a device may spend against the server: in each period, and over its lifetime.

Time is counted time (`hushfleet.edge_client.board.budget_clock`), which a wrong clock cannot set forward. The lifetime
limit needs no clock, because it is composed over all entries.

In any interval of true time that is as long as a period, at most twice the period's limit is spent:

- A check uses the earliest time that it may be (counted time), and an entry has the latest time at which it may have
  been charged (`LedgerEntry.at`). So all entries of one true period are composed in the check of the last of them, and
  each true period spends at most the limit. An interval of this length meets two periods.
- If it is not known how far the counted time is behind (after a start, until the time is heard), an entry's time is
  right only relative to the counted time. The board could then spend the limits of two of its periods within one true
  period. Therefore the entries of a whole period's length before the check are composed.
- A board that never hears the time counts only the seconds that it runs. Fewer counted than true seconds lie between
  two entries, so an interval of this length meets at most two counted periods. (If such a board joins a fleet, a true
  period may follow these two, once.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hushfleet.durations import Period, describe_duration, duration_s
from hushfleet.errors import BudgetExceeded
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import LedgerView, epsilon_server_of
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

    @property
    def limits_periods(self) -> bool:
        return bool(self.period_s) and self.in_period < math.inf

    def check(self, ledger: LedgerView, charge: Charge, *, now: int) -> None:
        """Checks, before any training, that one more charge is within both limits. Raises `BudgetExceeded`.

        :param now: counted unix seconds.
        """
        ledger.check_budget(charge, delta=self.delta, epsilon_limit=self.lifetime)
        if not self.limits_periods:
            return
        counted = ledger.counted()
        if counted is not None and now < counted.waits_until:
            left = describe_duration(counted.waits_until - now)
            raise BudgetExceeded(
                f"device {ledger.device!r} may have been off for long. After a start it spends nothing until it hears "
                f"from its fleet what time it is, or has run for an hour; it takes part again, in {left} at the latest"
            )
        sure = counted is None or counted.lag is not None
        charged = self.charged_in_period(ledger, now, sure=sure)
        after = epsilon_server_of([*charged, charge], delta=self.delta)
        if after > self.in_period:
            spent = epsilon_server_of(charged, delta=self.delta)
            length = describe_duration(self.period_s)
            left = describe_duration(max(1.0, self.free_at(ledger, now, sure=sure) - now))
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

    def charged_in_period(self, ledger: LedgerView, now: int, *, sure: bool = True) -> list[Charge]:
        """Returns the charges that count at `now`: those of the current period, or of a period's length before `now`.

        :param sure: whether the lag of `now` behind the true time is known, or no statement can set it forward.
        """
        start = Period.of(now, self.period_s).start if sure else now - int(self.period_s) + 1
        return ledger.charged_since(start)

    def free_at(self, ledger: LedgerView, now: int, *, sure: bool = True) -> int:
        """Returns the counted time at which none of these charges counts any more."""
        latest = ledger.latest() or now
        return Period.of(max(now, latest), self.period_s).stop if sure else latest + int(self.period_s)
