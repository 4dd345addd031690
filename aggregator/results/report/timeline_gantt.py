"""The Gantt chart of a small fleet: a row a device, a bar a state, a line where a round opens or closes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from hushfleet.aggregator.observe.timeline_marks import SERVERS
from hushfleet.aggregator.results.report.grids import NAME_WIDTH, short
from hushfleet.aggregator.results.report.svg import Canvas, Scale
from hushfleet.aggregator.results.report.timeline_axes import LEFT, RIGHT, WIDE, time_axis
from hushfleet.aggregator.results.report.timeline_style import WORDS, mark_tip, mark_words
from hushfleet.aggregator.results.report.verdict import number
from hushfleet.aggregator.results.result import DeviceState, FleetTimeline

MOST_BARS = 4_000
_TOP = 34.0
_NARROWEST = 0.8
_THICKNESS: dict[DeviceState, float] = {
    "absent": 0.0,
    "ready": 0.2,
    "fetching": 0.5,
    "training": 0.8,
    "sending": 0.8,
    "accepted": 0.34,
    "late": 0.5,
    "declined": 0.5,
    "refused": 0.5,
    "sleeping": 0.2,
    "lost": 0.2,
}
"""Of a row's height: a second sign beside the colour."""


class Row(NamedTuple):
    """A device: its place in the timeline's lists, and the board that it is grouped by."""

    index: int
    board: str


def rows_by_board(timeline: FleetTimeline, boards: dict[str, str]) -> list[Row]:
    """The devices in the order of the chart: by board, then by name."""
    rows = [Row(index, boards.get(device, "")) for index, device in enumerate(timeline.devices)]
    return sorted(rows, key=lambda row: (row.board, row.index))


def gantt(timeline: FleetTimeline, rows: Sequence[Row], *, start_s: float, end_s: float, label: str) -> tuple[str, int]:
    """The chart of the time from `start_s` to `end_s`, and how many spans were too short to be drawn alone."""
    height = 22.0 if len(rows) <= 16 else 15.0
    groups = [(board, list(group)) for board, group in groupby(rows, key=lambda row: row.board)]
    heads = 18.0 if len(groups) > 1 else 0.0
    bottom = _TOP + height * len(rows) + heads * len(groups)
    canvas = Canvas(bottom + 40, label, WIDE)
    x = Scale(start_s, end_s, LEFT, WIDE - RIGHT)
    _server_marks(canvas, timeline, x, bottom)
    narrowest, merged, places = _narrowest(timeline, rows, x), 0, {}
    y = _TOP
    for board, members in groups:
        if heads:
            canvas.text(4, y + 13, f"{board or 'unknown board'} ({len(members)})", "t soft")
            y += heads
        _round_lines(canvas, timeline, x, y, y + height * len(members))
        for row in members:
            device = timeline.devices[row.index]
            places[device] = y + height / 2
            canvas.text(NAME_WIDTH, y + height / 2 + 4.3, short(device), anchor="end")
            merged += _bars(canvas, timeline, row.index, x, y, height, narrowest)
            _late_lines(canvas, timeline, row.index, x, y, height)
            y += height
    _round_numbers(canvas, timeline, x)
    for mark in timeline.marks:
        if mark.target not in places or mark.end_s < start_s or mark.start_s > end_s:
            continue
        middle = places[mark.target]
        if mark.end_s > mark.start_s:
            canvas.line(x(max(mark.start_s, start_s)), middle, x(min(mark.end_s, end_s)), middle, "undone")
        if mark.start_s >= start_s:
            canvas.mark(2, x(mark.start_s), places[mark.target], "event", tip=mark_tip(mark), radius=5)
    time_axis(canvas, x, bottom)
    return canvas.svg(), merged


class _Bar(NamedTuple):
    start_s: float
    end_s: float
    state: DeviceState
    spans: int


def _merged(spans: Sequence[tuple[float, float, DeviceState]], x: Scale, narrowest: float) -> Iterator[_Bar]:
    """Bars of at least `narrowest` pixels: shorter spans are put together as the state that had most of the time."""
    per_second = (x.stop - x.start) / (x.high - x.low)
    waiting: list[tuple[float, float, DeviceState]] = []
    for start, end, state in spans:
        start, end = max(start, x.low), min(end, x.high)
        if end <= start:
            continue
        if (end - start) * per_second >= narrowest:
            if waiting:
                yield _together(waiting)
                waiting = []
            yield _Bar(start, end, state, 1)
            continue
        waiting.append((start, end, state))
        if (end - waiting[0][0]) * per_second >= narrowest:
            yield _together(waiting)
            waiting = []
    if waiting:
        yield _together(waiting)


def _together(spans: Sequence[tuple[float, float, DeviceState]]) -> _Bar:
    total: dict[DeviceState, float] = {}
    for start, end, state in spans:
        total[state] = total.get(state, 0.0) + end - start
    return _Bar(spans[0][0], spans[-1][1], max(total, key=lambda state: total[state]), len(spans))


def _narrowest(timeline: FleetTimeline, rows: Sequence[Row], x: Scale) -> float:
    """The narrowest bar with which the chart has no more than `MOST_BARS` of them."""
    width = _NARROWEST
    while sum(1 for row in rows for _ in _merged(timeline.spans[row.index], x, width)) > MOST_BARS:
        width *= 2
    return width


def _bars(
    canvas: Canvas, timeline: FleetTimeline, index: int, x: Scale, y: float, height: float, narrowest: float
) -> int:
    device, opened = timeline.devices[index], [row.opened_s for row in timeline.rounds]
    merged = 0
    for bar in _merged(timeline.spans[index], x, narrowest):
        merged += bar.spans if bar.spans > 1 else 0
        thick = _THICKNESS[bar.state] * height
        if not thick:
            continue
        before = bisect_right(opened, bar.start_s)
        during = f"round {timeline.rounds[before - 1].round}" if before else "before the first round"
        more = f" (and {bar.spans - 1} shorter)" if bar.spans > 1 else ""
        tip = f"{device}, {during}: {WORDS[bar.state]}{more}, {number(bar.end_s - bar.start_s)} s"
        left, right = x(bar.start_s), x(bar.end_s)
        canvas.rect(left, y + (height - thick) / 2, right - left, thick, f"sf s-{bar.state}", tip=tip)
    return merged


def _late_lines(canvas: Canvas, timeline: FleetTimeline, index: int, x: Scale, y: float, height: float) -> None:
    """Below the bars of a round that closed without the device: its work there was in vain."""
    for row, letter in zip(timeline.rounds, timeline.outcomes[index], strict=True):
        left, right = x(max(row.opened_s, x.low)), x(min(row.closed_s, x.high))
        if letter == "l" and right > left:
            tip = f"{timeline.devices[index]}: late in round {row.round}"
            canvas.rect(left, y + 0.87 * height, right - left, 0.13 * height, "sf s-late", tip=tip)


def _round_lines(canvas: Canvas, timeline: FleetTimeline, x: Scale, top: float, bottom: float) -> None:
    for row in timeline.rounds:
        for moment, css in ((row.closed_s, "shut"), (row.opened_s, "axis")):
            if x.low <= moment <= x.high:
                canvas.line(x(moment), top, x(moment), bottom, css)


def _round_numbers(canvas: Canvas, timeline: FleetTimeline, x: Scale) -> None:
    canvas.text(4, _TOP - 5, "round", "t soft")
    last_label = -100.0
    for row in timeline.rounds:
        at = x(row.opened_s)
        if x.low <= row.opened_s < x.high and at - last_label >= 9 * len(str(row.round)) + 8:
            canvas.text(at, _TOP - 5, str(row.round), anchor="middle")
            last_label = at


def _server_marks(canvas: Canvas, timeline: FleetTimeline, x: Scale, bottom: float) -> None:
    free_from = 0.0
    for mark in timeline.marks:
        if mark.target not in SERVERS or mark.end_s < x.low or mark.start_s > x.high:
            continue
        left, right = x(max(mark.start_s, x.low)), x(min(mark.end_s, x.high))
        canvas.rect(left, 14, max(1.5, right - left), bottom - 14, "down", tip=mark_tip(mark))
        words = f"{mark.target}: {mark_words(mark)}"
        if left >= free_from and left + 6.6 * len(words) < WIDE:
            canvas.text(left, 11, words, "t small")
            free_from = left + 6.6 * len(words)
