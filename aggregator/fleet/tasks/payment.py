"""Checks whether a fleet's boards can pay for a task within the limits of their cards, and what they could pay for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.report.readable import number
from hushfleet.durations import describe_duration
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.spending import rounds_left

_CHANGE = (
    "Put more noise into the task; or have the boards' owners raise [limits] in DEVICE.toml, and raise [device.limits] "
    "in fleet.toml"
)


@dataclass(frozen=True)
class Payment:
    """A task, and the boards that may pay for it.

    :param charge: charge of a training round, with its part of the task's evaluations (`task_check.mean_charge`).
    :param budget: the budget that the cards allow.
    :param spent: the charges of each board; one empty list for a fleet without boards.
    :param needed: number of boards that a round needs.
    :param boards: number of boards that may pay.
    """

    task: Task
    charge: Charge
    budget: Budget
    spent: Sequence[Sequence[Charge]]
    needed: int
    boards: int

    def obstacle(self, *, begun: bool) -> str | None:
        """Returns why too few boards can pay, and what they could pay for; None if enough can pay.

        :param begun: whether the task continues a run; then boards must be able to pay for one round, else for all.
        """
        name, budget, rounds = self.task.name, self.budget, 1 if begun else self.task.round.rounds
        costs = [epsilon_server_of([*each, self.charge], delta=budget.delta) for each in ([], *self.spent)]
        if costs[0] > budget.in_period:
            return (
                f"no board can pay for a round of {name}: it costs epsilon {number(costs[0])}, and cards allow "
                f"{number(budget.in_period)} in {describe_duration(budget.period_s)}. {_CHANGE}"
            )
        paid = [self._rounds(each, rounds) for each in self.spent]
        enough = self._enough(paid, rounds)
        if enough >= rounds:
            return None
        asked = rounds if enough else 1
        paying = f"{sum(each >= asked for each in paid)} of {self.boards} boards" if self.boards else "no board"
        limit = f"cards allow {number(budget.lifetime)} over all tasks"
        if not enough:
            cost = f"it brings a board to epsilon {number(min(costs[1:]))} or more"
            return f"{paying} can pay for a round of {name}: {cost}, and {limit}. {self._proposal()}{_CHANGE}"
        fewer = ""
        if self.task.privacy.epsilon is None:  # with an epsilon, fewer rounds have less noise, and cost the same
            fewer = f"They can pay for round.rounds = {enough}. "
        return f"{paying} can pay for the {rounds} rounds of {name}: {limit}. {fewer}{self._proposal()}{_CHANGE}"

    def _enough(self, paid: Sequence[int], at_most: int) -> float:
        """Returns how many rounds the boards can pay for together, `at_most` at most.

        :param paid: how many rounds each of them can pay for.

        A round needs `needed` boards. Without a cohort they may differ each time, and each sends one update a round.
        """
        if self.task.round.has_cohort:
            return _nth(paid, self.needed)
        rounds = range(1, at_most + 1)
        return bisect_left(rounds, True, key=lambda each: sum(min(own, each) for own in paid) < each * self.needed)

    def _has_raised(self, spent: Sequence[Charge]) -> bool:
        """Returns whether the board has spent more than its card allows. Then its owner has raised the limit, to a
        value that is not known here."""
        return epsilon_server_of(spent, delta=self.budget.delta) > self.budget.lifetime

    def _rounds(self, spent: Sequence[Charge], at_most: int) -> int:
        """Returns how many rounds a board can pay for, `at_most` at most."""
        if self._has_raised(spent):
            return at_most
        budget = self.budget
        return min(at_most, rounds_left(spent, self.charge, delta=budget.delta, limit=budget.lifetime, at_most=at_most))

    def _proposal(self) -> str:
        """Proposes the largest epsilon of the whole task that enough boards can pay; empty if noise cannot help."""
        if self.charge.raw or self.charge.sample_rate < 1 or not self.charge.noise_multiplier:
            return ""
        largest = _nth([self._largest(each) for each in self.spent], self.needed)
        if not 0.01 <= largest < math.inf:
            return ""
        return f"With all {self.task.round.rounds} rounds they can pay for privacy.epsilon = {largest:g}. "

    def _largest(self, spent: Sequence[Charge]) -> float:
        """Returns the largest epsilon of all rounds together that a board can pay, rounded down."""
        if self._has_raised(spent):
            return math.inf
        rounds, enough, too_little = self.task.round.rounds, 1e9, 1e-3
        for _ in range(60):
            middle = math.sqrt(enough * too_little)
            whole = replace(self.charge, noise_multiplier=middle, steps=rounds)
            fits = epsilon_server_of([*spent, whole], delta=self.budget.delta) <= self.budget.lifetime
            enough, too_little = (middle, too_little) if fits else (enough, middle)
        accountant = self.task.privacy_spec().accountant
        return (
            math.floor(100 * epsilon([Step(enough, 1.0, rounds)], delta=self.task.delta, accountant=accountant)) / 100
        )


def pace(task: Task, charge: Charge, budget: Budget) -> str | None:
    """Describes how the periods of the owners' limits spread the rounds of a task; None if they do not.

    :param charge: as in `Payment`.
    """
    rounds = task.round.rounds
    if not budget.period_s:
        return None
    each = rounds_left([], charge, delta=budget.delta, limit=budget.in_period, at_most=rounds)
    if not 0 < each < rounds:
        return None
    periods, length = math.ceil(rounds / each), describe_duration(budget.period_s)
    return (
        f"cards allow epsilon {number(budget.in_period)} in {length}, which pays for {each} of the {rounds} rounds. A "
        f"board declines the others until the next period begins; all rounds take {periods} such periods"
    )


def _nth(values: Sequence[float], place: int) -> float:
    """Returns the value at `place`, from 1, in descending order; 0 if there are fewer values."""
    return sorted(values, reverse=True)[place - 1] if place <= len(values) else 0
