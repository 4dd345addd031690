"""Makes the schedule of a simulated fleet from the task's scenario: draws device names and computes times.

A `Schedule` contains windows: times in which a target is down or cut off. The times of a round's windows count from its
opening, which is not known beforehand, and nights repeat forever. So there is no list of actions in advance: `Playback`
returns the actions when they are due. Windows of one target may overlap: it is up while none of them is open.

A playback reads no clock: callers pass the time.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from hushfleet.aggregator.config.scenario import CrashEntry, DropOutEntry, LateEntry, OutageEntry, ScenarioSection
from hushfleet.aggregator.config.task import Task
from hushfleet.aggregator.rounds.policy import least_devices
from hushfleet.errors import BadInput, format_value

Kind = Literal["start", "stop", "kill", "cut", "mend"]
How = Literal["kill", "stop", "cut"]

_STREAM = 0x5343454E
# The position is part of the random streams: add a new kind of entry at the end.
_ENTRIES = ("late", "drop_out", "outage", "day", "slow_disk", "out_of_memory")


class Action(NamedTuple):
    """An action that is due now.

    :param at_s: when it became due, in seconds since the run's start.
    :param kind: `kill` is a power cut, `stop` an orderly end, `cut` removes the network and `mend` restores it.
    :param target: a device; or `broker` or `aggregator`, which are only killed and started.
    """

    at_s: float
    kind: Kind
    target: str


@dataclass(frozen=True)
class Outage:
    """One window in which `target` is down (`kill`, `stop`) or has no network (`cut`).

    :param at_round: seconds count from the opening of this round; 0: from the run's start.
    :param begins_s: None for a target that is down from the run's start on.
    :param every_s: interval in seconds at which the window repeats; it may have started before the run. 0: only once.
    """

    target: str
    how: How
    at_round: int
    begins_s: float | None
    ends_s: float
    every_s: float = 0.0

    @property
    def is_open_at_start(self) -> bool:
        return self.begins_s is None or (self.every_s > 0 and self.begins_s <= 0)

    @classmethod
    def of(cls, target: str, how: How, entry: LateEntry | DropOutEntry | CrashEntry | OutageEntry) -> Outage:
        at_s = entry.at_s or 0.0
        if isinstance(entry, LateEntry):
            return cls(target, how, entry.at_round or 0, None, at_s)
        return cls(target, how, entry.at_round or 0, at_s, at_s + entry.for_s)


@dataclass(frozen=True)
class Schedule:
    """A scenario with the devices and times of one fleet.

    :param write_mb_s: write rate of devices with a slow disk.
    :param memory_mib: memory of devices with little memory.
    """

    windows: tuple[Outage, ...]
    write_mb_s: Mapping[str, float]
    memory_mib: Mapping[str, int]

    @property
    def is_calm(self) -> bool:
        """True if nothing ever happens."""
        return not (self.windows or self.write_mb_s or self.memory_mib)


def schedule_of(task: Task, devices: Sequence[str]) -> Schedule:
    """Returns the schedule of a task's run with these devices.

    Raises `BadInput` for the errors of `make_schedule`, for rounds that the run does not have, and if so many devices
    wait for a round to open that the first one never opens, or never closes.
    """
    for kind in ("late", "drop_out", "crash", "outage"):
        for index, entry in enumerate(getattr(task.scenario, kind)):
            if entry.at_round is not None and entry.at_round > task.round.rounds:
                raise BadInput(
                    f"scenario.{kind}[{index}].at_round = {entry.at_round}: the run has {task.round.rounds} rounds"
                )
    schedule = make_schedule(task.scenario, devices, seed=task.seed)
    waiting = {window.target for window in schedule.windows if window.begins_s is None and window.at_round}
    drawn = task.privacy.accounting == "secure"
    needed = least_devices(task.round, devices=task.data.devices, drawn=drawn)
    if waiting and len(devices) - len(waiting) < needed:
        raise BadInput(
            f"scenario.late: {len(waiting)} of {len(devices)} devices wait for a round to open, and round 1 opens "
            f"with {needed} devices only; set round.min_devices = {max(1, len(devices) - len(waiting))}, or say at_s"
        )
    later = {window.target for window in schedule.windows if window.begins_s is None and window.at_round > 1}
    # with secure aggregation, whose devices may be absent
    if later and len(devices) - len(later) < task.round.min_updates:
        raise BadInput(
            f"scenario.late: {len(later)} of {len(devices)} devices wait for round 1 to close, and it closes with "
            f"{task.round.min_updates} updates only; set round.min_updates to {len(devices) - len(later)} or fewer, or "
            "say at_s"
        )
    return schedule


def make_schedule(section: ScenarioSection, devices: Sequence[str], *, seed: int) -> Schedule:
    """Draws the open choices of a scenario. The same seed and the same devices give the same schedule.

    :param devices: all names of the fleet, in its order.

    The draws of one entry do not depend on the others. Raises `BadInput` for a name or a number of devices that this
    fleet does not have.
    """
    windows = [Outage.of(crash.process, "kill", crash) for crash in section.crash]
    disks: dict[str, float] = {}
    memories: dict[str, int] = {}

    def named(kind: str, index: int, wanted: int | str | tuple[str, ...]) -> tuple[str, ...]:
        return _named(f"scenario.{kind}[{index}].devices", wanted, devices, _stream(seed, kind, index))

    outages: tuple[tuple[str, How], ...] = (("late", "stop"), ("drop_out", "kill"), ("outage", "cut"))
    for kind, how in outages:
        for index, entry in enumerate(getattr(section, kind)):
            windows += [Outage.of(name, how, entry) for name in named(kind, index, entry.devices)]
    for index, day in enumerate(section.day):
        drawn = _stream(seed, "day", index, 1).random(len(devices)).tolist()
        phases = dict(zip(devices, drawn, strict=True))  # elapsed fraction of each device's first day
        for name in named("day", index, day.devices):
            midnight_s = -day.period_s * phases[name]
            off_s = midnight_s + day.period_s * day.share
            windows.append(Outage(name, "stop", 0, off_s, midnight_s + day.period_s, day.period_s))
    for index, disk in enumerate(section.slow_disk):
        for name in named("slow_disk", index, disk.devices):
            disks[name] = min(disk.write_mb_s, disks.get(name, disk.write_mb_s))
    for index, memory in enumerate(section.out_of_memory):
        for name in named("out_of_memory", index, memory.devices):
            memories[name] = min(memory.memory_mib, memories.get(name, memory.memory_mib))
    windows.sort(key=lambda w: (w.at_round, -1.0 if w.begins_s is None else w.begins_s, w.ends_s, w.target, w.how))
    return Schedule(tuple(windows), disks, memories)


def _stream(seed: int, kind: str, index: int, use: int = 0) -> np.random.Generator:
    key = np.random.SeedSequence(seed, spawn_key=(_STREAM, _ENTRIES.index(kind), index, use))
    return np.random.default_rng(key)


def _named(
    where: str, wanted: int | str | tuple[str, ...], fleet: Sequence[str], rng: np.random.Generator
) -> tuple[str, ...]:
    """Returns the devices of an entry, in the fleet's order."""
    if isinstance(wanted, str):
        return tuple(fleet)
    if isinstance(wanted, int):
        if wanted > len(fleet):
            raise BadInput(f"{where} = {format_value(wanted)}: the fleet has {len(fleet)} devices; take that or fewer")
        return tuple(fleet[place] for place in sorted(rng.permutation(len(fleet))[:wanted]))
    for name in wanted:
        if name not in fleet:
            close = difflib.get_close_matches(name, fleet, n=4, cutoff=0.7)
            hint = f"did you mean {' or '.join(close)}?" if close else f"they are {fleet[0]} to {fleet[-1]}"
            raise BadInput(f"{where}: there is no device {name!r}; {hint}")
    return tuple(sorted(wanted, key=fleet.index))


class _Edge(NamedTuple):
    """Opening or closing of a window. At equal times, openings come first, so that adjacent windows act as one."""

    at_s: float
    closes: bool
    number: int  # of the window; also makes the order total
    how: How
    target: str


class Playback:
    """Plays a schedule in one run.

    :param first_round: the open or next round of a resumed run: windows of earlier rounds are left out, and devices
        that were late for an earlier round are present.

    Times are seconds since the run's start, or since it was resumed, and must not decrease.
    """

    def __init__(self, schedule: Schedule, *, first_round: int = 1) -> None:
        self._edges: list[tuple[_Edge, Iterator[_Edge]]] = []  # each window's next edge, and its later ones
        # The numbers of the open windows of a target; key (target, True): of the windows in which it is cut off.
        self._reasons: dict[tuple[str, bool], set[int]] = defaultdict(set)
        left_out = []
        self._unplayed: dict[int, Outage] = {}
        self._by_round: dict[int, dict[int, Outage]] = defaultdict(dict)
        for number, window in enumerate(schedule.windows):
            if 0 < window.at_round < first_round:
                left_out.append(window)
                continue
            if not window.every_s:
                self._unplayed[number] = window
            if window.is_open_at_start:
                self._reasons[window.target, False].add(number)
            if window.at_round:
                self._by_round[window.at_round][number] = window
            else:
                self._add(_edges(window, number, 0.0))
        self.left_out = tuple(left_out)
        self.absent = frozenset(target for (target, _), reasons in self._reasons.items() if reasons)

    @property
    def next_s(self) -> float:
        """The time of the next action; infinite if there is none before another round opens."""
        return self._edges[0][0].at_s if self._edges else math.inf

    @property
    def unplayed(self) -> tuple[Outage, ...]:
        """Windows that have not started and late devices that have not come, without those left out."""
        return tuple(self._unplayed.values())

    def round_opened(self, round: int, now_s: float) -> None:
        """Schedules the windows of this round. A repeated call, as after a restart of the aggregator, does nothing."""
        for number, window in self._by_round.pop(round, {}).items():
            self._add(_edges(window, number, now_s))

    def due(self, now_s: float) -> list[Action]:
        """Returns the actions that are due by now and were not returned before, in order of time.

        A target with another open window is neither killed nor started. So each device's `kill` or `stop` and `start`
        alternate, as do its `cut` and `mend`.
        """
        actions = []
        while self._edges and self._edges[0][0].at_s <= now_s:
            edge, later = heapq.heappop(self._edges)
            self._add(later)
            self._unplayed.pop(edge.number, None)
            is_cut = edge.how == "cut"
            reasons = self._reasons[edge.target, is_cut]
            was_affected = bool(reasons)
            if edge.closes:
                reasons.discard(edge.number)
            else:
                reasons.add(edge.number)
            if bool(reasons) != was_affected:
                restored: Kind = "mend" if is_cut else "start"
                actions.append(Action(edge.at_s, edge.how if reasons else restored, edge.target))
        return actions

    def _add(self, edges: Iterator[_Edge]) -> None:
        for edge in edges:
            heapq.heappush(self._edges, (edge, edges))
            return


def _edges(window: Outage, number: int, anchor_s: float) -> Iterator[_Edge]:
    """Yields edges in order of time, forever if the window repeats; times are multiples, so that days do not drift."""
    for cycle in count():
        at_s = anchor_s + cycle * window.every_s
        if window.begins_s is not None and (cycle or not window.is_open_at_start):
            yield _Edge(at_s + window.begins_s, False, number, window.how, window.target)
        yield _Edge(at_s + window.ends_s, True, number, window.how, window.target)
        if not window.every_s:
            return
