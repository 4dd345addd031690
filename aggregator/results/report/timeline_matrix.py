"""A fleet of any size as a matrix of rounds by devices, the colour of a cell saying what came of it.

It is bounded, whatever the run: columns hold several rounds where there are many, rows are every so many devices, runs
of equal cells are one stroke, and the commonest outcome is the ground that the others are drawn on.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from hushfleet.aggregator.observe.timeline_marks import SERVERS
from hushfleet.aggregator.results.report.grids import NAME_WIDTH, short
from hushfleet.aggregator.results.report.svg import Canvas
from hushfleet.aggregator.results.report.timeline_axes import LEFT, RIGHT, WIDE, round_axis
from hushfleet.aggregator.results.report.timeline_style import OUTCOME_STATES, mark_tip
from hushfleet.aggregator.results.result import FleetTimeline

MOST_COLUMNS = 200
MOST_ROWS = 500
MOST_NAMED_ROWS = 40
_WORST_FIRST = "rxdl-.a"


class Matrix(NamedTuple):
    """The chart, and what was left out to draw it."""

    svg: str
    letters: str
    rounds_a_column: int
    devices_a_row: int


class MatrixRow(NamedTuple):
    """A device: its place in the timeline's lists, its board, and the share of the rounds that it was asked for that
    have its update."""

    index: int
    board: str
    share: float


def matrix_rows(timeline: FleetTimeline, boards: dict[str, str]) -> list[MatrixRow]:
    """The devices by board, those whose updates came in most often first."""
    rows = [
        MatrixRow(index, boards.get(device, ""), accepted_share(letters))
        for index, (device, letters) in enumerate(zip(timeline.devices, timeline.outcomes, strict=True))
    ]
    return sorted(rows, key=lambda row: (row.board, -row.share, row.index))


def accepted_share(letters: str) -> float:
    """Accepted updates as a share of all rounds in which the device was asked or away; 1 if there were none."""
    counted = len(letters) - letters.count(".")
    return letters.count("a") / counted if counted else 1.0


def matrix(timeline: FleetTimeline, boards: dict[str, str], *, label: str) -> Matrix:
    """Rounds in columns, devices in rows, what came of it as the cell's colour."""
    step = math.ceil(len(timeline.devices) / MOST_ROWS)
    rows = _every(step, matrix_rows(timeline, boards))
    binned = math.ceil(len(timeline.rounds) / MOST_COLUMNS)
    named = len(rows) <= MOST_NAMED_ROWS
    height = 15.0 if named else max(2.0, min(6.0, 480 / len(rows)))
    groups = [(board, list(group)) for board, group in groupby(rows, key=lambda row: row.board)]
    gap = 7.0 if len(groups) > 1 and not named else 0.0
    heads = 18.0 if len(groups) > 1 and named else 0.0
    crashes = [mark for mark in timeline.marks if mark.target in SERVERS]
    top = 18.0 if crashes else 6.0
    bottom = top + height * len(rows) + (gap + heads) * len(groups)
    canvas = Canvas(bottom + 40, label, WIDE)
    rounds = len(timeline.rounds)
    width = (WIDE - RIGHT - LEFT) / rounds
    for mark in crashes:
        place = max(0, bisect_right([row.opened_s for row in timeline.rounds], mark.start_s) - 1)
        canvas.mark(2, LEFT + (place + 0.5) * width, 8, "event", tip=mark_tip(mark), radius=5)
    cells = {row.index: _binned(timeline.outcomes[row.index], binned) for row in rows}
    ground = Counter("".join(cells.values())).most_common(1)[0][0]
    strokes: dict[str, list[str]] = {}
    y, label_free = top, 0.0
    for board, members in groups:
        words = f"{board or 'unknown board'} ({sum(boards.get(device, '') == board for device in timeline.devices):,})"
        if heads:
            canvas.text(4, y + 13, words, "t soft")
            y += heads
        elif not named and y + 12 >= label_free:
            _board_name(canvas, words, y + 12)
            label_free = y + 30
        canvas.rect(LEFT, y, width * rounds, height * len(members), f"sf s-{OUTCOME_STATES[ground][0]}")
        for row in members:
            _strokes(strokes, cells[row.index], ground, y + height / 2, binned, rounds)
            y += height
        y += gap
    thick = height - (2 if named else 0)
    # in units of a round, so that the many numbers are short
    canvas.parts.append(f'<g transform="translate({LEFT:g} 0) scale({width:.5f} 1)">')
    for letter, parts in strokes.items():
        # what is away is a hole in the ground: it has the colour of the card
        css = "hole" if letter == "-" else f"ss s-{OUTCOME_STATES[letter][0]}"
        canvas.parts.append(f'<path d="{"".join(parts)}" class="{css}" stroke-width="{thick:.1f}"/>')
    canvas.parts.append("</g>")
    _hover(canvas, timeline, groups, top, height, gap, heads, named=named)
    round_axis(canvas, timeline, bottom)
    return Matrix(canvas.svg(), "".join(sorted(set("".join(cells.values())))), binned, step)


def _every(step: int, rows: list[MatrixRow]) -> list[MatrixRow]:
    """One in `step` of each board's devices, and of a small board the middle one."""
    kept = []
    for _, group in groupby(rows, key=lambda row: row.board):
        members = list(group)
        kept += members[step // 2 :: step] or [members[len(members) // 2]]
    return kept


def _binned(letters: str, binned: int) -> str:
    if binned == 1:
        return letters
    return "".join(_commonest(letters[n : n + binned]) for n in range(0, len(letters), binned))


def _commonest(letters: str) -> str:
    """What happened most often; of two that happened as often, the worse."""
    return max(sorted(set(letters), key=_WORST_FIRST.index), key=letters.count)


def _strokes(strokes: dict[str, list[str]], letters: str, ground: str, y: float, binned: int, rounds: int) -> None:
    """A stroke for each run of cells that is not of the ground's colour; the last column may hold fewer rounds."""
    at = 0
    for letter, run in groupby(letters):
        end = min(rounds, at + len(list(run)) * binned)
        if letter != ground:
            strokes.setdefault(letter, []).append(f"M{at} {round(y, 1):g}h{end - at}")
        at = end


def _board_name(canvas: Canvas, words: str, y: float) -> None:
    """In the margin, in two lines if need be."""
    name, _, count = words.rpartition(" ")
    if len(words) <= 18:
        canvas.text(NAME_WIDTH, y, words, "t small", anchor="end")
        return
    cut = name if len(name) <= 21 else f"{name[:20]}\N{HORIZONTAL ELLIPSIS}"
    canvas.text(NAME_WIDTH, y, cut, "t small", anchor="end")
    canvas.text(NAME_WIDTH, y + 13, count, "t small", anchor="end")


def _hover(
    canvas: Canvas,
    timeline: FleetTimeline,
    groups: Sequence[tuple[str, list[MatrixRow]]],
    top: float,
    height: float,
    gap: float,
    heads: float,
    *,
    named: bool,
) -> None:
    """A tip for each row over its cells, and its name where there is room."""
    y, width = top, WIDE - RIGHT - LEFT
    for _, members in groups:
        y += heads
        for row in members:
            device = timeline.devices[row.index]
            if named:
                canvas.text(NAME_WIDTH, y + height / 2 + 4.3, short(device), anchor="end")
            canvas.rect(LEFT, y, width, height, "hit", tip=f"{device}: {_counted(timeline.outcomes[row.index])}")
            y += height
        y += gap


def _counted(letters: str) -> str:
    counts = Counter(letters)
    return ", ".join(f"{counts[letter]} {OUTCOME_STATES[letter][1]}" for letter in OUTCOME_STATES if counts[letter])
