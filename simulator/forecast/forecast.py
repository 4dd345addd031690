"""Forecasts the cost of a round policy: time, stragglers, bytes, energy and privacy, without any training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from statistics import median
from typing import Any

from hushfleet.aggregator.config.round_section import RULES_OF_OTHER_MODE, RoundSection
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.errors import BadInput
from hushfleet.plain_json import to_json
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.budget import Budget
from hushfleet.progress import counted
from hushfleet.schema import parse_toml
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.fleet import device_names
from hushfleet.simulator.forecast.days import DayBook, Days, charge_of, limited
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.world.fleet import WorldFleet
from hushfleet.simulator.world.outcomes import STARTS, FleetDevice, RoundOutcome, Spent, fleet_devices
from hushfleet.simulator.world.sizes import Sizes
from hushfleet.simulator.world.times import Costs

POLICY_KEYS = (
    "cohort_size", "min_devices", "quorum", "min_updates", "deadline_s", "mode", "buffer_size", "max_staleness"
)  # fmt: skip
AS_IN_TASK = "as in the task"


def read_policies(texts: Sequence[str], task: Task) -> dict[str, RoundSection]:
    """Returns the task's rules as each text changes them, by the cleaned text, such as `quorum=0.8,deadline_s=300`.

    Without any text, returns the rules unchanged. Raises `BadInput` for a key that no policy has, a value out of its
    range, and rules with which a fleet of the task's size could never open or close a round.
    """
    policies = {}
    for text in texts or [""]:
        pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
        changed: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = (part.strip() for part in pair.partition("="))
            if key not in POLICY_KEYS or not equals:
                raise BadInput(f"--policy {text!r}: {pair!r} is not KEY=VALUE with one of {', '.join(POLICY_KEYS)}")
            try:
                changed[key] = value if key == "mode" else parse_toml(f"value = {value}")["value"]
            except ValueError as error:
                raise BadInput(f"--policy {text!r}: {key} = {value!r}: must be a number") from error
        changed = RULES_OF_OTHER_MODE.get(changed.get("mode", ""), {}) | changed
        try:
            policies[",".join(pairs) or AS_IN_TASK] = replace(task, round=replace(task.round, **changed)).round
        except ValueError as error:
            raise BadInput(f"--policy {text!r}: {error}") from error
    return policies


@dataclass(frozen=True)
class BoardShare:
    """The outcomes of one kind of board in the cohorts; the five shares sum to 1.

    :param places: how often such a board was chosen.
    """

    board: str
    devices: int
    places: int
    used: float
    late: float
    given_up: float
    declined: float
    lost: float

    @property
    def stragglers(self) -> float:
        """Share of the places whose device had started, and was too slow."""
        return self.late + self.given_up


@dataclass(frozen=True)
class Forecast:
    """Forecast of one policy. Seconds are virtual; energy is estimated from data-sheet figures.

    :param simulated: how many of the devices were simulated; each stands for as many of its kind.
    :param updates_per_round: mean number of updates that went into a new global model.
    :param rounds_without: rounds that closed with too few updates.
    :param epsilon: epsilon against the server of the device that was charged most; inf without noise, or with raw
        values.
    :param epsilon_unused: part of the epsilon spent on updates that went into no model, for the device with most waste.
    :param unused_share: share of unused rounds in the charged rounds of all devices.
    :param days: with `--days`, figures for this many days of the calendar.
    """

    policy: str
    devices: int
    simulated: int
    rounds: int
    total_s: float
    round_median_s: float
    round_p95_s: float
    updates_per_round: float
    rounds_without: int
    boards: tuple[BoardShare, ...]
    up_bytes: float
    down_bytes: float
    energy_wh: float
    epsilon: float
    epsilon_unused: float
    unused_share: float
    days: Days | None = None

    @property
    def stragglers(self) -> float:
        """Share of the stragglers in all places."""
        places = sum(board.places for board in self.boards)
        return sum(board.stragglers * board.places for board in self.boards) / max(places, 1)

    def to_plain(self) -> dict[str, Any]:
        """Returns plain values for JSON; an infinite epsilon is `"inf"`."""
        plain: dict[str, Any] = to_json(asdict(self) | {"stragglers": self.stragglers})
        return plain


def forecast(
    prepared: PreparedTask,
    mix: FleetMix,
    rules: RoundSection,
    *,
    policy: str,
    samples: Sequence[int],
    costs: Costs,
    sizes: Sizes,
    starts: datetime = STARTS,
    days: int | None = None,
    budget: Budget | None = None,
) -> Forecast:
    """Runs all rounds of one policy in a world.

    :param rules: the task's round section under this policy.
    :param policy: name of the policy.
    :param starts: date and time of the start, for the task's schedule.
    :param days: limits the forecast to this many days, and adds figures for them.
    :param budget: the owner's limits, for `days`.

    Raises `HushfleetError` if a round never opens or closes, and `BadInput` for a scenario of other devices.
    """
    whole = prepared.task
    if days is not None:
        prepared = limited(prepared, days, starts=starts)
    task = prepared.task
    names = device_names(len(mix))
    if prepared.spec.question is not None:
        rules = replace(rules, rounds=prepared.spec.rounds)
    schedule = schedule_of(replace(task, round=rules, data=replace(task.data, devices=len(mix))), names)
    fleet = fleet_devices(prepared, mix, names=names, samples=samples, costs=costs, sizes=sizes, schedule=schedule)
    world = WorldFleet(
        prepared, rules, fleet, costs=costs, schedule=schedule, seed=task.seed, starts=starts, short=True
    )
    rounds: Iterable[RoundOutcome] = counted(
        world.rounds(), f"rounds of {len(mix)} devices, {policy}", total=rules.rounds
    )
    if prepared.spec.question is not None:
        rounds = _answers_apart(rounds, world.fleet, prepared.spec.asks)
    if days is None:
        return _totals(prepared, mix, world, rounds, policy=policy)
    book = DayBook(days, starts=starts, budget=budget, task=whole)
    found = _totals(prepared, mix, world, book.noted(rounds, world.fleet), policy=policy)
    return replace(found, days=book.days(prepared, world.fleet))


def _answers_apart(
    rounds: Iterable[RoundOutcome], fleet: Sequence[FleetDevice], asks: Callable[[int], bool]
) -> Iterator[RoundOutcome]:
    """Yields the same rounds; charges of a round with a question are counted as charges of a round of 0 devices."""
    spent = [each for device in fleet for each in (device.spent.charged, device.spent.unused)]
    before = [Counter(each) for each in spent]
    for outcome in rounds:
        for place, each in enumerate(spent):
            if asks(outcome.round) and (answered := (each - before[place]).total()):
                each.clear()
                each.update({**before[place], 0: before[place][0] + answered})
            before[place] = Counter(each)
        yield outcome


def _totals(
    prepared: PreparedTask,
    mix: FleetMix,
    world: WorldFleet,
    outcomes: Iterable[RoundOutcome],
    *,
    policy: str,
) -> Forecast:
    walls, updates, without, total_s = [], 0, 0, 0.0
    for outcome in outcomes:
        walls.append(outcome.wall_s)
        updates += len(outcome.arrivals) if outcome.used else 0
        without += not outcome.used
        total_s = outcome.closed_s
    spent, weight = [device.spent for device in world.fleet], world.weight
    most = max(spent, key=lambda each: _cost(prepared, each.charged))
    worst = max(spent, key=lambda each: _cost(prepared, each.unused))
    charged = sum(each.charged.total() for each in spent)
    return Forecast(
        policy=policy,
        devices=len(mix),
        simulated=len(world.fleet),
        rounds=len(walls),
        total_s=total_s,
        round_median_s=median(walls),
        round_p95_s=sorted(walls)[math.ceil(0.95 * len(walls)) - 1],
        updates_per_round=weight * updates / len(walls),
        rounds_without=without,
        boards=tuple(_share(label, kind, world, mix) for kind, label in enumerate(mix.labels)),
        up_bytes=weight * math.fsum(each.up_bytes for each in spent),
        down_bytes=weight * math.fsum(each.down_bytes for each in spent),
        energy_wh=weight * math.fsum(energy_wh(device) for device in world.fleet),
        epsilon=_epsilon(prepared, most.charged),
        epsilon_unused=epsilon_unused(prepared, worst),
        unused_share=sum(each.unused.total() for each in spent) / charged if charged else 0.0,
    )


def energy_wh(device: FleetDevice) -> float:
    """Returns the energy: active power while the device computed, idle power for the rest of its time on."""
    spent, times = device.spent, device.times
    return (times.active_w * spent.compute_s + times.idle_w * max(0.0, spent.on_s - spent.compute_s)) / 3600


def _share(label: str, kind: int, world: WorldFleet, mix: FleetMix) -> BoardShare:
    spent = [device.spent for device in world.fleet if device.kind == kind]
    places = sum(each.chosen for each in spent)
    fates = ("used", "late", "given_up", "declined", "lost")
    shares = {fate: sum(getattr(each, fate) for each in spent) / max(places, 1) for fate in fates}
    return BoardShare(label, list(mix.dealt).count(kind), round(world.weight * places), **shares)


def _cost(prepared: PreparedTask, rounds: Counter[int]) -> int:
    """Returns a sort key of what a device has spent: a round whose noise is divided by n counts n times."""
    return sum(_split(prepared, size) * count for size, count in rounds.items())


def _split(prepared: PreparedTask, cohort_size: int) -> int:
    return max(1, min(prepared.spec.privacy.noise_split, cohort_size))


def _epsilon(prepared: PreparedTask, rounds: Counter[int]) -> float:
    charges = [(charge_of(prepared, size), count) for size, count in rounds.items() if count]
    if any(charge.raw for charge, _ in charges):
        return math.inf
    steps = [Step(charge.noise_multiplier, charge.sample_rate, charge.steps * count) for charge, count in charges]
    privacy = prepared.spec.privacy
    return epsilon(steps, delta=privacy.delta, accountant=privacy.accountant)


def epsilon_unused(prepared: PreparedTask, spent: Spent) -> float:
    """Returns the epsilon of all rounds minus the epsilon without the unused ones, because epsilons do not add up."""
    if not spent.unused:
        return 0.0
    total = _epsilon(prepared, spent.charged)
    return total if math.isinf(total) else total - _epsilon(prepared, spent.charged - spent.unused)
