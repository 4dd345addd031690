"""Makes the report of a fleet over all its tasks: one page for the fleet's owner, from the fleet's folder alone."""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hushfleet.aggregator.config.task import load_task
from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.pay import pay_of_fleet
from hushfleet.aggregator.fleet.registry import FleetRegistry, RegisteredBoard
from hushfleet.aggregator.fleet.releases import releases
from hushfleet.aggregator.fleet.seasons import season_view
from hushfleet.aggregator.fleet.sightings import sightings
from hushfleet.aggregator.fleet.spending import Spending
from hushfleet.aggregator.fleet.watch import EVENTS, Course
from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.report.page import Facts, PageCell, Prose, Section, SectionPart, Table, page
from hushfleet.aggregator.results.report.readable import NOT_MEASURED, epsilon_number, number, percent, points, size
from hushfleet.aggregator.results.result import Lifetime, LostRounds
from hushfleet.durations import describe_duration
from hushfleet.errors import BadInput
from hushfleet.privacy.budget import Budget, describe_since
from hushfleet.privacy.protection import protection

NEVER = "never"


@dataclass
class TaskHistory:
    """One task of the fleet, read from the log of its run.

    :param run: the name of its run's folder.
    :param opened: when its rounds opened, unix seconds.
    :param took_part: number of accepted updates of each board.
    :param without: number of rounds that closed without a new model.
    :param outages_s: length of each time in which the aggregator had no connection to the broker.
    """

    run: str = ""
    course: Course = field(default_factory=Course)
    opened: list[float] = field(default_factory=list)
    took_part: Counter[str] = field(default_factory=Counter)
    updates_by_month: Counter[str] = field(default_factory=Counter)
    last_seen: dict[str, float] = field(default_factory=dict)
    without: int = 0
    outages_s: list[float] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> TaskHistory:
        history, lost_at = cls(file.parent.name), None
        for event in iterate_events(file):
            history.course.apply(event)
            kind, at, device = event["event"], float(event.get("at") or 0.0), event.get("device")
            if kind == "round_open":
                history.opened.append(at)
            elif kind == "round_close":
                history.without += not event.get("participants")
            elif kind == "update" and event.get("code") == "accepted":
                history.took_part[str(device)] += 1
                history.updates_by_month[_month(at)] += 1
                history.last_seen[str(device)] = at
            elif kind == "link" and event.get("state") == "down":
                lost_at = at
            elif kind == "link" and lost_at is not None:
                history.outages_s.append(at - lost_at)
                lost_at = None
        return history

    @property
    def accuracy(self) -> str:
        """The accuracy of the shared model on public test images, after the newest round that was tested."""
        known = [point.accuracy for point in self.course.points if point.accuracy is not None]
        return percent(known[-1]) if known else NOT_MEASURED

    @property
    def gain(self) -> str:
        """The gain over training alone, if the task's newest evaluation was exact enough."""
        row = self.course.evaluation
        if row is None or not row.is_useful:
            return NOT_MEASURED
        return f"{points(row.gain.value, '')} ± {100 * row.gain.error:.1f} points"


def histories(folder: FleetFolder) -> list[TaskHistory]:
    """Reads the fleet's tasks that have opened a round, the oldest first."""
    found = (TaskHistory.read(file) for file in folder.path.glob(f"runs/*/{EVENTS}"))
    return sorted((task for task in found if task.opened), key=lambda task: task.opened[0])


def render_fleet_report(folder: FleetFolder, *, now: float | None = None) -> str:
    """Makes the report as HTML text. Raises `StoreError` if a file of the fleet is damaged.

    :param now: unix seconds; by default the clock.
    """
    now = time.time() if now is None else now
    tasks, season = histories(folder), season_view(folder, now)
    with FleetRegistry(folder.path) as registry, DeviceRegister(folder.aggregator) as register:
        spending = Spending(folder.config.device.get("limits", {}), clock=lambda: now)
        lifetimes, boards = spending.lifetimes(register), registry.boards()
        locked_out = {row.device: row.blocked for row in register.devices() if row.blocked is not None}
        locked_out |= {
            board.device: board.reason or "no reason was given" for board in boards if board.state == "blocked"
        }
        sections = [
            _tasks(tasks, _present_run(folder)),
            _months(tasks),
            _boards(tasks, boards, registry, lifetimes, spending.budget, locked_out),
            _software(folder, registry, boards),
            _interruptions(tasks),
        ]
    worst = max(lifetimes.values(), key=lambda each: each.epsilon_server, default=None)
    took_part = {device for task in tasks for device in task.took_part}
    rounds = sum(task.course.rounds_closed for task in tasks)
    answer = [
        f"{_count(rounds, 'round')} of {_count(len(tasks), 'task')} ran{_between(tasks)}; {len(took_part)} of "
        f"{_count(len({board.device for board in boards} | took_part), 'board')} took part.",
        _privacy(worst, spending.budget),
        _paid(folder, tasks, None if season is None else season.lasts_s(now)),
        "" if season is None else f"The task repeats: {descriptions.season(season, now=now)}.",
    ]
    tiles = [
        (f"{rounds}", "rounds closed"),
        (f"{len(took_part)}", f"boards took part; {len(locked_out)} locked out"),
        *_epsilon_tiles(worst),
    ]
    return page(
        f"The fleet {folder.config.federation}",
        [section for section in sections if section is not None],
        under=f"as of {_day(now)}, over all tasks that this folder knows",
        answer=[words for words in answer if words],
        tiles=tiles,
    )


def _epsilon_tiles(worst: Lifetime | None) -> list[tuple[str, str]]:
    if worst is None:
        return []
    word = protection(worst.epsilon_server)
    cell = PageCell(epsilon_number(worst.epsilon_server), word.partition(" ")[0])
    return [(cell, f"epsilon in all, at most, of the board that spent most: {word}")]


def _privacy(worst: Lifetime | None, budget: Budget | None) -> str:
    if worst is None:
        return "No board has spent any privacy."
    period = f" {worst.period}, and" if worst.period else ""
    is_over = budget is not None and worst.epsilon_server > budget.lifetime
    limit = f" of {number(budget.lifetime)}" if budget is not None and math.isfinite(budget.lifetime) else ""
    over = (
        " That is above what cards allow: of the rounds that are noted, some were not trained, or its owner has raised "
        "the limit on the board."
        if is_over
        else ""
    )
    shown = epsilon_number(worst.epsilon_server, None if budget is None else budget.lifetime)
    return (
        f"The board that has spent most has spent at most epsilon{period} {shown}{limit} in "
        f"all{describe_since(worst.since)}, at delta {number(worst.delta)}: {protection(worst.epsilon_server)}. "
        f"Its own ledger is exact; the aggregator counts each round in which it may have trained.{over}"
    )


def _paid(folder: FleetFolder, tasks: Sequence[TaskHistory], lasts_s: float | None) -> str:
    """Says whether the fleet pays, as `fleet status` does."""
    with contextlib.suppress(BadInput):
        present = {task.run: task.course.evaluation for task in tasks}.get(folder.run.name)
        found = pay_of_fleet(load_task(folder.task), folder, evaluation=present, lasts_s=lasts_s)
        if found is not None:
            return f"{found.in_words}."
    return (
        "Whether it paid is not known here: the task has no [evaluation] that was exact enough. On each board, "
        "hushfleet-edge status says how many of its held-out images the own model gets right."
    )


def _present_run(folder: FleetFolder) -> str:
    """Returns the name of the run of the fleet's task; empty if its file cannot be read."""
    with contextlib.suppress(BadInput):
        return folder.run.name
    return ""


def _tasks(tasks: Sequence[TaskHistory], present: str) -> Section:
    """:param present: name of the present run."""
    rows = [
        (
            task.course.task,
            PageCell(f"{_day(task.opened[0])} to {_day(task.opened[-1])}", "whole"),
            f"{task.course.rounds_closed}",
            f"{len(task.took_part)}",
            f"{task.took_part.total()}",
            number(task.course.epsilon_server),
            task.accuracy,
            task.gain,
            "finished" if task.course.finished else "goes on" if task.run == present else "not finished",
        )
        for task in tasks
    ]
    head = (
        "task",
        "rounds opened",
        "rounds",
        "boards",
        "updates",
        "epsilon of the task",
        "shared model",
        "over alone",
        "state",
    )
    return _section(
        "tasks",
        "Tasks",
        "What was trained, when, and by how many.",
        Table(head, rows, names=2),
        "No round has run yet.",
    )


def _months(tasks: Sequence[TaskHistory]) -> Section:
    opened, updates = Counter[str](), Counter[str]()
    for task in tasks:
        opened.update(_month(at) for at in task.opened)
        updates.update(task.updates_by_month)
    rows = [(month, f"{opened[month]}", f"{updates[month]}") for month in sorted(opened | updates)]
    return _section(
        "months", "Months", "When rounds ran.", Table(("month", "rounds", "updates"), rows), "No round has run yet."
    )


def _boards(
    tasks: Sequence[TaskHistory],
    boards: Sequence[RegisteredBoard],
    registry: FleetRegistry,
    lifetimes: Mapping[str, Lifetime],
    budget: Budget | None,
    locked_out: Mapping[str, str],
) -> Section:
    """:param locked_out: reason of each lock-out, by the operator or by the aggregator."""
    query = "SELECT id, COUNT(DISTINCT public_key) FROM certificates GROUP BY id"
    cards: dict[str, int] = {row[0]: row[1] for row in registry.rows(query)}
    known, rounds, seen = {board.device: board for board in boards}, Counter[str](), dict[str, float]()
    for task in tasks:
        rounds += task.took_part
        seen |= task.last_seen
    per = "" if budget is None or not budget.period_s else f"the present {describe_duration(budget.period_s)}"
    rows = []
    for device in sorted(known.keys() | rounds.keys() | lifetimes.keys()):
        spent = lifetimes.get(device)
        rows.append(
            (
                device,
                f"locked out: {locked_out[device]}"
                if device in locked_out
                else _standing(known.get(device), cards.get(device, 0)),
                f"{rounds[device]}",
                PageCell(_day(seen[device]) if device in seen else NEVER, "whole"),
                *([("0" if spent is None else spent.period.partition(" in ")[0])] if per else []),
                number(0.0 if spent is None else spent.epsilon_server),
            )
        )
    period = [f"epsilon in {per}"] if per else []
    limit = "" if budget is None else f", where cards allow {number(budget.lifetime)}"
    head = ("board", "state", "updates", "last one", *period, f"epsilon in all, at most{limit}")
    return _section(
        "boards",
        "Boards",
        "Who is in the fleet, who took part, and what it has cost each.",
        Table(head, rows, names=2),
        "The fleet has no boards yet.",
    )


def _standing(board: RegisteredBoard | None, cards: int) -> str:
    """Says since when a board is enrolled, or that it has left the fleet."""
    if board is None:
        return "left the fleet"
    since = f"since {_day(board.enrolled)}" if board.enrolled else "not enrolled yet"
    return f"{since}, with a new card" if cards > 1 else since


def _software(folder: FleetFolder, registry: FleetRegistry, boards: Sequence[RegisteredBoard]) -> Section:
    rolled = [
        (version, f"rolled out from {_day(began)}: {state}{f' ({reason})' if reason else ''}")
        for version, state, reason, began in registry.rows(
            "SELECT version, state, reason, began FROM rollouts ORDER BY number"
        )
    ]
    rows = []
    for each in releases(registry):
        file = folder.releases / each.file
        came = f"added {_day(file.stat().st_mtime)}, " if file.exists() else ""
        rows.append((f"{each.version} for {each.platform}", f"{came}{size(each.size)}"))
    seen = sightings(registry)  # also of boards that have left, and of former cards
    heard = [(seen.get(board.device), board) for board in boards if board.state == "enrolled"]
    running = Counter(one.version for one, board in heard if one and one.version and one.public_key == board.public_key)
    rows += rolled
    rows += [(f"boards with {version}", f"{count}") for version, count in running.most_common()]
    return _section("releases", "Releases", "The software of the boards.", Facts(rows), "No release was offered.")


def _interruptions(tasks: Sequence[TaskHistory]) -> Section | None:
    outages = [length for task in tasks for length in task.outages_s]
    rows = []
    if outages:
        longest = describe_duration(max(1.0, *outages))
        rows.append(("broker not reached", f"{_count(len(outages), 'time')}, the longest for {longest}"))
    for task in tasks:
        if task.without:
            lost = task.course.lost or LostRounds(rounds=task.without, boards=0, epsilon=0.0)
            rows.append((f"rounds of {task.run} without a model", lost.words(task.course.rounds_closed)))
    declined = Counter[str]()
    for task in tasks:
        declined += task.course.codes["decline"]
    if declined:
        rows.append(
            ("rounds that boards left out", _listed(f"{count} ({code})" for code, count in declined.most_common()))
        )
    return (
        Section("interruptions", "What went wrong", "Nothing of this costs a board privacy twice.", [Facts(rows)])
        if rows
        else None
    )


def _section(anchor: str, title: str, lead: str, part: Table | Facts, otherwise: str) -> Section:
    parts: list[SectionPart] = [part] if part.rows else [Prose([otherwise], css="missing")]
    return Section(anchor, title, lead, parts)


def _between(tasks: Sequence[TaskHistory]) -> str:
    opened = [at for task in tasks for at in task.opened]
    return f" from {_day(min(opened))} to {_day(max(opened))}" if opened else ""


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(at))


def _month(at: float) -> str:
    return time.strftime("%Y-%m", time.localtime(at))
