"""The report's section on the fleet over time: who was there, who worked, who came late, and where the time went.

A small fleet is a Gantt chart; in a long run it opens at the rounds around the worst. A large fleet, and a long run, is a
matrix of rounds by devices, whose size is bounded whatever the run. What a device does between two events of the log
nobody knows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from hushfleet.aggregator.observe.timeline_marks import SERVERS
from hushfleet.aggregator.results.report.page import CARD, GRID, INK, SOFT, Part, Plot, Section, label
from hushfleet.aggregator.results.report.words import number
from hushfleet.aggregator.results.result import DEVICE_STATES, DeviceState, FleetTimeline, Result, TimelineMark

MOST_GANTT_DEVICES = 40
MOST_GANTT_ROUNDS = 24
MOST_BARS = 5_000
MOST_COLUMNS = 200
MOST_ROWS = 500
ZOOM_ROUNDS = 8
MOST_ROUNDS_OVER_TIME = 12
MOST_BOARDS = 12
_SMALL_FLEET = 20
_STEPS = 200

WORDS: dict[DeviceState, str] = {
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
OUTCOME_STATES: dict[str, tuple[DeviceState, str]] = {
    "a": ("accepted", "accepted"),
    "l": ("late", "late"),
    "d": ("declined", "declined"),
    "r": ("refused", "refused"),
    "x": ("lost", "lost"),
    ".": ("ready", "not asked"),
    "-": ("absent", "away"),
}
"""Letter of an outcome: whose colour it has, and its name in a legend."""
_WORST_FIRST = "rxdl-.a"
_STACK: tuple[DeviceState, ...] = (
    "fetching", "training", "sending", "accepted", "ready", "late", "declined", "refused", "sleeping", "lost", "absent",
)  # fmt: skip
"""From the bottom up: work, waiting, what went wrong, who was away."""
_THICKNESS = {"training": 0.8, "sending": 0.8, "accepted": 0.34, "ready": 0.2, "sleeping": 0.2, "lost": 0.2}
"""Of a row's height, 0.5 for other states: a second sign beside the colour."""
_DONE = {
    "kill": ("power cut", "crash"),
    "stop": ("switched off", "stopped"),
    "cut": ("network cut", "cut off"),
    "start": ("switched on", "started again"),
}
"""What a mark says of a device, and of a server."""


def timeline_section(result: Result) -> Section | None:
    """None where the result has no timeline, or one in which nothing is to be seen."""
    timeline, boards = result.details.fleet_timeline, result.boards
    if timeline is None or not (timeline.timed or set("".join(timeline.outcomes)) - {"a"}):
        return None
    is_small = bool(timeline.spans) and len(timeline.devices) <= MOST_GANTT_DEVICES
    parts: list[Part] = []
    if not (is_small and len(timeline.rounds) <= MOST_GANTT_ROUNDS):
        parts.append(matrix(timeline, boards))
        if timeline.timed:
            parts.append(states(timeline))
    if is_small:
        parts.append(gantt(timeline, boards))
    if timeline.timed:
        parts.append(time_by_board(timeline, boards))
    return Section("timeline", "The fleet over time", in_words(timeline), parts)


def in_words(timeline: FleetTimeline) -> str:
    """Who was slow, late or away, in one or two sentences."""
    counts = Counter("".join(timeline.outcomes))
    asked = sum(counts[letter] for letter in "aldrx")
    troubles = [
        f"{counts[letter]:,} {one if counts[letter] == 1 else many}"
        for letter, one, many in (
            ("l", "came too late", "came too late"),
            ("d", "was declined", "were declined"),
            ("r", "was refused", "were refused"),
            ("x", "was lost with its device", "were lost with their devices"),
        )
        if counts[letter]
    ]
    if troubles:
        listed = " and ".join([", ".join(troubles[:-1]), troubles[-1]] if troubles[1:] else troubles)
        told = f"Of {asked:,} updates that were asked for, {listed}"
    else:
        told = f"All {asked:,} updates that were asked for came in time"
    away = sum(is_long_away(letters) for letters in timeline.outcomes)
    if away:
        told += f"; {away:,} {'device was' if away == 1 else 'devices were'} away for more than a round"
    return f"{_pace(timeline)}{told}."


def _pace(timeline: FleetTimeline) -> str:
    rounds = sorted(
        (row.slowest_tenth_s / row.median_s, row.slowest_tenth_s, row.median_s)
        for row in timeline.rounds
        if row.median_s and row.slowest_tenth_s
    )
    if not rounds or len(timeline.devices) < 2:
        return ""
    ratio, slow, middle = rounds[(len(rounds) - 1) // 2]
    who = "slowest device" if len(timeline.devices) < _SMALL_FLEET else "slowest tenth of the devices"
    return (
        f"In the median round the {who} needed {number(ratio)} times as long as the median device "
        f"({number(slow)} s against {number(middle)} s). "
    )


def is_long_away(letters: str) -> bool:
    """Whether a device that had been there was then away from two rounds in a row."""
    return any(one in "x-" and other == "-" for one, other in pairwise(letters.lstrip("-")))


def worst_round(timeline: FleetTimeline) -> int:
    """The place of the round that went worst: fewest of those asked in time, then the longest."""

    def badness(place: int) -> tuple[int, float]:
        row = timeline.rounds[place]
        return sum(letters[place] in "ldrx" for letters in timeline.outcomes), row.closed_s - row.opened_s

    return max(range(len(timeline.rounds)), key=badness)


def accepted_share(letters: str) -> float:
    """Accepted updates as a share of all rounds in which the device was asked or away; 1 if there were none."""
    counted = len(letters) - letters.count(".")
    return letters.count("a") / counted if counted else 1.0


class Rows(NamedTuple):
    """The rows of a chart from top to bottom: places in the timeline's `devices`, None for the head of a board.

    :param heads: row of each head, and its words.
    """

    devices: list[int | None]
    heads: dict[int, str]

    @property
    def places(self) -> dict[int, int]:
        """The row of each device."""
        return {index: row for row, index in enumerate(self.devices) if index is not None}

    def layout(self, timeline: FleetTimeline, *, row_px: float, shown: bool = True) -> dict[str, Any]:
        """The axis of names, with a row for each server that something happened to, and the heads."""
        servers = [target for target in SERVERS if any(mark.target == target for mark in timeline.marks)]
        names = {row: label(timeline.devices[index], longest=16) for index, row in self.places.items()}
        ticks = {-1 - n: target for n, target in enumerate(servers)} | (names if shown else {})
        where = {"xref": "paper", "x": 0, "xanchor": "left", "showarrow": False, "font": {"color": SOFT}}
        return {
            "yaxis": {
                "range": [len(self.devices) - 0.5, -0.5 - len(servers)],
                "tickvals": list(ticks),
                "ticktext": list(ticks.values()),
                "showgrid": False,
            },
            "annotations": [{"text": words, "y": row, **where} for row, words in self.heads.items()],
            "height": round(130 + row_px * (len(self.devices) + len(servers))),
        }


def rows_by_board(
    timeline: FleetTimeline,
    boards: dict[str, str],
    *,
    key: Callable[[int], Any] = lambda index: index,
    step: int = 1,
    head: int = 1,
) -> Rows:
    """The devices by board, then by `key`; one in `step` of each board, and of a small board the middle one.

    :param head: how many rows a board's head takes; there is none where there is one board only.
    """
    by_board: dict[str, list[int]] = {}
    for index in sorted(range(len(timeline.devices)), key=key):
        by_board.setdefault(boards.get(timeline.devices[index], ""), []).append(index)
    rows = Rows([], {})
    for board, members in sorted(by_board.items()):
        if len(by_board) > 1:
            rows.heads[len(rows.devices) + head // 2] = f"{label(board) or 'unknown board'} ({len(members):,})"
            rows.devices.extend([None] * head)
        rows.devices.extend(members[step // 2 :: step] or [members[len(members) // 2]])
    return rows


class Bar(NamedTuple):
    """What a device did from when to when, and in which round that began."""

    start_s: float
    end_s: float
    index: int
    round: str


def gantt(timeline: FleetTimeline, boards: dict[str, str]) -> Plot:
    """A row a device, a bar a state. A long run opens at the rounds around the worst."""
    rounds, rows = timeline.rounds, rows_by_board(timeline, boards)
    view, notes = (0.0, timeline.end_s), []
    if len(rounds) > MOST_GANTT_ROUNDS:
        first = max(0, min(worst_round(timeline) - ZOOM_ROUNDS // 2, len(rounds) - ZOOM_ROUNDS))
        last = first + ZOOM_ROUNDS - 1
        view = rounds[first].opened_s, rounds[last + 1].opened_s if last + 1 < len(rounds) else timeline.end_s
        notes.append(f"Shown are the rounds {rounds[first].round} to {rounds[last].round}, around the worst of the run.")
    bars = bars_by_state(timeline, *view)
    drawn = sum(map(len, bars.values()))
    if drawn < sum(len([each for each in spans if each[2] != "absent"]) for spans in timeline.spans):
        notes.append(f"Drawn are the {drawn:,} longest bars of this time.")
    elif len(rounds) > MOST_GANTT_ROUNDS:
        notes.append("Zoom out to see the others.")
    time = Time.of(view[1] - view[0])
    traces = [_bars(rows, timeline, time, state, WORDS[state], of_state) for state, of_state in bars.items()]
    late = [
        Bar(row.opened_s, row.closed_s, index, f"round {row.round}")
        for index, letters in enumerate(timeline.outcomes)
        for row, letter in zip(rounds, letters, strict=True)
        if letter == "l"
    ]
    if late:
        below = _bars(rows, timeline, time, "late", "its round closed without it", late)
        traces.append(below.update(width=0.13, offset=0.37))
    for words, look, moments in (
        ("a round opens", {"color": INK, "width": 1}, [row.opened_s for row in rounds]),
        ("a round closes", {"color": SOFT, "width": 1, "dash": "dot"}, [row.closed_s for row in rounds]),
    ):
        x = [value for moment in moments for value in (time.of_axis(moment), time.of_axis(moment), None)]
        y = [-0.5, len(rows.devices) - 0.5, None] * len(moments)
        traces.append(go.Scatter(x=x, y=y, mode="lines", line=look, name=words, hoverinfo="skip"))
    traces[-1].xaxis = "x2"  # an axis is drawn where something belongs to it
    places = {timeline.devices[index]: row for index, row in rows.places.items()}
    traces += marks(timeline, places, lambda moment: time.of_axis(moment))
    top = _numbered([(time.of_axis(row.opened_s), row.round) for row in rounds], apart=(view[1] - view[0]) / time.unit_s / 40)
    ends = [time.of_axis(moment) for moment in view]
    layout = {
        **rows.layout(timeline, row_px=24 if len(rows.devices) <= 20 else 17),
        "xaxis": {"title_text": time.title, "range": ends, "showgrid": False},
        "xaxis2": {"overlaying": "x", "matches": "x", "side": "top", "range": ends, "showgrid": False, **top},
        "barmode": "overlay",
        "shapes": _outages(timeline, time),
    }
    return Plot(go.Figure(traces, layout), "What each device did", " ".join(notes), wide=True)


class Time(NamedTuple):
    """In what a time axis counts, so that a run's length stays a small number."""

    unit_s: int
    title: str

    @classmethod
    def of(cls, seconds: float) -> Time:
        unit_s, name = (3600, "hours") if seconds > 3 * 3600 else (60, "minutes") if seconds > 600 else (1, "seconds")
        return cls(unit_s, f"{name} since the run's start")

    def of_axis(self, seconds: float) -> float:
        return round(seconds / self.unit_s, 5)


def bars_by_state(timeline: FleetTimeline, start_s: float, end_s: float) -> dict[DeviceState, list[Bar]]:
    """All bars of the run; where there are too many, the longest ones between `start_s` and `end_s`."""
    spans = [(*span, index) for index, of_device in enumerate(timeline.spans) for span in of_device if span[2] != "absent"]
    if len(spans) > MOST_BARS:
        spans = [span for span in spans if span[0] < end_s and span[1] > start_s]
        spans = sorted(spans, key=lambda span: span[0] - span[1])[:MOST_BARS]
    opened = [row.opened_s for row in timeline.rounds]
    found: dict[DeviceState, list[Bar]] = {state: [] for state in WORDS}
    for begin, end, state, index in spans:
        before = bisect_right(opened, begin)
        during = f"round {timeline.rounds[before - 1].round}" if before else "before the first round"
        found[state].append(Bar(begin, end, index, during))
    return {state: bars for state, bars in found.items() if bars}


def _bars(
    rows: Rows, timeline: FleetTimeline, time: Time, state: DeviceState, words: str, bars: Sequence[Bar]
) -> go.Bar:
    places = rows.places
    return go.Bar(
        base=[time.of_axis(bar.start_s) for bar in bars],
        x=[time.of_axis(bar.end_s - bar.start_s) for bar in bars],
        y=[places[bar.index] for bar in bars],
        width=_THICKNESS.get(state, 0.5),
        orientation="h",
        name=words,
        marker={"color": f"var(--{state})", "line_width": 0},
        hovertext=[
            f"{label(timeline.devices[bar.index])}, {bar.round}: {words}, {number(bar.end_s - bar.start_s)} s" for bar in bars
        ],
        hoverinfo="text",
    )


def _numbered(rounds: Sequence[tuple[float, int]], *, apart: float) -> dict[str, Any]:
    """Ticks for as many rounds as there is room for."""
    kept: list[tuple[float, int]] = []
    for at, round_number in rounds:
        if not kept or at - kept[-1][0] >= apart:
            kept.append((at, round_number))
    return {"tickvals": [at for at, _ in kept], "ticktext": [f"{n}" for _, n in kept], "title_text": "round"}


def marks(timeline: FleetTimeline, places: dict[str, int], at: Callable[[float], float]) -> list[go.Scatter]:
    """A triangle where something was done to a device or a server, and a line until it was undone."""
    servers = [target for target in SERVERS if any(mark.target == target for mark in timeline.marks)]
    places = {**places, **{target: -1 - n for n, target in enumerate(servers)}}
    shown = [mark for mark in timeline.marks if mark.target in places]
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
            marker={"symbol": "triangle-up", "size": 10, "color": "var(--refused)", "line": {"width": 1, "color": CARD}},
            name="cut off or switched",
            hovertext=[mark_words(mark) for mark in shown],
            hoverinfo="text",
        ),
    ]


def mark_words(mark: TimelineMark) -> str:
    """To whom, what, when, and for how long."""
    done = _DONE.get(mark.what, (mark.what, mark.what))[mark.target in SERVERS]
    lasted = mark.end_s - mark.start_s
    back = f", undone after {number(lasted)} s" if lasted else ""
    return label(f"{mark.target}: {done} at {number(mark.start_s)} s{back}", longest=200)


def _outages(timeline: FleetTimeline, time: Time) -> list[dict[str, Any]]:
    """Columns over all devices: the broker or the aggregator was away."""
    look = {"yref": "paper", "y0": 0, "y1": 1, "fillcolor": "var(--refused)", "opacity": 0.16, "line_width": 0}
    return [
        {"x0": time.of_axis(mark.start_s), "x1": time.of_axis(mark.end_s), **look}
        for mark in timeline.marks
        if mark.target in SERVERS
    ]


def matrix(timeline: FleetTimeline, boards: dict[str, str]) -> Plot:
    """Rounds in columns, devices in rows, what came of it as the cell's colour.

    Columns hold several rounds where there are many, rows are every so many devices.
    """
    step, binned = (math.ceil(len(timeline.devices) / MOST_ROWS), math.ceil(len(timeline.rounds) / MOST_COLUMNS))
    is_named = len(timeline.devices) <= MOST_GANTT_DEVICES
    row_px = 17.0 if is_named else max(2.0, min(6.0, 480 * step / len(timeline.devices)))

    def often_first(index: int) -> tuple[float, int]:
        return -accepted_share(timeline.outcomes[index]), index

    rows = rows_by_board(timeline, boards, key=often_first, step=step, head=math.ceil(17 / row_px))
    cells = [None if index is None else binned_letters(timeline.outcomes[index], binned) for index in rows.devices]
    seen = [letter for letter in OUTCOME_STATES if any(letter in line for line in cells if line)]
    numbers = [row.round for row in timeline.rounds]
    columns = math.ceil(len(numbers) / binned)
    empty, colors = [None] * columns, [f"var(--{OUTCOME_STATES[letter][0]})" for letter in seen]
    heat = go.Heatmap(
        x=[n - 0.5 for n in numbers[::binned]] + [numbers[-1] + 0.5],
        z=[empty if line is None else [seen.index(letter) for letter in line] for line in cells],
        zmin=-0.5,
        zmax=len(seen) - 0.5,
        colorscale=[[(n + side) / len(seen), color] for n, color in enumerate(colors) for side in (0, 1)],
        showscale=False,
        ygap=2 if is_named else 0,
        text=[empty if line is None else [OUTCOME_STATES[letter][1] for letter in line] for line in cells],
        customdata=[
            empty if index is None else [label(timeline.devices[index])] * columns for index in rows.devices
        ],
        hovertemplate="%{customdata}, round %{x}: %{text}<extra></extra>",
    )
    legend = [_key(OUTCOME_STATES[letter][1], color) for letter, color in zip(seen, colors, strict=True)]
    opened = [row.opened_s for row in timeline.rounds]

    def round_at(moment: float) -> float:
        return numbers[max(0, bisect_right(opened, moment) - 1)]

    servers = [mark for mark in timeline.marks if mark.target in SERVERS]
    outages = marks(timeline.model_copy(update={"marks": servers}), {}, round_at)
    layout = {**rows.layout(timeline, row_px=row_px, shown=is_named), "xaxis": {"title_text": "round", "showgrid": False}}
    notes = ["Devices are grouped by board, those whose updates came in most often above."]
    if binned > 1:
        notes.append(f"A cell is {binned} rounds, with the colour of what happened most often in them.")
    if step > 1:
        notes.append(f"Of {len(timeline.devices):,} devices in this order, one in {step} is drawn.")
    figure = go.Figure([heat, *legend, *outages], layout)
    return Plot(figure, "What came of each round, device by device", " ".join(notes), wide=True)


def _key(words: str, color: str) -> go.Scatter:
    """An entry of the legend without anything to draw."""
    look = {"symbol": "square", "size": 13, "color": color, "line": {"width": 1, "color": GRID}}
    return go.Scatter(x=[None], y=[None], mode="markers", marker=look, name=words)


def binned_letters(letters: str, binned: int) -> str:
    """What happened most often in each `binned` rounds; of two that happened as often, the worse."""

    def commonest(part: str) -> str:
        return max(sorted(set(part), key=_WORST_FIRST.index), key=part.count)

    return "".join(commonest(letters[n : n + binned]) for n in range(0, len(letters), binned))


def states(timeline: FleetTimeline) -> Plot:
    """How many devices were in which state, stacked: over time in a run of few rounds, else by rounds."""
    if timeline.spans and len(timeline.rounds) <= MOST_ROUNDS_OVER_TIME:
        counts, moments = states_over_time(timeline)
        time, note = Time.of(timeline.end_s), ""
        xs, title = [time.of_axis(moment) for moment in moments], time.title
    else:
        counts, xs, title = states_by_round(timeline), [row.round for row in timeline.rounds], "round"
        note = "Mean number of devices from a round's opening to the next one's."
    areas = [
        go.Scatter(
            x=xs,
            y=counts[state],
            stackgroup="devices",
            mode="lines",
            line={"width": 0, "shape": "hvh"},
            fillcolor=f"var(--{state})",
            name=WORDS[state],
        )
        for state in _STACK
        if any(counts[state])
    ]
    figure = go.Figure(areas, {"xaxis_title_text": title, "yaxis_title_text": "devices", "yaxis_hoverformat": ".1f"})
    return Plot(figure.update_layout(hovermode="x unified"), "How many devices were in which state", note, wide=True)


def states_by_round(timeline: FleetTimeline) -> dict[DeviceState, list[float]]:
    """Mean number of devices in each state, by round."""
    devices = len(timeline.devices)
    wholes = [sum(row.device_seconds.values()) for row in timeline.rounds]
    return {
        state: [
            devices * row.device_seconds.get(state, 0.0) / whole if whole else 0.0
            for row, whole in zip(timeline.rounds, wholes, strict=True)
        ]
        for state in DEVICE_STATES
    }


def states_over_time(timeline: FleetTimeline) -> tuple[dict[DeviceState, list[float]], list[float]]:
    """Number of devices in each state at moments of the run, and these moments."""
    moments = (np.arange(_STEPS) + 0.5) * timeline.end_s / _STEPS
    counts = {}
    for state in DEVICE_STATES:
        edges = [(begin, end) for spans in timeline.spans for begin, end, own in spans if own == state]
        starts, ends = np.sort(np.array(edges).reshape(-1, 2), axis=0).T
        inside = np.searchsorted(starts, moments, side="right") - np.searchsorted(ends, moments, side="right")
        counts[state] = inside.astype(float).tolist()
    return counts, moments.tolist()


def time_by_board(timeline: FleetTimeline, boards: dict[str, str]) -> Plot:
    """A bar a board: the seconds that its devices spend in each state in a mean round."""
    members: dict[str, list[int]] = {}
    for index, device in enumerate(timeline.devices):
        members.setdefault(boards.get(device, "unknown board"), []).append(index)
    by_size = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = by_size[:MOST_BOARDS]
    if len(by_size) > 1:
        groups.insert(0, ("all devices", list(range(len(timeline.devices)))))
    means = [mean_round(timeline, indices) for _, indices in groups]
    names = [f"{label(board)} ({len(indices):,})" for board, indices in groups]
    bars = [
        go.Bar(
            x=[mean[state] for mean in means],
            y=list(range(len(groups))),
            orientation="h",
            name=WORDS[state],
            marker={"color": f"var(--{state})", "line_width": 0},
            texttemplate="%{x:.3g} s" if state != "absent" else "",
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[
                f"{name}: {WORDS[state]} {number(mean[state])} s of a mean round "
                f"({mean[state] / (sum(mean.values()) or 1):.0%})"
                for name, mean in zip(names, means, strict=True)
            ],
            hoverinfo="text",
        )
        for state in _STACK
        if any(mean[state] > 0 for mean in means)
    ]
    note = "Means over devices and rounds. Waiting for the model ends when training begins."
    if len(by_size) > MOST_BOARDS:
        note += f" The {MOST_BOARDS} commonest of {len(by_size)} boards."
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "range": [len(names) - 0.5, -0.5], "showgrid": False}
    layout = {
        "barmode": "stack",
        "bargap": 0.25,
        "height": 130 + 34 * len(groups),
        "xaxis_title_text": "seconds of a mean round, until the next one opens",
        "yaxis": ticks,
        "uniformtext": {"mode": "hide", "minsize": 10},
        "legend_traceorder": "normal",
    }
    return Plot(go.Figure(bars, layout), "Where the time of a round goes", note, wide=True)


def mean_round(timeline: FleetTimeline, members: Sequence[int]) -> dict[DeviceState, float]:
    """Seconds that these devices spend in each state, mean over them and over the rounds."""
    rounds = len(timeline.rounds)
    return {
        state: fmean(timeline.seconds[index].get(state, 0.0) for index in members) / rounds for state in DEVICE_STATES
    }
