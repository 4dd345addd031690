"""Changes with how many boards a round opens and closes, while the task runs (`hushfleet fleet set`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hushfleet import atomic_file
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.fleet.tasks.task_check import thresholds
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.watching.watch import view_now
from hushfleet.aggregator.rounds.thresholds import Given, Thresholds
from hushfleet.errors import BadInput
from hushfleet.toml_text import toml_value

KEYS = ("round.min_devices", "round.min_updates")
DEFAULT = "default"


def show(folder: FleetFolder) -> list[str]:
    """Returns the present numbers, and who has set them, line by line."""
    found, _ = _now(folder, load_task(folder.task))
    return [
        f"{KEYS[0]} = {found.devices} (from {found.devices_by}): a round opens when so many boards can take part",
        f"{KEYS[1]} = {found.updates} (from {found.updates_by}): so many updates make a model",
    ]


def change(folder: FleetFolder, settings: Sequence[str]) -> None:
    """Writes the numbers, which a running aggregator takes within seconds. Raises `BadInput` for numbers with which no
    round could make a model, or that the noise of secure aggregation does not allow.

    :param settings: such as `round.min_devices=12`; the word `default` instead of a number drops what was set.
    """
    task = load_task(folder.task)
    given = Given.read(folder.round, task.first_name)
    for each in settings:
        key, value = _read(folder, each)
        given = replace(given, min_devices=value) if key == KEYS[0] else replace(given, min_updates=value)
    _check(folder, task, given)
    lines = ["# Made by `hushfleet fleet set`", f"task = {toml_value(given.task)}"]
    lines += [f"{name} = {value}" for name in ("min_devices", "min_updates") if (value := getattr(given, name))]
    atomic_file.write_whole(folder.round, "\n".join([*lines, ""]).encode(), durable=True)


def _read(folder: FleetFolder, setting: str) -> tuple[str, int | None]:
    key, equals, text = (part.strip() for part in setting.partition("="))
    if key not in KEYS:
        raise BadInput(
            f"{setting!r}: {' and '.join(KEYS)} can be changed while a task runs; for everything else give the fleet a "
            f"next task: hushfleet fleet task {folder.path} TASK.toml"
        )
    if not equals or not (text == DEFAULT or (text.isdecimal() and int(text) > 0)):
        raise BadInput(f"{setting!r}: write {key}=12, a number of boards from 1 on, or {key}={DEFAULT}")
    return key, None if text == DEFAULT else int(text)


def _check(folder: FleetFolder, task: Task, given: Given) -> None:
    found, boards = _now(folder, task, given)
    if not task.round.has_cohort:
        raise BadInput('round.mode = "buffered": a buffered round waits for no number of boards, so none can be set')
    for key, number in zip(KEYS, (given.min_devices, given.min_updates), strict=True):
        if number is not None and number > boards:
            raise BadInput(
                f"{key} = {number}: the fleet has {boards} boards that are not locked out, so no round could make a "
                f"model; take {boards} or fewer"
            )
    if given.min_updates is not None and given.min_updates < found.least:
        raise BadInput(
            f"{KEYS[1]} = {given.min_updates}: the noise of {task.name} relies on sums of {found.least} boards or "
            f"more; take {found.least} or more, or give the fleet another task: hushfleet fleet task "
            f"{folder.path} TASK.toml"
        )
    if given.min_devices is not None and given.min_devices < found.updates:
        too = f", or also set {KEYS[1]}={given.min_devices}" if given.min_devices >= found.least else ""
        raise BadInput(
            f"{KEYS[0]} = {given.min_devices}: a model takes {found.updates} updates ({KEYS[1]}, from "
            f"{found.updates_by}), so boards would pay for nothing; take {found.updates} or more{too}"
        )


def _now(folder: FleetFolder, task: Task, given: Given | None = None) -> tuple[Thresholds, int]:
    """Returns the present numbers, and how many boards are not locked out."""
    view = view_now(folder)
    able = [board for board in view.boards if board.standing != "blocked"]
    enrolled = sum(board.standing == "enrolled" for board in able)
    begun = view.run is not None and view.run.rounds_closed > 0
    blocked = len(view.boards) - len(able)
    return thresholds(task, folder, boards=enrolled, blocked=blocked, begun=begun, given=given), len(able)
