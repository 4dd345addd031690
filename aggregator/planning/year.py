"""Plans a fleet over the years: the epsilon in each period, the total epsilon, and when a lifetime limit ends it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hushfleet.aggregator.config.calendar import local_zone
from hushfleet.aggregator.planning.advice import MONTH_S, YEAR_S, Question
from hushfleet.aggregator.planning.season import MOST_SEASONS, learns_until, seasons_paid
from hushfleet.durations import describe_duration, duration_s
from hushfleet.errors import BadInput
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import DEFAULT_DELTA, Budget
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge


@dataclass(frozen=True)
class Year:
    """The same task in each period, computed from the plan of one period.

    :param per: length of a period, as it is written in DEVICE.toml.
    :param per_s: length of a period in seconds.
    :param budget: the owner's limits.
    :param rounds_a_month: the average number of rounds per month.
    :param epsilon_in_period: epsilon of one period, for a person in the data of only one period (`data.window`).
    :param epsilon_in_all: epsilon after one, two and five years, for a person in all periods; composed exactly.
    :param periods: how many periods the lifetime limit allows; None: there is no limit, or more than `MOST_SEASONS`.
    """

    per: str
    per_s: float
    budget: Budget
    rounds_a_month: float
    epsilon_in_period: float
    epsilon_in_all: dict[int, float]
    periods: int | None

    @classmethod
    def of(cls, asked: Question, *, rounds: int, multiplier: float, per: str, lifetime: float) -> Year:
        """Raises `BadInput` for a period in an unknown form, or a lifetime limit below one period's epsilon.

        :param rounds: number of rounds of a period's task; `multiplier`: its noise multiplier.
        :param lifetime: the largest total epsilon; inf: no limit.
        """
        try:
            per_s = duration_s(per)
        except ValueError as error:
            raise BadInput(f"--per {error}") from error
        if per_s < 3600:
            raise BadInput(f"--per {per}: must be an hour or more, as limits.per of a board must")
        if lifetime < asked.epsilon:
            raise BadInput(
                f"--lifetime {lifetime:g}: must be at least --epsilon {asked.epsilon:g}, as one period spends"
            )
        charge = Charge("device", DEVICE_ADJACENCY, "gaussian", multiplier, steps=rounds)
        periods = seasons_paid([], charge, delta=asked.delta, lifetime=lifetime)

        def in_all(years: int) -> float:
            done = max(1, int(years * YEAR_S / per_s))
            done = done if periods is None else min(done, max(1, periods))
            return epsilon([Step(multiplier, 1.0, rounds * done)], delta=asked.delta)

        return cls(
            per=per,
            per_s=per_s,
            budget=Budget(asked.delta, lifetime, asked.epsilon, per_s),
            rounds_a_month=rounds * MONTH_S / per_s,
            epsilon_in_period=asked.epsilon,
            epsilon_in_all={years: in_all(years) for years in (1, 2, 5)},
            periods=periods,
        )

    @property
    def ends_after_s(self) -> float | None:
        """When the lifetime limit is spent, seconds after the start; None: never, or after `MOST_SEASONS` periods."""
        return None if self.periods is None else self.periods * self.per_s

    def rows(self) -> dict[str, str]:
        """Returns rows for people: a name, and its value in words."""
        length, after = describe_duration(self.per_s), self.epsilon_in_all
        limit = "inf" if math.isinf(self.budget.lifetime) else f"{self.budget.lifetime:g}"
        ends = "never: there is no limit over everything" if limit == "inf" else f"not in {MOST_SEASONS:,} periods"
        # a board counts at its own delta: with a smaller one than the task's it would decline the last rounds
        delta = "" if self.budget.delta == DEFAULT_DELTA else f"delta = {self.budget.delta:g}, "
        if self.ends_after_s is not None:
            years = f"{self.ends_after_s / YEAR_S:.1f} years"
            now = time.time()
            until = learns_until(now + self.ends_after_s, now=now, zone=local_zone())
            ends = f"after {self.periods} periods, {years}: the next would exceed {limit} over everything"
            ends += f". Begun today, the fleet {until}"
        return {
            "rounds a month": f"{self.rounds_a_month:.3g}",
            f"epsilon in {length}": f"{self.epsilon_in_period:g}, for who appears in the data of one such period alone "
            f'(data.window = "{self.per}")',
            "epsilon in all": ", ".join(
                f"{value:.3g} after {years} year{'s' * (years > 1)}" for years, value in after.items()
            )
            + ", for who appears in all",
            "the budget ends": ends,
            "limits on the boards": f'epsilon_server = {self.epsilon_in_period:g}, {delta}per = "{self.per}", '
            f"epsilon_lifetime = {limit}",
        }
