"""What happens when to a simulated fleet: the task's scenario, with names drawn and times laid out.

A `Schedule` holds windows: from then to then this target is down, or cut off. Those of a round are laid out from
its opening, which nobody knows beforehand, and a day returns for ever; so a list of actions cannot be written in
advance. `Playback` gives the actions as they fall due. Windows of one target may overlap, whatever they are laid
out from: a target is up while none of them is open, so that overlapping ones act as the one that they cover.

The live engine (real time) and the virtual clock follow the same playback. It reads no clock: it is told the time.
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

from hushfleet.aggregator.config.scenario import ScenarioSection
from hushfleet.aggregator.config.task import Task
from hushfleet.errors import BadInput

Kind = Literal["start", "stop", "kill", "cut", "mend"]
How = Literal["kill", "stop", "cut"]

_STREAM = 0x5343454E
# Part of the random streams: a new kind of entry goes to the end.
_ENTRIES = ("late", "drop_out", "outage", "day", "slow_disk", "out_of_memory")


class Action(NamedTuple):
    """Something to do now.

    :param at_s: when it fell due, in seconds since the run's start.
    :param kind: `kill` is SIGKILL, `stop` SIGTERM, `cut` takes the network away and `mend` brings it back.
    :param target: a device; or `broker` or `aggregator`, which are killed and started only.
    """

    at_s: float
    kind: Kind
    target: str


@dataclass(frozen=True)
class Window:
    """One reason for which `target` is down (`kill`, `stop`) or without a network (`cut`).

    :param at_round: seconds count from the opening of this round; 0: from the run's start.
    :param begins_s: None for a target that is down from the run's start on.
    """

    target: str
    how: How
    at_round: int
    begins_s: float | None
    ends_s: float


@dataclass(frozen=True)
class Day:
    """The device is on for the first `on_s` of every `period_s` seconds; the run starts `phase_s` into the day."""

    device: str
    period_s: float
    on_s: float
    phase_s: float


@dataclass(frozen=True)
class Schedule:
    """:param write_mb_s: of devices whose disk is slow; :param memory_mib: of devices that are short of memory."""

    windows: tuple[Window, ...]
    days: tuple[Day, ...]
    write_mb_s: Mapping[str, float]
    memory_mib: Mapping[str, int]

    @property
    def needs_cables(self) -> bool:
        """Whether devices are cut off, for which a live fleet needs a network of its own (`proxied`)."""
        return any(window.how == "cut" for window in self.windows)

    @property
    def is_calm(self) -> bool:
        """Whether nothing ever happens."""
        return not (self.windows or self.days or self.write_mb_s or self.memory_mib)


def schedule_of(task: Task, devices: Sequence[str]) -> Schedule:
    """The schedule of a task's run with these devices.

    Raises `BadInput` for what `make_schedule` refuses, for rounds that the run does not have, and where so many
    devices wait for a round to open that the first one never can.
    """
    for kind in ("late", "drop_out", "crash", "outage"):
        for index, entry in enumerate(getattr(task.scenario, kind)):
            if entry.at_round is not None and entry.at_round > task.round.rounds:
                raise BadInput(
                    f"scenario.{kind}.{index}.at_round = {entry.at_round}: the run has {task.round.rounds} rounds"
                )
    schedule = make_schedule(task.scenario, devices, seed=task.seed)
    waiting = {window.target for window in schedule.windows if window.begins_s is None and window.at_round}
    needed = task.round.min_devices or task.round.cohort_size or task.data.devices
    if waiting and len(devices) - len(waiting) < needed:
        raise BadInput(
            f"scenario.late: {len(waiting)} of {len(devices)} devices wait for a round to open, and round 1 opens "
            f"with {needed} devices only; set round.min_devices = {max(1, len(devices) - len(waiting))}, or say at_s"
        )
    return schedule


def make_schedule(section: ScenarioSection, devices: Sequence[str], *, seed: int) -> Schedule:
    """Draws what a scenario leaves open. The same seed and the same devices give the same schedule.

    :param devices: all names of the fleet, in its order.

    What one entry draws does not depend on the others. Raises `BadInput` for a name or a number of devices that
    this fleet does not have.
    """
    draw = _Draw(devices, seed)
    windows = []
    for index, late in enumerate(section.late):
        for name in draw.names("late", index, late.devices):
            windows.append(Window(name, "stop", late.at_round or 0, None, late.at_s or 0.0))
    for index, drop in enumerate(section.drop_out):
        for name in draw.names("drop_out", index, drop.devices):
            windows.append(_window(name, "kill", drop.at_round, drop.at_s, drop.for_s))
    for crash in section.crash:
        windows.append(_window(crash.process, "kill", crash.at_round, crash.at_s, crash.for_s))
    for index, outage in enumerate(section.outage):
        for name in draw.names("outage", index, outage.devices):
            windows.append(_window(name, "cut", outage.at_round, outage.at_s, outage.for_s))
    days = []
    for index, day in enumerate(section.day):
        phases = draw.phases(index)
        for name in draw.names("day", index, day.devices):
            days.append(Day(name, day.period_s, day.period_s * day.share, day.period_s * phases[name]))
    disks: dict[str, float] = {}
    for index, disk in enumerate(section.slow_disk):
        for name in draw.names("slow_disk", index, disk.devices):
            disks[name] = min(disk.write_mb_s, disks.get(name, disk.write_mb_s))
    memories: dict[str, int] = {}
    for index, memory in enumerate(section.out_of_memory):
        for name in draw.names("out_of_memory", index, memory.devices):
            memories[name] = min(memory.memory_mib, memories.get(name, memory.memory_mib))
    windows.sort(key=lambda w: (w.at_round, -1.0 if w.begins_s is None else w.begins_s, w.ends_s, w.target, w.how))
    return Schedule(tuple(windows), tuple(days), disks, memories)


def _window(target: str, how: How, at_round: int | None, at_s: float | None, for_s: float) -> Window:
    begins_s = at_s or 0.0
    return Window(target, how, at_round or 0, begins_s, begins_s + for_s)


class _Draw:
    """The seeded choices, each from a random stream of its own."""

    def __init__(self, devices: Sequence[str], seed: int) -> None:
        self._devices = tuple(devices)
        self._places = {name: place for place, name in enumerate(self._devices)}
        self._seed = seed

    def names(self, kind: str, index: int, wanted: int | str | tuple[str, ...]) -> tuple[str, ...]:
        """In the fleet's order."""
        where = f"scenario.{kind}.{index}.devices"
        if isinstance(wanted, str):
            return self._devices
        if isinstance(wanted, int):
            if wanted > len(self._devices):
                raise BadInput(f"{where} = {wanted}: the fleet has {len(self._devices)} devices")
            chosen = self._stream(kind, index).permutation(len(self._devices))[:wanted]
            return tuple(self._devices[place] for place in sorted(chosen))
        for name in wanted:
            if name not in self._places:
                raise BadInput(f"{where}: there is no device {name!r}; {self._hint(name)}")
        return tuple(sorted(wanted, key=self._places.__getitem__))

    def phases(self, index: int) -> dict[str, float]:
        """The part of its day, in [0, 1), that each device is in when the run starts."""
        return dict(zip(self._devices, self._stream("day", index, 1).random(len(self._devices)).tolist(), strict=True))

    def _stream(self, kind: str, index: int, use: int = 0) -> np.random.Generator:
        key = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, _ENTRIES.index(kind), index, use))
        return np.random.default_rng(key)

    def _hint(self, name: str) -> str:
        close = difflib.get_close_matches(name, self._devices, n=4, cutoff=0.7)
        return f"did you mean {' or '.join(close)}?" if close else f"they are {self._devices[0]} to {self._devices[-1]}"


class _Edge(NamedTuple):
    """A window opens or closes. At the same time openings come first, so that windows that touch act as one."""

    at_s: float
    closes: bool
    number: int  # of the window; also makes the order total
    how: How
    target: str


class Playback:
    """Follows a schedule through one run.

    :param first_round: the open or next round of a run that is resumed: what was laid out from earlier rounds is
        left out, and devices that were late for one of those are there.

    Times are seconds since the run's start, or since it was resumed, and must not go back.
    """

    def __init__(self, schedule: Schedule, *, first_round: int = 1) -> None:
        self.left_out = tuple(window for window in schedule.windows if 0 < window.at_round < first_round)
        self._pending: list[tuple[_Edge, Iterator[_Edge]]] = []
        self._by_round: dict[int, list[tuple[int, Window]]] = defaultdict(list)
        # the numbers of the windows that are open
        self._down: dict[str, set[int]] = defaultdict(set)
        self._cut: dict[str, set[int]] = defaultdict(set)
        self._unplayed: dict[int, Window] = {}
        for number, window in enumerate(schedule.windows):
            if 0 < window.at_round < first_round:
                continue
            self._unplayed[number] = window
            if window.begins_s is None:
                self._down[window.target].add(number)
            if window.at_round:
                self._by_round[window.at_round].append((number, window))
            else:
                self._add(_edges_of(window, number, 0.0))
        for number, day in enumerate(schedule.days, len(schedule.windows)):
            if day.phase_s >= day.on_s:
                self._down[day.device].add(number)
            self._add(_edges_of_days(day, number))
        self.absent = frozenset(name for name, reasons in self._down.items() if reasons)

    @property
    def next_s(self) -> float:
        """When something may be due next; infinite if nothing is before another round opens."""
        return self._pending[0][0].at_s if self._pending else math.inf

    @property
    def unplayed(self) -> tuple[Window, ...]:
        """Of what is not left out: windows that have not begun, and late devices that have not come."""
        return tuple(self._unplayed.values())

    def round_opened(self, round: int, now_s: float) -> None:
        """Lays out what belongs to this round. Saying it again, as a restarted aggregator might, does nothing."""
        for number, window in self._by_round.pop(round, ()):
            self._add(_edges_of(window, number, now_s))

    def due(self, now_s: float) -> list[Action]:
        """What has to be done by now and was not given before, in order of time.

        A target that is down for another reason, too, is neither killed nor started. So each device's `kill` or
        `stop` and `start` alternate, as do its `cut` and `mend`.
        """
        actions = []
        while self._pending and self._pending[0][0].at_s <= now_s:
            edge, edges = self._pending[0]
            following = next(edges, None)
            if following is None:
                heapq.heappop(self._pending)
            else:
                heapq.heapreplace(self._pending, (following, edges))
            kind = self._pass(edge)
            if kind is not None:
                actions.append(Action(edge.at_s, kind, edge.target))
        return actions

    def is_down(self, target: str) -> bool:
        """As of what `due` gave last."""
        return bool(self._down.get(target))

    def is_cut(self, device: str) -> bool:
        """Whether the device has no network, as of what `due` gave last."""
        return bool(self._cut.get(device))

    def _pass(self, edge: _Edge) -> Kind | None:
        reasons = (self._cut if edge.how == "cut" else self._down)[edge.target]
        before = bool(reasons)
        self._unplayed.pop(edge.number, None)
        if edge.closes:
            reasons.discard(edge.number)
        else:
            reasons.add(edge.number)
        if bool(reasons) == before:
            return None
        if reasons:
            return edge.how
        return "mend" if edge.how == "cut" else "start"

    def _add(self, edges: Iterator[_Edge]) -> None:
        heapq.heappush(self._pending, (next(edges), edges))


def _edges_of(window: Window, number: int, anchor_s: float) -> Iterator[_Edge]:
    if window.begins_s is not None:
        yield _Edge(anchor_s + window.begins_s, False, number, window.how, window.target)
    yield _Edge(anchor_s + window.ends_s, True, number, window.how, window.target)


def _edges_of_days(day: Day, number: int) -> Iterator[_Edge]:
    """From the first one after the run's start on, without an end; not added up, so that days do not drift."""
    for cycle in count():
        midnight_s = cycle * day.period_s - day.phase_s
        for at_s, closes in ((midnight_s, True), (midnight_s + day.on_s, False)):
            if at_s > 0:
                yield _Edge(at_s, closes, number, "stop", day.device)
