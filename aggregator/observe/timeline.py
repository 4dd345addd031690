"""From a run's event log to the timeline of its fleet: who was in which state when, and what came of each round.

The aggregator sees little of a device: that it is there (`presence`), that it trains, that it begins to send
(`offer`), and the answer to its update. A device's state follows from these and from its part in the open round:

    fetching   in the cohort, not training yet: the plan and the global model are on their way to it
    training   says so itself
    sending    has trained, or has offered its update
    accepted   its update is in the store; it waits for the next round
    late       the round closed without it, although it was there
    declined, refused    its own answer, the aggregator's answer
    ready      there, and nothing is asked of it
    sleeping, lost       has said goodbye, has been cut off
    absent     not seen yet

The same events in the same order make the same timeline, whether `at` are unix seconds of a live run or the seconds
of a virtual clock. Memory is bounded: above `most_spans` the spans are let go, and sums and outcomes are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from hushfleet.aggregator.observe.events import iterate_events
from hushfleet.aggregator.observe.timeline_clock import RunClock
from hushfleet.aggregator.observe.timeline_marks import Marks
from hushfleet.aggregator.results.result import DEVICE_STATES, DeviceState, FleetRound, FleetTimeline

MOST_SPANS = 200_000
_STAYS_SENDING = ("store-full", "state-unknown", "late", "not-in-cohort")
_INDEX = {state: number for number, state in enumerate(DEVICE_STATES)}

Rounds = Mapping[int, Collection[str]]


def read_timeline(
    events: Path,
    *,
    scenario: Path | None = None,
    devices: Iterable[str] = (),
    accepted: Rounds | None = None,
    declined: Rounds | None = None,
) -> FleetTimeline | None:
    """The timeline of the run whose event log is `events`; see `make_timeline`."""
    return make_timeline(
        iterate_events(events),
        scenario=() if scenario is None else iterate_events(scenario),
        devices=devices,
        accepted=accepted,
        declined=declined,
    )


def make_timeline(
    events: Iterable[Mapping[str, Any]],
    *,
    scenario: Iterable[Mapping[str, Any]] = (),
    devices: Iterable[str] = (),
    accepted: Rounds | None = None,
    declined: Rounds | None = None,
    most_spans: int = MOST_SPANS,
) -> FleetTimeline | None:
    """The timeline that the events tell; None if no round of it has closed.

    :param scenario: what was done to a simulated fleet: events with `action` and `target`, on the same clock.
    :param devices: known before the run; others are added as they appear.
    :param accepted: by round, whose updates the store has: a kill may have cost the log a line.
    :param declined: likewise.
    """
    builder = _Builder(devices, accepted or {}, declined or {}, most_spans)
    for event in events:
        builder.apply(event)
    return builder.timeline(scenario)


class _Device:
    """One device: how it is present, its part in the newest round, and the state that follows from both."""

    __slots__ = ("answered_at", "outcomes", "part", "presence", "seconds", "since", "spans", "state")

    def __init__(self, now: float, closed_rounds: int) -> None:
        self.presence: str = "absent"
        self.part: str = "none"  # none, asked, working, offered, accepted, declined, refused, late
        self.state: DeviceState = "absent"
        self.since = 0.0
        self.answered_at = now
        self.outcomes = bytearray(b"-" * closed_rounds)
        self.seconds = [0.0] * len(DEVICE_STATES)
        self.spans: list[tuple[float, float, DeviceState]] = []

    def is_open(self) -> bool:
        """An answer is still expected."""
        return self.part in ("asked", "working", "offered")

    def is_there(self) -> bool:
        return self.presence in ("ready", "training")

    def derived(self) -> DeviceState:
        if not self.is_there():
            return cast(DeviceState, self.presence)
        if self.part in ("accepted", "declined", "refused", "late"):
            return cast(DeviceState, self.part)
        if self.presence == "training":
            return "training"
        return cast(DeviceState, {"none": "ready", "asked": "fetching"}.get(self.part, "sending"))


class _Builder:
    def __init__(self, devices: Iterable[str], accepted: Rounds, declined: Rounds, most_spans: int) -> None:
        self._accepted, self._declined, self._most_spans = accepted, declined, most_spans
        self._clock = RunClock()
        self._devices: dict[str, _Device] = {}
        self._counts = [0] * len(DEVICE_STATES)
        self._window = [0.0] * len(DEVICE_STATES)
        self._counted_until = self._window_end_s = 0.0
        self._rounds: list[FleetRound] = []
        self._round: int | None = None
        self._opened_at = 0.0
        self._first_open: float | None = None
        self._span_count = 0
        self._marks = Marks()
        self._link_down_at: float | None = None
        self._is_timed = self._has_begun = self._is_finished = False
        for name in devices:
            self._device(name)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Takes in one event; unknown kinds and lines without a time are passed over."""
        at, kind = event.get("at"), event.get("event")
        handler = getattr(self, f"_on_{kind}", None)
        if handler is None or not isinstance(at, int | float) or (self._is_finished and kind != "run"):
            return
        self._count_until(self._clock.advance(float(at), is_start=kind == "run"))
        handler(event)

    # events

    def _on_run(self, event: Mapping[str, Any]) -> None:
        if self._has_begun:
            stopped = self._clock.left_out_s
            what = f"start, after {stopped:.0f} s that are left out" if stopped else "start"
            self._marks.add(self._clock.now, self._clock.now, what, "aggregator")
        self._has_begun, self._is_finished = True, False

    def _on_finished(self, event: Mapping[str, Any]) -> None:
        self._is_finished = True

    def _on_link(self, event: Mapping[str, Any]) -> None:
        if event.get("state") == "down":
            self._link_down_at = self._clock.now
        elif self._link_down_at is not None:
            self._marks.add(self._link_down_at, self._clock.now, "out of reach", "broker")
            self._link_down_at = None

    def _on_presence(self, event: Mapping[str, Any]) -> None:
        state = event.get("state")
        if state not in ("ready", "training", "sleeping", "lost"):
            return
        device = self._named(event)
        if device is None:
            return
        if state == "training":
            self._is_timed = True
            if device.part == "asked":
                device.part = "working"
        elif state != "ready" and device.part == "working":
            device.part = "asked"  # nothing was committed: it must train again
        device.presence = state
        self._derive(device)

    def _on_round_open(self, event: Mapping[str, Any]) -> None:
        number, cohort = event.get("round"), event.get("cohort")
        if not isinstance(number, int) or not isinstance(cohort, list):
            return
        members = [self._device(str(name)) for name in cohort]
        if number != self._round:  # else it was opened before, and goes on after a restart
            if self._round is not None:
                self._close(self._round)
            self._end_window()
            self._round, self._opened_at = number, self._clock.now
            if self._first_open is None:
                self._first_open = self._clock.now
            for device in self._devices.values():
                device.part = "none"
        for device in members:
            if device.part == "none":
                device.part = "asked"
            if device.presence == "absent":
                device.presence = "ready"
        for device in self._devices.values():
            self._derive(device)

    def _on_offer(self, event: Mapping[str, Any]) -> None:
        device = self._heard(event)
        if device is None:
            return
        self._is_timed = True
        if event.get("round") == self._round and device.is_open():
            device.part = "offered"
        self._derive(device)

    def _on_update(self, event: Mapping[str, Any]) -> None:
        device, code = self._heard(event), event.get("code", "accepted")
        if device is None or event.get("round") != self._round:
            return
        if code in ("accepted", "duplicate"):
            self._accept(device)
        elif device.is_open() and code not in _STAYS_SENDING:
            device.part = "refused"
        self._derive(device)

    def _on_decline(self, event: Mapping[str, Any]) -> None:
        device = self._heard(event)
        if device is not None and event.get("round") == self._round and device.is_open():
            device.part = "declined"
            self._derive(device)

    def _on_round_close(self, event: Mapping[str, Any]) -> None:
        if self._round is not None and event.get("round") == self._round:
            self._close(self._round)

    # what follows from them

    def _device(self, name: str) -> _Device:
        device = self._devices.get(name)
        if device is None:
            device = self._devices[name] = _Device(self._clock.now, len(self._rounds))
            self._counts[_INDEX["absent"]] += 1
        return device

    def _named(self, event: Mapping[str, Any]) -> _Device | None:
        name = event.get("device")
        return self._device(name) if isinstance(name, str) else None

    def _heard(self, event: Mapping[str, Any]) -> _Device | None:
        """The device of a message: whoever speaks is there, and no longer trains."""
        device = self._named(event)
        if device is not None:
            device.presence = "ready"
        return device

    def _accept(self, device: _Device) -> None:
        if device.part != "accepted":
            device.part, device.answered_at = "accepted", self._clock.now

    def _derive(self, device: _Device) -> None:
        state = device.derived()
        if state != device.state:
            self._end_span(device)
            self._counts[_INDEX[device.state]] -= 1
            self._counts[_INDEX[state]] += 1
            device.state = state

    def _end_span(self, device: _Device) -> None:
        now, since = self._clock.now, device.since
        if self._first_open is not None:
            device.seconds[_INDEX[device.state]] += now - max(since, self._first_open)
        start_s, end_s = round(since, 3), round(now, 3)
        if end_s > start_s:
            self._span_count += 1
            if self._span_count <= self._most_spans:
                device.spans.append((start_s, end_s, device.state))
        device.since = now

    def _count_until(self, now: float) -> None:
        passed = now - self._counted_until
        if passed > 0:
            self._window = [total + passed * count for total, count in zip(self._window, self._counts, strict=True)]
            self._counted_until = now

    def _end_window(self) -> None:
        """The device seconds since the newest closed round opened are that round's."""
        if self._rounds:
            self._rounds[-1] = self._rounds[-1].model_copy(update={"device_seconds": _by_state(self._window)})
        self._window, self._window_end_s = [0.0] * len(DEVICE_STATES), self._clock.now

    def _close(self, number: int) -> None:
        now = self._clock.now
        stored, refused_by_device = self._accepted.get(number, ()), self._declined.get(number, ())
        needed: list[float] = []
        for name, device in self._devices.items():
            if name in stored:
                self._accept(device)
            elif name in refused_by_device and device.is_open():
                device.part = "declined"
            if device.part == "accepted":
                needed.append(device.answered_at - self._opened_at)
            device.outcomes += _letter(device)
            if device.is_open():
                if device.is_there():
                    needed.append(now - self._opened_at)
                device.part = "late" if device.is_there() else "none"
            self._derive(device)
        needed.sort()
        slowest = needed[-max(1, len(needed) // 10) :]
        self._rounds.append(
            FleetRound(
                round=number,
                opened_s=round(self._opened_at, 3),
                closed_s=round(now, 3),
                median_s=round(median(needed), 3) if needed else None,
                slowest_tenth_s=round(fmean(slowest), 3) if needed else None,
            )
        )
        self._round = None

    # the end

    def _with_absent(self) -> list[FleetRound]:
        """A device that was first seen later was absent in the rounds before, although nobody counted it then."""
        ends = [*(row.opened_s for row in self._rounds[1:]), self._window_end_s]
        rows = []
        for row, end_s in zip(self._rounds, ends, strict=True):
            others = {state: value for state, value in row.device_seconds.items() if state != "absent"}
            rest = round(len(self._devices) * (end_s - row.opened_s) - sum(others.values()), 3)
            absent: dict[DeviceState, float] = {"absent": rest} if rest > 0.001 * (1 + len(self._devices)) else {}
            rows.append(row.model_copy(update={"device_seconds": {**absent, **others}}))
        return rows

    def timeline(self, scenario: Iterable[Mapping[str, Any]]) -> FleetTimeline | None:
        if not self._rounds:
            return None
        for device in self._devices.values():
            self._end_span(device)
        if self._round is None:
            self._end_window()
        self._marks.add_scenario(scenario, self._clock)
        names = sorted(self._devices)
        ordered = [self._devices[name] for name in names]
        has_spans = self._is_timed and self._span_count <= self._most_spans
        return FleetTimeline(
            timed=self._is_timed,
            end_s=round(self._clock.now, 3),
            devices=names,
            rounds=self._with_absent() if self._is_timed else [_untimed(row) for row in self._rounds],
            outcomes=[device.outcomes.decode() for device in ordered],
            seconds=[_by_state(device.seconds) for device in ordered] if self._is_timed else [],
            spans=[device.spans for device in ordered] if has_spans else [],
            spans_left_out=0 if has_spans or not self._is_timed else self._span_count,
            marks=self._marks.without_repetitions(),
        )


def _letter(device: _Device) -> bytes:
    if device.part in ("accepted", "declined", "refused"):
        return device.part[0].encode()
    if device.part == "none":
        return b"." if device.is_there() else b"-"
    return b"l" if device.is_there() else b"x"


def _untimed(row: FleetRound) -> FleetRound:
    return FleetRound(round=row.round, opened_s=row.opened_s, closed_s=row.closed_s)


def _by_state(seconds: Iterable[float]) -> dict[DeviceState, float]:
    return {state: round(value, 3) for state, value in zip(DEVICE_STATES, seconds, strict=True) if round(value, 3) > 0}
