"""Reads the timeline of a fleet from a run's event log: the states of devices, and the outcome of each round.

The same events in the same order make the same timeline, whether `at` is in unix seconds of a live run or in seconds
of a virtual clock. Memory is bounded: above `most_spans` the spans are dropped, and sums and outcomes are kept.
Events that happen to the fleet from outside, such as crashes, outages and devices that are switched off on purpose, are
marks: a simulation writes them to `scenario.jsonl`; else the event log has those that the aggregator noticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hushfleet.aggregator.results.events import iterate_events
from hushfleet.aggregator.results.fleet_state import Event, FleetState, SeenDevice
from hushfleet.aggregator.results.fleet_timeline import ACTIVITIES, Activity, FleetRound, FleetTimeline, TimelineMark
from hushfleet.aggregator.results.json_record import Seconds

MOST_SPANS = 200_000
MOST_DEVICE_MARKS = 2_000
LONGEST_PAUSE_S = 600.0
SET_BACK_S = 1.0
"""An event that is this much older than the event before was written after the clock was set back."""
SERVERS = ("broker", "aggregator")
_BROUGHT_BACK_BY = {"kill": "start", "stop": "start", "cut": "mend"}
_NOTICED_BEFORE_S, _NOTICED_AFTER_S = 5.0, 30.0

Rounds = Mapping[int, Collection[str]]


def read_timeline(events: Path, *, scenario: Path | None = None, **more: Any) -> FleetTimeline | None:
    """Returns the timeline of the run whose event log is `events`; see `make_timeline`."""
    return make_timeline(iterate_events(events), scenario=() if scenario is None else iterate_events(scenario), **more)


def make_timeline(
    events: Iterable[Event],
    *,
    scenario: Iterable[Event] = (),
    devices: Iterable[str] = (),
    accepted: Rounds | None = None,
    declined: Rounds | None = None,
    most_spans: int = MOST_SPANS,
) -> FleetTimeline | None:
    """Returns the timeline of the events; None if no round has closed.

    :param scenario: the disturbances of a simulated fleet: events with `action` and `target`, on the same clock.
    :param devices: devices that are known before the run; others are added when they appear.
    :param accepted: by round, the devices whose updates the store has, because a kill may have cut a line of the log.
    :param declined: by round, the devices whose declines the store has.
    """
    recorder = _Recorder(devices, accepted or {}, declined or {}, most_spans)
    for event in events:
        recorder.apply(event)
    return recorder.timeline(scenario)


class _Clock:
    """Seconds since the run's first event, for any clock that stamped the events. It never goes backwards.

    A run that was stopped overnight and resumed continues where it stopped: the pause is left out. A jump back is also
    left out, of a resumed simulation that starts its own clock again, or of a clock that was set.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[float, float]] = []  # (from this raw time on, what to subtract)
        self.now = self.left_out_s = 0.0

    def advance(self, raw: float, *, is_start: bool) -> None:
        """Sets `now` to an event's time, and at a start `left_out_s` to the length of the stop that was left out."""
        if not self._pieces:
            self._pieces.append((raw, raw))
        at = raw - self._pieces[-1][1]
        self.left_out_s = 0.0
        if at < self.now - SET_BACK_S or (is_start and (at < self.now or at - self.now > LONGEST_PAUSE_S)):
            self.left_out_s = max(0.0, at - self.now)
            self._pieces.append((raw, raw - self.now))
        else:
            self.now = max(self.now, at)

    def of(self, raw: float) -> float:
        """Converts a time of another log with the same clock to seconds from 0 to `now`."""
        offset = next((offset for begins, offset in reversed(self._pieces) if raw >= begins), raw)
        return min(max(0.0, raw - offset), self.now)


class _Recorder(FleetState):
    """Records the states of a fleet over time."""

    def __init__(self, devices: Iterable[str], accepted: Rounds, declined: Rounds, most_spans: int) -> None:
        super().__init__()
        self._accepted, self._declined, self._most_spans = accepted, declined, most_spans
        self._clock = _Clock()
        self._rounds: list[FleetRound] = []
        # device seconds since the newest round opened
        self._window: defaultdict[Activity, float] = defaultdict(float)
        self._opened_s = self._window_end_s = 0.0
        self._first_open_s: float | None = None
        self._span_count = 0
        self._marks: list[TimelineMark] = []
        self._link_down_s: float | None = None
        self._has_begun = self._is_finished = False
        for name in devices:
            self._add(name)

    def apply(self, event: Event) -> None:
        """Processes one event; ignores lines without a time, and all lines between the end and a new start."""
        at, kind = event.get("at"), event.get("event")
        if isinstance(at, int | float) and hasattr(self, f"_on_{kind}") and (kind == "run" or not self._is_finished):
            self._clock.advance(float(at), is_start=kind == "run")
            super().apply(event)

    def _on_run(self, event: Event) -> None:
        if self._has_begun:
            stopped, now = self._clock.left_out_s, self._clock.now
            what = f"start, after {stopped:.0f} s that are left out" if stopped else "start"
            self._marks.append(_mark(now, now, what, "aggregator"))
        self._has_begun, self._is_finished = True, False

    def _on_finished(self, event: Event) -> None:
        self._is_finished = True

    def _on_link(self, event: Event) -> None:
        if event.get("state") == "down":
            self._link_down_s = self._clock.now
        elif self._link_down_s is not None:
            self._marks.append(_mark(self._link_down_s, self._clock.now, "out of reach", "broker"))
            self._link_down_s = None

    def _add(self, name: str) -> SeenDevice:
        device = super()._add(name)
        device.answered_s, device.outcomes = self._clock.now, "-" * len(self._rounds)
        device.counted_s = self._first_open_s or 0.0
        return device

    def _accept(self, device: SeenDevice) -> None:
        if device.part != "accepted":
            device.answered_s = self._clock.now
        super()._accept(device)

    def _changed(self, device: SeenDevice) -> None:
        self._count(device)
        start_s, end_s = round(device.since_s, 3), round(self._clock.now, 3)
        if end_s > start_s:
            self._span_count += 1
            if self._span_count <= self._most_spans:
                device.spans.append((start_s, end_s, device.state))
        device.since_s = self._clock.now

    def _count(self, device: SeenDevice) -> None:
        passed = self._clock.now - device.counted_s
        device.seconds[device.state] += passed
        self._window[device.state] += passed
        device.counted_s = self._clock.now

    def _opened(self) -> None:
        self._end_window()
        self._opened_s = self._clock.now
        if self._first_open_s is None:
            self._first_open_s = self._clock.now
            for device in self.devices.values():
                device.seconds.clear()

    def _end_window(self) -> None:
        """Assigns the device seconds since the newest closed round opened to that round."""
        for device in self.devices.values():
            self._count(device)
        if self._rounds:
            self._rounds[-1] = self._rounds[-1].model_copy(update={"device_seconds": _by_state(self._window)})
        self._window.clear()
        self._window_end_s = self._clock.now

    def _close(self, number: int) -> None:
        now = self._clock.now
        stored, declined = self._accepted.get(number, ()), self._declined.get(number, ())
        needed: list[float] = []
        for name, device in self.devices.items():
            if self.buffer_size and device.is_open:
                device.part = "none"  # a buffered round did not need it
            if name in stored:
                self._accept(device)
            elif name in declined and device.is_open:
                device.part = "declined"
            if device.part == "accepted":
                needed.append(device.answered_s - self._opened_s)
            elif device.is_open and device.is_there:
                needed.append(now - self._opened_s)
            device.outcomes += _letter(device)
        needed.sort()
        self._rounds.append(
            FleetRound(
                round=number,
                opened_s=round(self._opened_s, 3),
                closed_s=round(now, 3),
                median_s=round(median(needed), 3) if needed else None,
                slowest_tenth_s=round(fmean(needed[-max(1, len(needed) // 10) :]), 3) if needed else None,
            )
        )
        super()._close(number)

    def timeline(self, scenario: Iterable[Event]) -> FleetTimeline | None:
        if not self._rounds:
            return None
        for device in self.devices.values():
            self._changed(device)
        if self.open_round is None:
            self._end_window()
        self._marks += _scenario_marks(scenario, self._clock)
        names = sorted(self.devices)
        ordered = [self.devices[name] for name in names]
        has_spans = self.is_timed and self._span_count <= self._most_spans
        return FleetTimeline(
            timed=self.is_timed,
            end_s=round(self._clock.now, 3),
            devices=names,
            rounds=self._with_absent() if self.is_timed else [_untimed(row) for row in self._rounds],
            outcomes=[device.outcomes for device in ordered],
            seconds=[_by_state(device.seconds) for device in ordered] if self.is_timed else [],
            spans=[device.spans for device in ordered] if has_spans else [],
            spans_left_out=0 if has_spans or not self.is_timed else self._span_count,
            marks=_without_repetitions(self._marks),
        )

    def _with_absent(self) -> list[FleetRound]:
        """Returns the rounds with absence added: a device that was first seen later was absent in earlier rounds."""
        ends, rows = [*(row.opened_s for row in self._rounds[1:]), self._window_end_s], []
        for row, end_s in zip(self._rounds, ends, strict=True):
            seen = {state: value for state, value in row.device_seconds.items() if state != "absent"}
            rest = round(len(self.devices) * (end_s - row.opened_s) - sum(seen.values()), 3)
            absent: dict[Activity, Seconds] = {"absent": rest} if rest > 0.001 * (1 + len(self.devices)) else {}
            rows.append(row.model_copy(update={"device_seconds": {**absent, **seen}}))
        return rows


def _letter(device: SeenDevice) -> str:
    if device.part in ("accepted", "declined", "refused"):
        return device.part[0]
    if device.part == "none":
        return "." if device.is_there else "-"
    return "l" if device.is_there else "x"


def _untimed(row: FleetRound) -> FleetRound:
    return FleetRound(round=row.round, opened_s=row.opened_s, closed_s=row.closed_s)


def _by_state(seconds: Mapping[Activity, float]) -> dict[Activity, float]:
    return {state: total for state in ACTIVITIES if (total := round(seconds.get(state, 0.0), 3)) > 0}


def _mark(start_s: float, end_s: float, what: str, target: str) -> TimelineMark:
    return TimelineMark(start_s=round(start_s, 3), end_s=round(end_s, 3), what=what, target=target)


def _scenario_marks(scenario: Iterable[Event], clock: _Clock) -> list[TimelineMark]:
    """Pairs each action that took a target down with the one that brought it back; `start` alone is a late device."""
    waiting: dict[tuple[str, str], tuple[float, str]] = {}
    found: list[TimelineMark] = []
    for event in scenario:
        at, action, target = event.get("at"), event.get("action"), event.get("target")
        if not isinstance(at, int | float) or not isinstance(action, str) or not isinstance(target, str):
            continue
        moment = clock.of(float(at))
        if action in _BROUGHT_BACK_BY:
            waiting[target, _BROUGHT_BACK_BY[action]] = (moment, action)
        elif action in _BROUGHT_BACK_BY.values():
            began, what = waiting.pop((target, action), (moment, action))
            found.append(_mark(began, moment, what, target))
    return found + [_mark(began, clock.now, what, target) for (target, _), (began, what) in waiting.items()]


def _without_repetitions(marks: list[TimelineMark]) -> list[TimelineMark]:
    """Sorts marks by time, and keeps only the first `MOST_DEVICE_MARKS` marks of devices.

    The scenario is exact about the servers, so the log's marks of the same crash are left out.
    """
    kills = [mark for mark in marks if mark.target in SERVERS and mark.what == "kill"]

    def is_repetition(mark: TimelineMark) -> bool:
        return mark.what not in _BROUGHT_BACK_BY and any(
            kill.target == mark.target
            and kill.start_s - _NOTICED_BEFORE_S <= mark.end_s
            and mark.start_s <= kill.end_s + _NOTICED_AFTER_S
            for kill in kills
        )

    of_servers = [mark for mark in marks if mark.target in SERVERS and not is_repetition(mark)]
    of_devices = [mark for mark in marks if mark.target not in SERVERS][:MOST_DEVICE_MARKS]
    return sorted(of_servers + of_devices, key=lambda mark: (mark.start_s, mark.target))
