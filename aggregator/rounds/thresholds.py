"""Decides with how many devices a round opens, and how many updates make a model.

Without a fleet the task alone decides. In a fleet both numbers have defaults that follow the number of boards, and the
operator can change them while the task runs: `hushfleet fleet set` writes a small file, which is read again as soon as
it changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.rounds.policy import least_devices
from hushfleet.errors import BadInput
from hushfleet.schema import AtLeast1, Checked, read_file
from hushfleet.written import read_written

DEVICES_SHARE, UPDATES_SHARE = 0.8, 0.6
BY_TASK, BY_FLEET_SET = "the task's file", "fleet set"

log = logging.getLogger("hushfleet.aggregator")


@dataclass(frozen=True)
class Given(Checked):
    """Numbers that the operator has set; None: not set.

    :param task: name of the task for which they hold, also in its later seasons.
    """

    task: str = ""
    min_devices: AtLeast1 | None = None
    min_updates: AtLeast1 | None = None

    @classmethod
    def read(cls, file: Path, task: str) -> Given:
        """Reads the file of `fleet set`; numbers of another task do not count. Raises `BadInput`."""
        given = read_written(cls, file) if file.exists() else cls()
        return given if given.task == task else cls(task)


@dataclass(frozen=True)
class Thresholds:
    """The two numbers, and who has set them, in words.

    :param devices: so many must be able to take part for a round to open. `is_fixed`: after a wait, too; else as many
        as can make a model are then enough.
    :param updates: so many accepted updates make a model. `least`: no smaller number can be set.
    """

    devices: int
    updates: int
    least: int = 1
    is_fixed: bool = False
    devices_by: str = BY_TASK
    updates_by: str = BY_TASK

    @property
    def needed(self) -> int:
        return max(self.devices, self.updates)

    def applied(self, rules: RoundSection) -> RoundSection:
        """Returns the rules of a task with these numbers."""
        return replace(rules, min_devices=self.devices if self.is_fixed else None, min_updates=self.updates)


def of_task(task: Task, *, blocked: int) -> Thresholds:
    """Returns the numbers of a task without a fleet.

    :param blocked: how many devices are locked out; a round of the whole fleet does not need them.
    """
    rules, drawn = task.round, task.privacy.accounting == "secure"
    least = least_devices(rules, devices=task.data.devices, drawn=drawn)
    if not (rules.least_present or (rules.cohort_size and not drawn)):
        least = max(rules.min_updates, least - blocked)  # fewer would waste all charges
    secure = task.secure_spec()
    floor = 1 if secure is None else secure.min_devices
    return Thresholds(least, rules.min_updates, floor, rules.least_present is not None)


def of_fleet(
    task: Task, given: Given, *, in_task: Collection[str], boards: int, blocked: int, begun: bool
) -> Thresholds:
    """Returns the numbers of a fleet's task: as given by the operator, else by the task, else shares of the boards.

    :param in_task: the keys of `[round]` in the task's file.
    :param boards: number of boards that have enrolled and are not locked out.
    :param begun: whether a round was closed. Before, boards may still be on their way, so `data.devices` count.
    """
    plain = of_task(task, blocked=blocked)
    if not task.round.has_cohort:
        return plain
    if not begun:
        boards = max(boards, task.data.devices - blocked)
    cohort, is_secure = min(task.round.cohort_size or boards, boards), task.privacy.accounting == "secure"
    updates, updates_by = given.min_updates, BY_FLEET_SET
    devices, devices_by = given.min_devices, BY_FLEET_SET
    if devices is None:
        devices, devices_by = task.round.min_devices, BY_TASK
    is_fixed = devices is not None
    if updates is None and "min_updates" in in_task:
        updates, updates_by = task.round.min_updates, BY_TASK
    if devices is None:
        devices, devices_by = max(1, math.ceil(DEVICES_SHARE * boards - 1e-9)), _share(DEVICES_SHARE, boards, "boards")
        if not is_secure:
            devices = min(devices, task.round.cohort_size or devices)
    if updates is None:
        updates = max(1, min(math.ceil(UPDATES_SHARE * cohort - 1e-9), devices if is_fixed else cohort))
        updates_by = _share(UPDATES_SHARE, cohort, "boards")
    if plain.least > updates:
        updates, updates_by = plain.least, "what the task's noise relies on"
    return Thresholds(devices, updates, plain.least, is_fixed, devices_by, updates_by)


def keys_in(task_file: Path) -> Collection[str]:
    """Returns the keys of `[round]` in a task's file. Raises `BadInput`."""
    section = read_file(task_file).get("round", {})
    return frozenset(section) if isinstance(section, dict) else frozenset()


class RunningThresholds:
    """Follows the file of `fleet set` while a task runs. A damaged file is skipped with a warning.

    :param file: this file; None without a fleet, for the numbers of the task alone.
    :param task_file: the task's own file, of a fleet.
    """

    def __init__(self, task: Task, file: Path | None = None, task_file: Path | None = None) -> None:
        self._file, self._task = file, task
        self._in_task = () if task_file is None else keys_in(task_file)
        self._seen: tuple[int, ...] | None = None
        self._given = Given(task.first_name)
        self._last: tuple[tuple[object, ...], Thresholds] | None = None

    def now(self, *, boards: int, blocked: int, begun: bool) -> Thresholds:
        """Returns the present numbers; the parameters are those of `of_fleet`."""
        if self._file is not None:
            self._read(self._file)
        key = self._given, boards, blocked, begun
        if self._last is None or self._last[0] != key:
            if self._file is None:
                found = of_task(self._task, blocked=blocked)
            else:
                found = of_fleet(
                    self._task, self._given, in_task=self._in_task, boards=boards, blocked=blocked, begun=begun
                )
            self._last = key, found
        return self._last[1]

    def _read(self, file: Path) -> None:
        try:
            status = file.stat()
            seen = status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns
        except OSError:
            seen = None
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._given = Given.read(file, self._task.first_name)
        except BadInput as error:
            log.warning("%s cannot be read, so what it set before stays: %s", file, error)


def _share(share: float, of: int, what: str) -> str:
    return f"{100 * share:g} % of {of} {what}"
