"""Checks whether a fleet can do a task: it needs the boards with which a round opens, and these must be able to pay."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from hushfleet.aggregator.config.calendar import Schedule
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.fleet.tasks.pay import told_images
from hushfleet.aggregator.fleet.tasks.payment import Payment, pace
from hushfleet.aggregator.fleet.tasks.spending import Spending
from hushfleet.aggregator.fleet.trust.device_file import DATA, LIMITS, card_limits, fits, kind_of
from hushfleet.aggregator.fleet.trust.folder import FleetConfig, FleetFolder
from hushfleet.aggregator.fleet.trust.registry import boards_of
from hushfleet.aggregator.planning.evaluation_error import useless_evaluation
from hushfleet.aggregator.planning.pay import images_of
from hushfleet.aggregator.report.readable import number
from hushfleet.aggregator.results.fleet_state import Shortfall
from hushfleet.aggregator.rounds.shortfall import shortfall_advice, shortfall_text
from hushfleet.aggregator.rounds.thresholds import Given, Thresholds, keys_in, of_fleet
from hushfleet.aggregator.storage.activity import ActivityStore
from hushfleet.aggregator.storage.board import Board
from hushfleet.firmware_profiles.cards.device_toml import decline_of
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.params import ParamLayout
from hushfleet.privacy.budget import Budget
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.toml_text import toml_value
from hushfleet.wire.format.health import Problem

_ADD = "add boards (hushfleet fleet add), or set"
_ANY_LAYOUT = ParamLayout(("weight", "bias"), ((2, 2), (2,)))


def obstacles(task: Task, folder: FleetFolder) -> list[str]:
    """Returns the reasons why the fleet as it is cannot do the task, one sentence each.

    In a fleet without boards only the task is checked. Raises `BadInput` if its noise cannot be computed, and
    `StoreError`.
    """
    rows = boards_of(folder)
    with contextlib.ExitStack() as stack:
        exists = ActivityStore.exists(folder.aggregator)
        register = stack.enter_context(ActivityStore(folder.aggregator)) if exists else None
        able = [row.device for row in rows if not row.is_blocked]
        enrolled = sum(row.standing == "enrolled" for row in rows)
        begun = (folder.path / "runs" / task.name).exists()
        needed = thresholds(task, folder, boards=enrolled, blocked=len(rows) - len(able), begun=begun).needed
        found = [too_few(task.name, needed, len(able))] if rows and len(able) < needed else []
        buffer = task.round.buffer_size or 0
        if rows and len(able) < buffer:
            found.append(f"{_never_full(task, len(able))}; {_ADD} round.buffer_size to {max(1, len(able))} or fewer")
        charge, limits = first_charge(task), card_limits(folder.config)
        if (over := _is_over(task)) is not None:
            found.append(f"{over}, so no round of {task.name} ever opens")
        if (why := decline_of(limits, charge, task.method.name, task.secure_spec())) is not None:
            found.append(f"every board declines {task.name}: {why} (fleet.toml: [device.limits], [secure_sums])")
        if not begun and (useless := useless_for(task, folder, boards=enrolled, needed=needed)) is not None:
            found.append(useless)
        spending = Spending(limits)
        if found or spending.budget is None:
            return found
        if not _pays(task, spending.budget):
            more = f"than the {number(spending.budget.in_period)} that cards allow. {_season_line(season_limits(task))}"
            return [f"a season of {task.name} costs more epsilon {more}"]
        spent = [spending.charges(device, register) for device in able] or [[]]
    payment = Payment(task, mean_charge(task), spending.budget, spent, min(buffer or needed, len(spent)), len(able))
    why = payment.obstacle(begun=begun)
    return [] if why is None else [why]


def useless_for(task: Task, folder: FleetFolder, *, boards: int, needed: int) -> str | None:
    """Says why the task's evaluation would tell nothing, as `useless_evaluation`.

    :param boards: number of boards that are enrolled.
    :param needed: number of boards with which a round opens; more may be enrolled.
    """
    return useless_evaluation(task, devices=max(boards, needed), images=told_images(folder) or images_of(task))


def spread(task: Task, folder: FleetFolder) -> str | None:
    """Describes how the owners' limits spread the rounds of a task over time; None if they do not."""
    budget = Budget.of(folder.config.device.get("limits", {}))
    return None if budget is None else pace(task, mean_charge(task), budget)


def thresholds(
    task: Task, folder: FleetFolder, *, boards: int, blocked: int, begun: bool, given: Given | None = None
) -> Thresholds:
    """Returns with how many boards a round opens and closes, as the aggregator finds them. The parameters are those of
    `of_fleet`; `given` is by default what the operator has set."""
    in_task = keys_in(folder.task) if task.name == folder.run.name else _stated(task)
    given = given or Given.read(folder.round, task.first_name)
    return of_fleet(task, given, in_task=in_task, boards=boards, blocked=blocked, begun=begun)


def _stated(task: Task) -> tuple[str, ...]:
    """Returns the keys that a task without a file must have been given."""
    return ("min_updates",) if task.round.min_updates > 1 else ()


def too_few(task: str, needed: int, boards: int) -> str:
    """Says that the fleet has too few boards.

    :param boards: number of boards that are not locked out.
    """
    return (
        f"a round of {task} opens with {needed} boards, and the fleet has {boards}, so none ever opens: {_ADD} "
        f"round.min_devices (or data.devices) to {boards} or fewer in the task"
    )


def _never_full(task: Task, boards: int) -> str:
    """Says that the buffers of a task are larger than the fleet."""
    return (
        f"a model of {task.name} takes {task.round.buffer_size} updates (round.buffer_size), each board sends one, and "
        f"the fleet has {boards}: none is ever made"
    )


def waits(
    folder: FleetFolder,
    boards: Sequence[Board],
    *,
    round: int,
    waiting: Shortfall | None,
    is_open: bool = False,
    now: float,
) -> list[Problem]:
    """Finds what the next round waits for, if it waits. Raises `BadInput` for a task file that cannot be read.

    :param round: number of this round.
    :param waiting: what the aggregator says about it; None: nothing.
    :param is_open: whether the round is open; then it can only wait for boards that the fleet does not have.
    :param now: unix seconds.
    """
    task = load_task(folder.task)
    if (over := _is_over(task)) is not None:
        advice = "Set a later day in the task's file, and start the aggregator again."
        return [Problem(f"round {round} of {task.name} never opens: {over}", advice, urgent=True)]
    able = sum(board.standing != "blocked" for board in boards)
    if boards and able < (task.round.buffer_size or 0):
        advice = f"Add boards, or set round.buffer_size to {max(1, able)} or fewer in the task, and start again."
        return [Problem(_never_full(task, able), advice, urgent=True)]
    if is_open:
        return []
    enrolled, begun = sum(board.standing == "enrolled" for board in boards), round > 1
    found = thresholds(task, folder, boards=enrolled, blocked=len(boards) - able, begun=begun)
    needed = found.needed
    if boards and able < needed:
        own = f"hushfleet fleet set {folder.path} round.min_devices={max(1, able)}"
        advice = f"Add boards, or: {own}." if able >= found.least else "Add boards, or give the fleet another task."
        what = f"round {round} of {task.name} opens with {needed} boards, and the fleet has {able}: it never opens"
        return [Problem(what, advice, urgent=True)]
    if waiting is None:
        return []
    return [Problem(shortfall_text(waiting, now=now), shortfall_advice(waiting).replace("DIR", str(folder.path)))]


def _is_over(task: Task) -> str | None:
    """Says that the task's last day has passed; None if it has not."""
    until = task.schedule.until
    over = until is not None and math.isinf(Schedule(task.schedule).opens(time.time(), last=None))
    return f"until schedule.until = {until} no window opens any more" if over else None


def first_charge(task: Task) -> Charge:
    """Returns the charge of a round. No network is needed, because only the charges of DP-FedSim depend on the number
    of layers, and more layers cost more."""
    privacy = task.privacy_spec()
    method = make_method(task.method.name, task.method.settings, privacy, _ANY_LAYOUT, rounds=task.round.rounds)
    return method.charge(RoundTerms(privacy.noise_split))


def mean_charge(task: Task) -> Charge:
    """Returns the charge of a training round with its part of the task's evaluations. All training rounds at this
    charge cost as much as the whole task."""
    charge = first_charge(task)
    return replace(charge, noise_multiplier=charge.noise_multiplier / task.noise_factor)


def season_charge(task: Task) -> Charge:
    """Returns the charge of all rounds of a task."""
    charge = mean_charge(task)
    return replace(charge, steps=charge.steps * task.round.rounds)


def season_limits(task: Task) -> dict[str, Any]:
    """Returns the limits of boards that allow a season in each of their periods; empty if the task does not repeat.

    Without `season.lifetime` the usual limit over everything ends the seasons.
    """
    season = task.season
    spends = math.inf if season is None else epsilon_server_of([season_charge(task)], delta=LIMITS["delta"])
    if season is None or math.isinf(spends) or season.period < timedelta(hours=1):
        return {}
    limit, lifetime = math.ceil(1000 * spends - 1e-6) / 1000, season.lifetime
    whole = lifetime if math.isfinite(lifetime) else LIMITS["epsilon_server"]
    return {"epsilon_server": limit, "per": season.every, "epsilon_lifetime": max(limit, whole)}


def season_note(task: Task, config: FleetConfig) -> str | None:
    """Says how the cards' limits should follow the seasons of a task; None if they do, or if it does not repeat."""
    wanted, budget = season_limits(task), Budget.of(card_limits(config))
    if not wanted or budget is None:
        return None
    asked = Budget.of({**wanted, "delta": budget.delta})
    assert asked is not None
    if budget.period_s == asked.period_s and budget.lifetime >= asked.lifetime and _pays(task, budget):
        return None
    return f"the limits on the cards do not follow the seasons of {task.name}. {_season_line(wanted)}"


def kind_note(task: Task, config: FleetConfig) -> str | None:
    """Says that the cards name another kind of data than the task trains on; None if they do not.

    Nothing refuses it, because boards may have been configured by hand.
    """
    kind = str(config.device.get("data", {}).get("kind", DATA["kind"]))
    if fits(task.data, kind):
        return None
    return (
        f"{task.name} trains on data of kind {kind_of(task.data)!r}, and cards get data.kind = {kind!r}: such boards "
        "are charged for noise alone, or decline"
    )


KIND_ADVICE = "Write the kind into [device.data] of fleet.toml, and into the DEVICE.toml of boards that have a card."


def _pays(task: Task, budget: Budget) -> bool:
    """Returns whether a period of the cards allows what is spent in it, if the task repeats."""
    season = task.season
    if season is None or 0 < budget.period_s < season.period.total_seconds():
        return True  # shorter periods spread the rounds (`pace`)
    return epsilon_server_of([season_charge(task)], delta=budget.delta) <= budget.in_period


def _season_line(limits: dict[str, Any]) -> str:
    values = ", ".join(f"{key} = {toml_value(value)}" for key, value in limits.items())
    return f"Write into fleet.toml, before cards are written: [device.limits] with {values}"
