"""Computes a forecast's figures over calendar days: rounds and epsilon by quarter, hours awake, end of a budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from hushfleet.aggregator.config.calendar import local_zone
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.fleet.tasks.task_check import season_charge
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.planning.season import SeasonCalendar, learns_until, seasons_paid
from hushfleet.durations import Period
from hushfleet.errors import BadInput
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.question import rules_of
from hushfleet.privacy.budget import DEFAULT_DELTA, Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.simulator.world.outcomes import FleetDevice, RoundOutcome

DAY_S = 86400.0


@dataclass(frozen=True)
class Quarter:
    """A quarter of the days.

    :param rounds: number of rounds closed in it.
    :param epsilon: spent in this quarter alone by the device that was charged most overall, within its owner's
        limits.
    """

    rounds: int
    epsilon: float


@dataclass(frozen=True)
class Days:
    """A task over this many days.

    :param awake_h: mean hours for which a device is on until the last round has closed; `training_h`: mean hours in
        which it computes.
    :param task_ends: days from the start until the task's last round closes; None if the task continues.
    :param period_spent: days from the start until the owner's limit for a period first stops the device that was
        charged most; None if never, or without a limit. `lifetime_spent`: the same for the limit over everything.
    :param seasons: how many seasons begin in these days; 0: the task does not repeat.
    :param learns: until when the fleet learns, in words; empty if the task continues.
    """

    days: int
    quarters: tuple[Quarter, ...]
    awake_h: float
    training_h: float
    task_ends: float | None
    period_spent: float | None
    lifetime_spent: float | None
    seasons: int = 0
    learns: str = ""

    def rows(self) -> dict[str, str]:
        """Returns the figures as readable table rows."""
        named = {
            f"quarter {n}": f"{each.rounds} rounds, epsilon {each.epsilon:.3g}"
            for n, each in enumerate(self.quarters, 1)
        }
        ends = "goes on" if self.task_ends is None else f"after {self.task_ends:.0f} days"
        if self.seasons:
            ends = f"each season; {self.seasons} begin in these days. Time, bytes and energy are of the first"
        rows = {
            **named,
            "on, a device": f"{self.awake_h:,.0f} h",
            "training, a device": f"{self.training_h:.3g} h",
            "the task ends": ends,
        }
        if self.learns:
            rows["the fleet"] = self.learns
        if self.period_spent is not None:
            rows["a period's limit"] = f"spent after {self.period_spent:.0f} days: boards wait for the next period"
        if self.lifetime_spent is not None:
            rows["the whole limit"] = f"spent after {self.lifetime_spent:.0f} days: the budget ends"
        return rows


def limited(prepared: PreparedTask, days: int, *, starts: datetime) -> PreparedTask:
    """Returns the task, or its first season, limited to this many days. Raises `BadInput` if it has no schedule."""
    schedule, season = prepared.task.schedule, prepared.task.season
    if not schedule.is_set:
        raise BadInput(
            f"--days {days}: the task has no [schedule], so its rounds follow each other without a pause; for a round "
            'a day add to it: [schedule] with every = "24h"'
        )
    days = days if season is None else min(days, math.ceil(season.period / timedelta(days=1)))
    last = (starts + timedelta(days=days - 1)).date()
    until = last if schedule.until is None else min(last, schedule.until)
    limited = replace(prepared.task, schedule=replace(schedule, until=until), season=None)
    return replace(prepared, task=limited)


class DayBook:
    """Records when each device was charged, while the rounds of a forecast pass.

    :param starts: date and time at which the forecast starts.
    :param budget: the owner's limits; None if there are none.
    :param task: the whole task, whose first season is forecast if it repeats.
    """

    def __init__(self, days: int, *, starts: datetime, budget: Budget | None, task: Task) -> None:
        self._days, self._starts, self._budget, self._task = days, starts, budget, task
        self._closed: list[float] = []
        self._charged: dict[str, list[tuple[float, int]]] = {}

    def noted(self, rounds: Iterable[RoundOutcome], fleet: Sequence[FleetDevice]) -> Iterator[RoundOutcome]:
        """Yields the same rounds, and records them."""
        before = [Counter[int]() for _ in fleet]
        for outcome in rounds:
            self._closed.append(outcome.closed_s)
            self._note(fleet, before, outcome.closed_s)
            yield outcome
        self._note(fleet, before, self._days * DAY_S - 1)  # charges of a round that the last window left open

    def _note(self, fleet: Sequence[FleetDevice], before: list[Counter[int]], at_s: float) -> None:
        for place, device in enumerate(fleet):
            if new := device.spent.charged - before[place]:
                self._charged.setdefault(device.name, []).extend((at_s, size) for size in new.elements())
                before[place] = device.spent.charged.copy()

    def days(self, prepared: PreparedTask, fleet: Sequence[FleetDevice]) -> Days:
        """Returns the totals, after all rounds have passed."""
        delta, count = prepared.spec.privacy.delta, prepared.spec.rounds
        ends = self._closed[-1] / DAY_S if len(self._closed) >= count else None
        began, zone = self._starts.timestamp(), self._task.schedule.timezone or local_zone()
        until = None if ends is None else began + ends * DAY_S
        seasons, closed, most = 0, self._closed, max(self._charged.values(), key=len, default=[])
        if (season := self._task.season) is not None:
            paid, calendar = self._paid(), SeasonCalendar(began, season.period, zone)
            until = None if paid is None else calendar.begins(paid + 1)
            seasons = calendar.number(began + self._days * DAY_S - 1)
            seasons = seasons if paid is None else min(seasons, paid)
            shifts = [calendar.begins(number) - began for number in range(1, seasons + 1)]
            most = [(at + shift, size) for shift in shifts for at, size in most if self._holds(at, shift)]
            closed = [at + shift for shift in shifts for at in closed if self._holds(at, shift)]
        repeats = len(closed) / max(1, len(self._closed))
        learns = "" if until is None and season is None else learns_until(until, now=began, zone=zone)
        allowed, period, lifetime = self._limits([(at, charge_of(prepared, size)) for at, size in most])
        quarters = []
        for number in range(4):
            inside = [charge for at, charge in allowed if self._quarter(at) == number]
            rounds = sum(self._quarter(at) == number for at in closed)
            quarters.append(Quarter(rounds, _epsilon(inside, delta)))
        return Days(
            days=self._days,
            quarters=tuple(quarters),
            awake_h=repeats * sum(device.spent.on_s for device in fleet) / len(fleet) / 3600,
            training_h=repeats * sum(device.spent.compute_s for device in fleet) / len(fleet) / 3600,
            task_ends=None if seasons else ends,
            period_spent=period,
            lifetime_spent=lifetime,
            seasons=seasons,
            learns=learns,
        )

    def _holds(self, at: float, shift: float) -> bool:
        """Returns whether a round of a later season closes in these days. All rounds of the first one count."""
        return not shift or at + shift < self._days * DAY_S

    def _paid(self) -> int | None:
        """Returns how many seasons the lifetime limits pay for; None: no limit ends them."""
        assert self._task.season is not None
        delta, lifetime = DEFAULT_DELTA, self._task.season.lifetime
        if self._budget is not None:
            delta, lifetime = self._budget.delta, min(lifetime, self._budget.lifetime)
        return seasons_paid([], season_charge(self._task), delta=delta, lifetime=lifetime)

    def _quarter(self, at: float) -> int:
        """Returns the number of a quarter, from 0. A round of the last day may close after that day."""
        return min(3, int(4 * at / (self._days * DAY_S)))

    def _limits(
        self, charges: Sequence[tuple[float, Charge]]
    ) -> tuple[Sequence[tuple[float, Charge]], float | None, float | None]:
        """Removes the rounds that the owner's limits forbid.

        Returns the other rounds, and the first day on which each limit forbids one: the period's, then the lifetime's.
        """
        budget, began = self._budget, self._starts.timestamp()
        if budget is None:
            return charges, None, None
        allowed: list[tuple[float, Charge]] = []
        held_at: float | None = None
        for at, charge in charges:
            if _epsilon([each for _, each in allowed] + [charge], budget.delta) > budget.lifetime:
                return allowed, held_at, at / DAY_S
            if budget.period_s:
                start = Period.of(began + at, budget.period_s).start - began
                inside = [each for earlier, each in allowed if earlier >= start]
                if _epsilon([*inside, charge], budget.delta) > budget.in_period:
                    held_at = at / DAY_S if held_at is None else held_at
                    continue
            allowed.append((at, charge))
        return allowed, held_at, None


def charge_of(prepared: PreparedTask, size: int) -> Charge:
    """Returns the charge of a round of `size` devices, or of a round with a question if it is 0 (`Spent.charged`)."""
    if size:
        return prepared.method.charge(RoundTerms(min(prepared.spec.privacy.noise_split, size)))
    return rules_of(prepared.spec, prepared.method, prepared.spec.rounds).method.charge(RoundTerms())


def _epsilon(charges: Sequence[Charge], delta: float) -> float:
    """Composes charges; equal ones are joined first, because a year has hundreds."""
    joined = [replace(charge, steps=charge.steps * count) for charge, count in Counter(charges).items()]
    return epsilon_server_of(joined, delta=delta) if joined else 0.0


def read_budget(limits: object) -> Budget | None:
    """Reads the owner's limits of a DEVICE.toml, or of a fleet.toml's cards. Raises `BadInput` if there are none."""
    sections = limits if isinstance(limits, dict) else {}
    device = sections.get("device")
    found = sections.get("limits") or (device.get("limits") if isinstance(device, dict) else None)
    try:
        budget = Budget.of(found) if isinstance(found, dict) else None
    except ValueError as error:
        raise BadInput(f"--limits: {error}") from error
    if budget is None or math.isinf(min(budget.lifetime, budget.in_period)):
        raise BadInput(
            "--limits: the file has no [limits] (DEVICE.toml) or [device.limits] (fleet.toml) that hold a board back"
        )
    return budget
