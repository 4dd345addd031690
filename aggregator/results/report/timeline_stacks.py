"""How many devices were in which state, stacked over rounds or time, and where each board's time goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hushfleet.aggregator.results.report.svg import Canvas, Scale
from hushfleet.aggregator.results.report.timeline_axes import LEFT, RIGHT, WIDE, round_axis, time_axis
from hushfleet.aggregator.results.report.timeline_style import DARK_FILLS, WORDS
from hushfleet.aggregator.results.report.verdict import number, tick_text
from hushfleet.aggregator.results.result import DEVICE_STATES, DeviceState, FleetTimeline

MOST_STEPS = 200
_STACK: tuple[DeviceState, ...] = (
    "training", "sending", "fetching", "accepted", "ready", "late", "declined", "refused", "sleeping", "lost", "absent",
)  # fmt: skip
"""From the bottom up: work, waiting, what went wrong, who was away."""


def states_over_rounds(timeline: FleetTimeline, *, label: str) -> tuple[str, int]:
    """How many devices were in each state, mean over each round, stacked; and how many rounds a step holds."""
    binned = math.ceil(len(timeline.rounds) / MOST_STEPS)
    starts = list(range(0, len(timeline.rounds), binned))
    steps = []
    for start in starts:
        members = timeline.rounds[start : start + binned]
        total = {state: sum(row.device_seconds.get(state, 0.0) for row in members) for state in DEVICE_STATES}
        steps.append(_shares(total, len(timeline.devices)))
    edges = [float(start) for start in starts] + [float(len(timeline.rounds))]
    canvas, bottom = _stack(steps, edges, len(timeline.devices), label)
    round_axis(canvas, timeline, bottom)
    return canvas.svg(), binned


def states_over_time(timeline: FleetTimeline, *, label: str) -> str:
    """The same over the run's seconds, from the spans: for runs of few rounds."""
    steps = MOST_STEPS
    length = timeline.end_s / steps
    totals: list[dict[DeviceState, float]] = [dict.fromkeys(DEVICE_STATES, 0.0) for _ in range(steps)]
    for spans in timeline.spans:
        for start, end, state in spans:
            for step in range(int(start / length), min(steps, int(end / length) + 1)):
                totals[step][state] += max(0.0, min(end, (step + 1) * length) - max(start, step * length))
    shares = [_shares(total, len(timeline.devices)) for total in totals]
    edges = [step * length for step in range(steps + 1)]
    canvas, bottom = _stack(shares, edges, len(timeline.devices), label)
    x = Scale(0.0, timeline.end_s, LEFT, WIDE - RIGHT)
    for row in timeline.rounds:
        canvas.line(x(row.opened_s), 6, x(row.opened_s), bottom, "shut")
    time_axis(canvas, x, bottom)
    return canvas.svg()


def where_time_goes(groups: Sequence[tuple[str, dict[DeviceState, float]]], *, label: str) -> str:
    """A bar a board: the seconds that its devices spend in each state in a mean round."""
    row, left = 30.0, 224.0
    bottom = row * len(groups) + 4
    canvas = Canvas(bottom + 40, label, WIDE)
    x = Scale(0.0, max(sum(seconds.values()) for _, seconds in groups) or 1.0, left, WIDE - RIGHT)
    for tick in x.ticks(8):
        canvas.line(x(tick), 2, x(tick), bottom, "grid")
        canvas.text(x(tick), bottom + 16, tick_text(tick), anchor="middle")
    for n, (name, seconds) in enumerate(groups):
        y, begin, whole = 4 + n * row, 0.0, sum(seconds.values()) or 1.0
        canvas.text(left - 8, y + row / 2 + 1, name, anchor="end")
        for state in ("fetching", "training", "sending", "accepted", *_STACK[4:]):
            lasted = seconds.get(state, 0.0)
            if not lasted:
                continue
            start, end = x(begin), x(begin + lasted)
            tip = f"{name}: {WORDS[state]} {number(lasted)} s of a mean round ({100 * lasted / whole:.0f} %)"
            canvas.rect(start, y, end - start, row - 8, f"sf s-{state}", tip=tip)
            words = f"{number(lasted)} s"
            if end - start > 8.0 * len(words) and state != "absent":
                css = "t small onfill" if state in DARK_FILLS else "t small"
                canvas.text((start + end) / 2, y + row / 2, words, css, anchor="middle")
            begin += lasted
    words = "seconds of a mean round, until the next one opens"
    canvas.text((left + WIDE - RIGHT) / 2, bottom + 33, words, "t soft", anchor="middle")
    return canvas.svg()


def stacked_states(timeline: FleetTimeline) -> list[DeviceState]:
    """The states that such a chart shows, for its legend."""
    seen = {state for row in timeline.rounds for state, seconds in row.device_seconds.items() if seconds}
    return [state for state in _STACK if state in seen]


def _shares(total: dict[DeviceState, float], devices: int) -> dict[DeviceState, float]:
    """Device seconds as a mean number of devices."""
    whole = sum(total.values())
    return {state: devices * seconds / whole if whole else 0.0 for state, seconds in total.items()}


def _stack(
    steps: Sequence[dict[DeviceState, float]], edges: Sequence[float], devices: int, label: str
) -> tuple[Canvas, float]:
    """An area a state, with a step an interval between `edges`."""
    height, bottom = 250.0, 210.0
    canvas = Canvas(height, label, WIDE)
    x = Scale(edges[0], edges[-1], LEFT, WIDE - RIGHT)
    y = Scale(0.0, float(devices), bottom, 6.0)
    below = [0.0] * len(steps)
    for state in _STACK:
        above = [base + step[state] for base, step in zip(below, steps, strict=True)]
        if state != "absent" and any(step[state] > 0 for step in steps):
            there = [(x(edges[n + side]), y(above[n])) for n in range(len(steps)) for side in (0, 1)]
            back = [(x(edges[n + side]), y(below[n])) for n in reversed(range(len(steps))) for side in (1, 0)]
            canvas.path(there + back, f"sf s-{state}", closed=True)
        below = above
    for tick in y.ticks(5):
        canvas.line(LEFT - 4, y(tick), LEFT, y(tick), "axis")
        canvas.text(LEFT - 8, y(tick) + 4.3, f"{tick:,g}", anchor="end")
    canvas.text(4, y((y.low + y.high) / 2) + 4.3, "devices", "t soft")
    canvas.line(LEFT, bottom, WIDE - RIGHT, bottom, "axis")
    return canvas, bottom
