"""Makes the report's section on the fleet over time: which devices were present, worked or were late, and the times.

A small fleet is a Gantt chart; for a long run it opens at the rounds around the worst. A large fleet, or a long run, is
a matrix of rounds by devices, whose size is bounded. The log does not show what a device does between two events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import plotly.graph_objects as go

from hushfleet.aggregator.results.fleet_timeline import ACTIVITIES, Activity, FleetTimeline, TimelineMark
from hushfleet.aggregator.results.report.charts import rows_of_names
from hushfleet.aggregator.results.report.page import CARD, GRID, INK, SOFT, Plot, Section, SectionPart, label
from hushfleet.aggregator.results.report.readable import number
from hushfleet.aggregator.results.report.timeline_text import (
    OUTCOME_STATES,
    describe_timeline,
    describe_worst,
    worst_round,
)
from hushfleet.aggregator.results.result import Result
from hushfleet.aggregator.results.timeline import SERVERS

MOST_GANTT_DEVICES = 40
MOST_GANTT_ROUNDS = 24
MOST_BARS = 5_000
MOST_COLUMNS = 200
MOST_ROWS = 500
ZOOM_ROUNDS = 8
MOST_BOARDS = 12

WORDS: dict[Activity, str] = {
    "absent": "not seen yet",
    "ready": "ready, nothing to do",
    "fetching": "waiting for the model",
    "training": "training",
    "sending": "sending",
    "accepted": "accepted, waiting for others",
    "late": "late",
    "declined": "declined",
    "refused": "refused",
    "sleeping": "switched off",
    "lost": "lost",
}
_WORST_FIRST = "rxdl-.a"
_STACK: tuple[Activity, ...] = (
    "fetching", "training", "sending", "accepted", "ready", "late", "declined", "refused", "sleeping", "lost",
)  # fmt: skip
"""The order of states in a stack: work, waiting, failures, absence."""
_THICKNESS = {"training": 0.8, "sending": 0.8, "accepted": 0.34, "ready": 0.2, "sleeping": 0.2, "lost": 0.2}
"""The thickness of a bar as a share of a row's height, 0.5 for other states: it shows the state without colour."""
_DONE = {
    "kill": ("power cut", "crash"),
    "stop": ("switched off", "stopped"),
    "cut": ("network cut", "cut off"),
    "start": ("switched on", "started again"),
}
"""The words of a mark, for a device and for a server."""


def timeline_section(result: Result) -> Section | None:
    """Returns the section; None if the result has no timeline, or nothing happened in it."""
    timeline, boards = result.details.fleet_timeline, result.boards
    if timeline is None or not (timeline.timed or set("".join(timeline.outcomes)) - {"a"}):
        return None
    is_small = bool(timeline.spans) and len(timeline.devices) <= MOST_GANTT_DEVICES
    parts: list[SectionPart] = []
    if not (is_small and len(timeline.rounds) <= MOST_GANTT_ROUNDS):
        parts.append(matrix(timeline, boards))
    if is_small:
        parts.append(gantt(timeline, boards))
    if timeline.timed:
        parts.append(time_by_board(timeline, boards))
    lead = f"{describe_timeline(timeline)} {describe_worst(timeline, result.details.decline_reasons)}".rstrip()
    return Section("timeline", "The fleet over time", lead, parts)


class Rows(NamedTuple):
    """The rows of a chart from top to bottom.

    :param devices: indices in the timeline's `devices`; None for the head of a board.
    :param heads: the row of each head, and its words.
    :param servers: rows above, for the broker and the aggregator if something happened to them.
    """

    devices: list[int | None]
    heads: dict[int, str]
    servers: dict[str, int]

    def layout(self, names: Sequence[str], *, row_px: float, shown: bool = True) -> dict[str, Any]:
        """Returns the height, the axis of names, and the heads over the rows."""
        ticks = {row: label(names[index], longest=16) for row, index in enumerate(self.devices) if index is not None}
        above = {row: target for target, row in self.servers.items()}
        ticks |= above if shown else {}
        heads = self.heads if shown else self.heads | above
        top = min(above, default=0) - 0.5
        look = {"xref": "paper", "x": 0, "xanchor": "left", "showarrow": False, "bgcolor": CARD, "font_color": SOFT}
        axis = {"range": [len(self.devices) - 0.5, top], "tickvals": list(ticks), "ticktext": list(ticks.values())}
        return {
            "yaxis": {**axis, "showticklabels": shown, "showgrid": False},
            "annotations": [{"text": words, "y": row, **look} for row, words in heads.items()],
            "height": round(130 + row_px * (len(self.devices) - top)),
        }


def rows_by_board(
    timeline: FleetTimeline,
    boards: Mapping[str, str],
    *,
    key: Callable[[int], Any] = lambda index: index,
    step: int = 1,
    head: int = 1,
) -> Rows:
    """Orders the devices by board, then by `key`; takes one in `step` of each board, for a small board the middle one.

    :param head: how many rows a head takes; there is no head if there is only one board.
    """
    by_board: dict[str, list[int]] = {}
    for index in sorted(range(len(timeline.devices)), key=key):
        by_board.setdefault(boards.get(timeline.devices[index], ""), []).append(index)
    devices: list[int | None] = []
    heads = {}
    for board, members in sorted(by_board.items()):
        if len(by_board) > 1:
            heads[len(devices) + head // 2] = f"{label(board) or 'unknown board'} ({len(members):,})"
            devices += [None] * head
        devices += members[step // 2 :: step] or [members[len(members) // 2]]
    targets = {mark.target for mark in timeline.marks}
    servers = [target for target in SERVERS if target in targets]
    return Rows(devices, heads, {target: -1 - (n + 1) * head for n, target in enumerate(servers)})


class Span(NamedTuple):
    """An activity of a device, with its begin and end.

    :param device: its index in the timeline's `devices`.
    """

    start_s: float
    end_s: float
    state: Activity
    device: int


def gantt(timeline: FleetTimeline, boards: Mapping[str, str]) -> Plot:
    """Returns a chart with a row per device and a bar per state. A long run opens at the rounds around the worst."""
    rounds, rows = timeline.rounds, rows_by_board(timeline, boards)
    start_s, end_s, notes = 0.0, timeline.end_s, []
    if len(rounds) > MOST_GANTT_ROUNDS:
        first = max(0, min(worst_round(timeline) - ZOOM_ROUNDS // 2, len(rounds) - ZOOM_ROUNDS))
        shown, after = rounds[first : first + ZOOM_ROUNDS], rounds[first + ZOOM_ROUNDS :]
        start_s, end_s = shown[0].opened_s, after[0].opened_s if after else end_s
        notes.append(f"It opens at the rounds {shown[0].round} to {shown[-1].round}, around the worst of the run.")
    spans = [Span(*span, device) for device, of_device in enumerate(timeline.spans) for span in of_device]
    if len(spans) > MOST_BARS:
        spans = [span for span in spans if span.start_s < end_s and span.end_s > start_s]
        notes.append(f"Drawn are the longest of the {len(spans):,} bars of this time.")
        spans = sorted(spans, key=lambda span: span.start_s - span.end_s)[:MOST_BARS]
    late = [
        Span(row.opened_s, row.closed_s, "late", index)
        for index, letters in enumerate(timeline.outcomes)
        for row, letter in zip(rounds, letters, strict=True)
        if letter == "l"
    ]
    unit_s, unit = time_unit(end_s - start_s)
    draw = partial(_bars, timeline, rows, unit_s)
    traces = [
        draw(found, WORDS[state], width=_THICKNESS.get(state, 0.5))
        for state in ACTIVITIES
        if state != "absent" and (found := [span for span in spans if span.state == state])
    ]
    if late:
        traces.append(draw(late, "its round closed without it", width=0.13, offset=0.37))
    for words, color, dash, moments in (
        ("a round opens", INK, "solid", [row.opened_s for row in rounds]),
        ("a round closes", SOFT, "dot", [row.closed_s for row in rounds]),
    ):
        x = [value for moment in moments for value in (moment / unit_s, moment / unit_s, None)]
        y, look = [-0.5, len(rows.devices) - 0.5, None] * len(moments), {"color": color, "width": 1, "dash": dash}
        traces.append(go.Scatter(x=x, y=y, mode="lines", line=look, name=words, hoverinfo="skip"))
    places = {timeline.devices[index]: row for row, index in enumerate(rows.devices) if index is not None}
    traces += _events(timeline.marks, places | rows.servers, lambda moment: moment / unit_s)
    numbers = _apart([(row.opened_s / unit_s, row.round) for row in rounds], (end_s - start_s) / unit_s / 40)
    words_above = {"mode": "text", "hoverinfo": "skip", "showlegend": False}
    traces.append(go.Scatter(x=list(numbers), y=[-1] * len(numbers), text=list(numbers.values()), **words_above))
    edge_s = 0.01 * (end_s - start_s)  # space for the numbers of the first and the last round
    view = [(start_s - edge_s) / unit_s, (end_s + edge_s) / unit_s]
    outage = {"yref": "paper", "y0": 0, "y1": 1, "fillcolor": "var(--refused)", "opacity": 0.16, "line_width": 0}
    layout = {
        **rows._replace(servers={"round": -1, **rows.servers}).layout(timeline.devices, row_px=22),
        "xaxis": {"title_text": unit, "range": view, "showgrid": False},
        "barmode": "overlay",
        "shapes": [
            {"x0": mark.start_s / unit_s, "x1": mark.end_s / unit_s, **outage}
            for mark in timeline.marks
            if mark.target in SERVERS
        ],
    }
    return Plot(go.Figure(traces, layout), "What each device did", " ".join(notes), wide=True)


def time_unit(seconds: float) -> tuple[int, str]:
    """Returns the unit of a time axis in seconds, so that a run's length is a small number, and the axis's title."""
    unit_s, name = (3600, "hours") if seconds > 3 * 3600 else (60, "minutes") if seconds > 600 else (1, "seconds")
    return unit_s, f"{name} since the run's start"


def _bars(timeline: FleetTimeline, rows: Rows, unit_s: int, spans: Sequence[Span], words: str, **more: Any) -> go.Bar:
    places = {index: row for row, index in enumerate(rows.devices)}
    opened = [row.opened_s for row in timeline.rounds]

    def tip(span: Span) -> str:
        before = bisect_right(opened, span.start_s)
        during = f"round {timeline.rounds[before - 1].round}" if before else "before the first round"
        return f"{label(timeline.devices[span.device])}, {during}: {words}, {number(span.end_s - span.start_s)} s"

    return go.Bar(
        base=[span.start_s / unit_s for span in spans],
        x=[(span.end_s - span.start_s) / unit_s for span in spans],
        y=[places[span.device] for span in spans],
        orientation="h",
        name=words,
        marker={"color": f"var(--{spans[0].state})", "line_width": 0},
        hovertext=[tip(span) for span in spans],
        hoverinfo="text",
        **more,
    )


def _apart(rounds: Iterable[tuple[float, int]], least: float) -> dict[float, int]:
    """Returns the rounds whose numbers have enough space next to each other, by their position."""
    kept: dict[float, int] = {}
    last = -math.inf
    for at, round_number in rounds:
        if at - last >= least:
            kept[at], last = round_number, at
    return kept


def _events(marks: Sequence[TimelineMark], places: Mapping[str, int], at: Callable[[float], float]) -> list[go.Scatter]:
    """Returns a triangle for each disturbance of a device or a server, and a line until it was undone."""
    shown = [mark for mark in marks if mark.target in places]
    if not shown:
        return []
    return [
        go.Scatter(
            x=[value for mark in shown for value in (at(mark.start_s), at(mark.end_s), None)],
            y=[value for mark in shown for value in (places[mark.target], places[mark.target], None)],
            mode="lines",
            line={"color": "var(--refused)", "width": 1.5},
            hoverinfo="skip",
            showlegend=False,
        ),
        go.Scatter(
            x=[at(mark.start_s) for mark in shown],
            y=[places[mark.target] for mark in shown],
            mode="markers",
            marker={"symbol": "triangle-up", "size": 10, "color": "var(--refused)"},
            cliponaxis=False,
            name="cut off or switched",
            hovertext=[format_mark(mark) for mark in shown],
            hoverinfo="text",
        ),
    ]


def format_mark(mark: TimelineMark) -> str:
    """Describes a mark: its target, kind, time and duration."""
    done = _DONE.get(mark.what, (mark.what, mark.what))[mark.target in SERVERS]
    lasted = mark.end_s - mark.start_s
    back = f", undone after {number(lasted)} s" if lasted else ""
    return label(f"{mark.target}: {done} at {number(mark.start_s)} s{back}", longest=200)


def matrix(timeline: FleetTimeline, boards: Mapping[str, str]) -> Plot:
    """Returns a matrix with rounds in columns and devices in rows; a cell's colour is the outcome.

    With many rounds a column contains several of them; with many devices only one in `step` has a row.
    """
    step, binned = math.ceil(len(timeline.devices) / MOST_ROWS), math.ceil(len(timeline.rounds) / MOST_COLUMNS)
    is_named = len(timeline.devices) <= MOST_GANTT_DEVICES
    row_px = 17.0 if is_named else max(2.0, min(6.0, 480 * step / len(timeline.devices)))

    def often_first(index: int) -> tuple[float, int]:
        return -accepted_share(timeline.outcomes[index]), index

    rows = rows_by_board(timeline, boards, key=often_first, step=step, head=math.ceil(17 / row_px))
    cells = [None if index is None else binned_letters(timeline.outcomes[index], binned) for index in rows.devices]
    seen = [letter for letter in OUTCOME_STATES if any(letter in line for line in cells if line)]
    states, words = zip(*(OUTCOME_STATES[letter] for letter in seen), strict=True)
    numbers, opened = [row.round for row in timeline.rounds], [row.opened_s for row in timeline.rounds]
    empty = [None] * math.ceil(len(numbers) / binned)
    heat = go.Heatmap(
        x=[n - 0.5 for n in numbers[::binned]] + [numbers[-1] + 0.5],
        z=[[seen.index(letter) for letter in line] if line else empty for line in cells],
        text=[[OUTCOME_STATES[letter][1] for letter in line] if line else empty for line in cells],
        zmin=-0.5,
        zmax=len(seen) - 0.5,
        colorscale=[[(n + side) / len(seen), f"var(--{state})"] for n, state in enumerate(states) for side in (0, 1)],
        showscale=False,
        ygap=2 if is_named else 0,
        hoverongaps=False,
        hovertemplate="%{y}, round %{x}: %{text}<extra></extra>",
    )
    edge = {"width": 1, "color": GRID}
    legend = [
        go.Scatter(
            x=[None], y=[None], mode="markers", name=name,
            marker={"symbol": "square", "size": 13, "color": f"var(--{state})", "line": edge},
        )
        for state, name in zip(states, words, strict=True)
    ]  # fmt: skip

    def round_at(moment: float) -> float:
        return numbers[max(0, bisect_right(opened, moment) - 1)]

    notes = ["Devices are grouped by board, those whose updates came in most often above."]
    if binned > 1:
        notes.append(f"A cell is {binned} rounds, with the colour of what happened most often in them.")
    if step > 1:
        notes.append(f"Of {len(timeline.devices):,} devices in this order, one in {step} is drawn.")
    layout = rows.layout(timeline.devices, row_px=row_px, shown=is_named)
    figure = go.Figure([heat, *legend, *_events(timeline.marks, rows.servers, round_at)], layout)
    figure.update_layout(xaxis={"title_text": "round", "showgrid": False})
    return Plot(figure, "What came of each round, device by device", " ".join(notes), wide=True)


def accepted_share(letters: str) -> float:
    """Returns accepted updates as a share of all rounds in which the device was asked or away; 1 if there were none."""
    counted = len(letters) - letters.count(".")
    return letters.count("a") / counted if counted else 1.0


def binned_letters(letters: str, binned: int) -> str:
    """Returns the most frequent outcome in each `binned` rounds; the worse one of two that are equally frequent."""
    parts = [letters[n : n + binned] for n in range(0, len(letters), binned)]
    return "".join(max(sorted(set(part), key=_WORST_FIRST.index), key=part.count) for part in parts)


def time_by_board(timeline: FleetTimeline, boards: Mapping[str, str]) -> Plot:
    """Returns a bar for each board: the seconds that its devices spend in each state in a mean round."""
    members: dict[str, list[int]] = {}
    for index, device in enumerate(timeline.devices):
        members.setdefault(boards.get(device, "unknown board"), []).append(index)
    by_size = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = by_size[:MOST_BOARDS]
    if len(by_size) > 1:
        groups.insert(0, ("all devices", list(range(len(timeline.devices)))))
    means = [mean_round(timeline, indices) for _, indices in groups]
    bars = [
        go.Bar(
            x=[mean[state] for mean in means],
            y=list(range(len(groups))),
            orientation="h",
            name=WORDS[state],
            marker={"color": f"var(--{state})", "line_width": 0},
            texttemplate="%{x:.3g} s",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate=f"%{{y}}: {WORDS[state]} %{{x:.3g}} s of a mean round<extra></extra>",
        )
        for state in _STACK
        if any(mean[state] > 0 for mean in means)
    ]
    note = "Means over devices and rounds. Waiting for the model ends when training begins."
    if len(by_size) > MOST_BOARDS:
        note += f" The {MOST_BOARDS} commonest of {len(by_size)} boards."
    layout = {
        "height": 150 + 34 * len(groups),
        "barmode": "stack",
        "bargap": 0.25,
        "xaxis_title_text": "seconds of a mean round",
        "uniformtext": {"mode": "hide", "minsize": 10},
        "legend_traceorder": "normal",
    }
    names = [f"{board} ({len(indices):,})" for board, indices in groups]
    plot = rows_of_names("Where the time of a round goes", bars, names, note, **layout)
    return replace(plot, wide=True)


def mean_round(timeline: FleetTimeline, members: Sequence[int]) -> dict[Activity, float]:
    """Returns the seconds that these devices spend in each state, as a mean over them and over the rounds."""
    rounds = len(timeline.rounds)
    return {state: fmean(timeline.seconds[index].get(state, 0.0) for index in members) / rounds for state in ACTIVITIES}
