"""The report's section on the fleet over time: who was there, who worked, who came late, and where the time went.

A small fleet is a Gantt chart, of the whole run or, in a long one, of the rounds around the worst; a large fleet, and
a long run, is a matrix of rounds by devices. What a device does between two events of the log nobody knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from hushfleet.aggregator.observe.timeline_marks import SERVERS
from hushfleet.aggregator.results.report.markup import Section
from hushfleet.aggregator.results.report.timeline_gantt import Row, gantt, rows_by_board
from hushfleet.aggregator.results.report.timeline_matrix import matrix
from hushfleet.aggregator.results.report.timeline_stacks import (
    stacked_states,
    states_over_rounds,
    states_over_time,
    where_time_goes,
)
from hushfleet.aggregator.results.report.timeline_style import OUTCOME_STATES, WORDS, state_legend, wide_figure
from hushfleet.aggregator.results.report.verdict import number
from hushfleet.aggregator.results.result import DEVICE_STATES, DeviceState, FleetTimeline, Result

MOST_GANTT_DEVICES = 40
MOST_GANTT_ROUNDS = 24
ZOOM_ROUNDS = 8
MOST_ROUNDS_OVER_TIME = 12
MOST_BOARDS = 12
_SMALL_FLEET = 20


def timeline_section(result: Result) -> Section | None:
    """None where the result has no timeline, or one in which nothing is to be seen."""
    timeline = result.details.fleet_timeline
    if timeline is None or not (timeline.timed or set("".join(timeline.outcomes)) - {"a"}):
        return None
    devices, rounds = len(timeline.devices), len(timeline.rounds)
    drawn_whole = bool(timeline.spans) and devices <= MOST_GANTT_DEVICES and rounds <= MOST_GANTT_ROUNDS
    parts = []
    if drawn_whole:
        parts.append(_gantt(timeline, result.boards, first=0, last=rounds - 1))
    else:
        parts.append(_matrix(timeline, result.boards))
        if timeline.timed:
            parts.append(_stacked(timeline))
        if timeline.spans and devices <= MOST_GANTT_DEVICES:
            worst = worst_round(timeline)
            first = max(0, min(worst - ZOOM_ROUNDS // 2, rounds - ZOOM_ROUNDS))
            parts.append(_gantt(timeline, result.boards, first=first, last=min(rounds, first + ZOOM_ROUNDS) - 1))
    if timeline.timed:
        parts.append(_time_by_board(timeline, result.boards))
    return Section("timeline", "The fleet over time", in_words(timeline), "".join(parts))


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
    told = [
        f"of {asked:,} updates that were asked for, {_listed(troubles)}"
        if troubles
        else f"all {asked:,} updates that were asked for came in time"
    ]
    away = sum(is_long_away(letters) for letters in timeline.outcomes)
    if away:
        told.append(f"{away:,} {'device was' if away == 1 else 'devices were'} away for more than a round")
    first = _pace(timeline)
    return f"{first}{_capital('; '.join(told))}."


def worst_round(timeline: FleetTimeline) -> int:
    """The place of the round that went worst: fewest of those asked in time, then the longest."""

    def badness(place: int) -> tuple[int, float]:
        letters = [device[place] for device in timeline.outcomes]
        row = timeline.rounds[place]
        return sum(letter in "ldrx" for letter in letters), row.closed_s - row.opened_s

    return max(range(len(timeline.rounds)), key=badness)


def is_long_away(letters: str) -> bool:
    """Whether a device that had been there was then away from two rounds in a row."""
    since_first = letters.lstrip("-")
    return any(one in "x-" and other == "-" for one, other in pairwise(since_first))


def mean_round(timeline: FleetTimeline, members: Sequence[int]) -> dict[DeviceState, float]:
    """Seconds that these devices spend in each state, mean over them and over the rounds."""
    rounds = len(timeline.rounds)
    return {
        state: fmean(timeline.seconds[index].get(state, 0.0) for index in members) / rounds for state in DEVICE_STATES
    }


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


def _gantt(timeline: FleetTimeline, boards: dict[str, str], *, first: int, last: int) -> str:
    rows: list[Row] = rows_by_board(timeline, boards)
    rounds = timeline.rounds
    start_s = 0.0 if first == 0 else rounds[first].opened_s
    end_s = timeline.end_s if last == len(rounds) - 1 else rounds[last + 1].opened_s
    is_whole = first == 0 and last == len(rounds) - 1
    label = "what each device did over the run"
    chart, merged = gantt(timeline, rows, start_s=start_s, end_s=end_s, label=label)
    seen = {state for spans in timeline.spans for start, end, state in spans if start < end_s and end > start_s}
    notes = ["Full lines: a round opens; dotted ones: it closes."]
    if any("l" in letters[first : last + 1] for letters in timeline.outcomes):
        seen.add("late")
        notes.append("Underlined in the colour of late: the round closed without this device.")
    if any(mark.target in set(timeline.devices) for mark in timeline.marks):
        notes.append("Triangles and their lines: what was done to a device, and until when; hover to read it.")
    if merged:
        notes.append(f"{merged:,} spans too short to be drawn are part of their neighbours.")
    title = "What each device did"
    if not is_whole:
        title += f" in the rounds {rounds[first].round} to {rounds[last].round}, around the worst of the run"
    return wide_figure(title, chart, _legend(seen), note=" ".join(notes))


def _matrix(timeline: FleetTimeline, boards: dict[str, str]) -> str:
    drawn = matrix(timeline, boards, label="what came of each round for each device")
    notes = ["Devices are grouped by board, those whose updates came in most often above."]
    if any(mark.target in SERVERS for mark in timeline.marks):
        notes.append("Triangles above: the broker or the aggregator was away in this round; hover to read it.")
    if drawn.rounds_a_column > 1:
        notes.append(f"A cell is {drawn.rounds_a_column} rounds, with the colour of what happened most often in them.")
    if drawn.devices_a_row > 1:
        notes.append(f"Of {len(timeline.devices):,} devices in this order, one in {drawn.devices_a_row} is drawn.")
    legend = state_legend([OUTCOME_STATES[letter] for letter in OUTCOME_STATES if letter in drawn.letters])
    return wide_figure("What came of each round, device by device", drawn.svg, legend, note=" ".join(notes))


def _stacked(timeline: FleetTimeline) -> str:
    label, legend = "devices in each state", _legend(stacked_states(timeline))
    if timeline.spans and len(timeline.rounds) <= MOST_ROUNDS_OVER_TIME:
        chart = states_over_time(timeline, label=label)
        return wide_figure("How many devices were in which state", chart, legend, note="Dotted lines: a round opens.")
    chart, binned = states_over_rounds(timeline, label=label)
    many = f" A step is {binned} rounds." if binned > 1 else ""
    note = f"Mean number of devices from a round's opening to the next one's.{many}"
    return wide_figure("How many devices were in which state", chart, legend, note=note)


def _time_by_board(timeline: FleetTimeline, boards: dict[str, str]) -> str:
    members: dict[str, list[int]] = {}
    for index, device in enumerate(timeline.devices):
        members.setdefault(boards.get(device, "unknown board"), []).append(index)
    by_size = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    groups = [
        (_with_count(board, len(indices)), mean_round(timeline, indices)) for board, indices in by_size[:MOST_BOARDS]
    ]
    if len(by_size) > 1:
        everybody = range(len(timeline.devices))
        groups.insert(0, (_with_count("all devices", len(everybody)), mean_round(timeline, everybody)))
    chart = where_time_goes(groups, label="where the time of a mean round goes, by board")
    shown = {state for _, seconds in groups for state, lasted in seconds.items() if lasted > 0}
    note = "Means over devices and rounds. Waiting for the model ends when training begins."
    if len(by_size) > MOST_BOARDS:
        note += f" The {MOST_BOARDS} commonest of {len(by_size)} boards."
    return wide_figure("Where the time of a round goes", chart, _legend(shown), note=note)


def _legend(states: Sequence[DeviceState] | set[DeviceState]) -> str:
    return state_legend([(state, WORDS[state]) for state in WORDS if state in states])


def _with_count(board: str, devices: int) -> str:
    name = board if len(board) <= 24 else f"{board[:23]}\N{HORIZONTAL ELLIPSIS}"
    return f"{name} ({devices:,})"


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
