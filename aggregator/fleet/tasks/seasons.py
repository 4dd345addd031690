"""Starts a fleet's next season by itself, and says where the fleet stands in its seasons.

Everything follows from files: the season's number and the first one's beginning from `task.toml`, what was spent from
the task files of the runs. So the service may be killed at any moment, be off for long, or see its clock jump: it
starts the season of the present time if its number is larger than that of `task.toml`, and never a season twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hushfleet.aggregator.config.calendar import local_zone
from hushfleet.aggregator.config.season import SeasonSection
from hushfleet.aggregator.config.task import Task, load_task
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.service import FleetService, ServicePart
from hushfleet.aggregator.fleet.tasks.next_task import check_next, set_task
from hushfleet.aggregator.fleet.tasks.task_check import season_charge
from hushfleet.aggregator.fleet.trust.device_file import card_limits
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.fleet.view import SeasonView
from hushfleet.aggregator.payloads.start import newest_model
from hushfleet.aggregator.planning.season import SeasonCalendar, seasons_paid
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.fleet_state import RunState
from hushfleet.errors import BadInput
from hushfleet.privacy.budget import DEFAULT_DELTA, Budget
from hushfleet.schema import read_file
from hushfleet.toml_text import to_toml

LOOK_S = 30.0
AGAIN_S = 600.0
"""After an obstacle the season is tried again so many seconds later."""
MOST_WAIT_S = 86400.0
"""The longest wait for a round that is open when its season ends; a tenth of a season at most."""
EVENTS = "events.jsonl"

log = logging.getLogger("hushfleet.fleet")


@dataclass(frozen=True)
class Seasons:
    """The seasons of the task in `task.toml`.

    :param base: name of the first season's task.
    :param calendar: None before the first round of the first season.
    :param further: how many seasons after this one the lifetime limit pays for; None: no limit ends them.
    """

    task: Task
    section: SeasonSection
    base: str
    calendar: SeasonCalendar | None
    further: int | None

    @classmethod
    def of(cls, folder: FleetFolder) -> Seasons | None:
        """Returns None if the task does not repeat. Raises `BadInput` and `StoreError`."""
        task = load_task(folder.task)
        section, zone = task.season, task.schedule.timezone or local_zone()
        if section is None:
            return None
        base, runs, season = task.first_name, folder.path / "runs", season_charge(task)
        first = section.first if section.number > 1 else _first_opening(runs / base / EVENTS)
        calendar = None if first is None else SeasonCalendar(first, section.period, zone)
        budget = Budget.of(card_limits(folder.config)) or Budget(DEFAULT_DELTA)
        lifetime = min(section.lifetime, budget.lifetime)
        found = cls(task, section, base, calendar, further=None)
        spent = [*(season_charge(load_task(file)) for file in found.kept(folder, section.number - 1)), season]
        return replace(found, further=seasons_paid(spent, season, delta=budget.delta, lifetime=lifetime))

    def kept(self, folder: FleetFolder, last: int) -> list[Path]:
        """Returns the task files of the seasons up to number `last` that have a run."""
        names = (self.section.name(self.base, number) for number in range(1, last + 1))
        return [file for name in names if (file := folder.path / "runs" / name / "task.toml").exists()]

    def due(self, now: float) -> int | None:
        """Returns the number of the season that should have begun; None if none should, or the lifetime is spent."""
        if self.calendar is None or self.further == 0:
            return None
        number = self.calendar.number(now)
        return number if number > self.section.number else None

    def view(self, now: float) -> SeasonView:
        view, calendar = SeasonView(self.section.number, self.section.every, further=self.further), self.calendar
        if calendar is None:
            return view
        until = None
        if self.further is not None:  # a season that was left out costs nothing, and another one follows
            last = max(view.number, calendar.number(now) - 1 if self.further else 0)
            until = calendar.begins(last + self.further + 1)
        return replace(view, ends=calendar.begins(view.number + 1), learns_until=until, zone=calendar.zone)


def season_view(folder: FleetFolder, now: float) -> SeasonView | None:
    """Returns where the fleet stands in its seasons; None if its task does not repeat. Raises `StoreError`."""
    try:
        seasons = Seasons.of(folder)
    except BadInput:  # a task file that is being written by hand
        return None
    if seasons is None:
        return None
    if seasons.calendar is None:
        return seasons.view(now)
    obstacle, present = "", seasons.calendar.number(now)
    if present < seasons.section.number:
        back = [Path("TASK.toml"), *seasons.kept(folder, present)][-1]
        obstacle = f"by the clock it is season {present}, and {seasons.task.name} began: the clock is or was wrong. "
        obstacle += f"To go back: hushfleet fleet task {folder.path} {back} --now"
    elif (number := seasons.due(now)) is not None:
        try:
            with _task_of(folder, seasons, number) as file:
                check_next(folder, file)
        except BadInput as error:
            obstacle = f"season {number} does not begin: {error}"
    return replace(seasons.view(now), obstacle=obstacle)


def begin_season(folder: FleetFolder, now: float) -> str:
    """Sets the task of the season of the present time, if it is due. Returns its name; empty if none is due.

    Raises `BadInput` with the reason why it cannot begin, and `StoreError`.
    """
    seasons = Seasons.of(folder)
    if seasons is None or seasons.calendar is None or (number := seasons.due(now)) is None:
        return ""
    patience_s = min(MOST_WAIT_S, seasons.section.period.total_seconds() / 10)
    if now < seasons.calendar.begins(number) + patience_s and _has_open_round(folder.run / EVENTS):
        return ""  # boards have paid for it
    with _task_of(folder, seasons, number) as file:
        set_task(folder, file, prepares=False)  # it differs in names and start alone, and the service has no PyTorch
    return folder.run.name


@contextmanager
def _task_of(folder: FleetFolder, seasons: Seasons, number: int) -> Iterator[Path]:
    """Yields the task file of a season. Raises `BadInput`."""
    kept = folder.path / "runs" / seasons.section.name(seasons.base, number) / "task.toml"
    if kept.exists():  # it began before, and the fleet was given another task meanwhile
        yield kept
        return
    with TemporaryDirectory() as made:
        file = Path(made) / "task.toml"
        file.write_text(to_toml(_following(folder, seasons, number)), "utf-8")
        yield file


def _following(folder: FleetFolder, seasons: Seasons, number: int) -> dict[str, Any]:
    """Returns the content of a season's task file, made from that of the present one."""
    plain: dict[str, Any] = read_file(folder.task)
    section, calendar = seasons.section, seasons.calendar
    assert calendar is not None
    plain["name"] = section.name(seasons.base, number)
    plain["season"] |= {"number": number, "first": calendar.first}
    if section.start == "last":
        for earlier in range(section.number, 0, -1):
            run = f"runs/{section.name(seasons.base, earlier)}"
            if _has_model(folder.path / run):
                plain["model"]["start"] = run
                break
    if section.classes is not None:
        file = folder.path / plain["season"]["classes"]
        plain["data"]["class_names"] = class_names(file, list(seasons.task.class_names))
    return plain


def class_names(file: Path, known: list[str]) -> list[str]:
    """Returns the class names of a season: those of the season before, in their order, and then those that are new.

    Raises `BadInput` if the file cannot be read, or lacks a name of the season before.
    """
    try:
        named = [line.strip() for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"season.classes: {file} cannot be read: {error}") from error
    if gone := [name for name in known if name not in named]:
        raise BadInput(
            f"{file} lacks {', '.join(gone)}, which the fleet has learned: a season keeps the classes of the season "
            "before. Write the name back; to forget a class, give the fleet a task of its own (hushfleet fleet task)"
        )
    return [*known, *dict.fromkeys(name for name in named if name not in known)]


def _has_model(run: Path) -> bool:
    try:
        return newest_model(run).exists()
    except BadInput:  # no round of it is closed
        return False


def _has_open_round(log_file: Path) -> bool:
    state = RunState()
    for event in iterate_events(log_file) if log_file.exists() else ():
        state.apply(event)
    return state.open_round is not None


def _first_opening(log_file: Path) -> float | None:
    """Returns when the first round of a run opened, unix seconds; None if none has opened."""
    if not log_file.exists():
        return None
    return next((float(each["at"]) for each in iterate_events(log_file) if each["event"] == "round_open"), None)


class SeasonStarter(ServicePart):
    """Starts each season when its time has come.

    :param clock: unix seconds.
    """

    every_s, again_s = LOOK_S, AGAIN_S
    fails_as = "the next season does not begin"

    def __init__(self, folder: FleetFolder, *, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock

    def act(self, service: FleetService, now: float) -> None:
        name = begin_season(self._folder, self._clock())
        if name and (season := season_view(self._folder, self._clock())) is not None:
            log.info("the fleet's task is %s: %s", name, descriptions.season(season, now=self._clock()))
