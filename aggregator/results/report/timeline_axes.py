"""The axes that the timeline's charts share, so that they stand below each other round by round."""

from __future__ import annotations

from typing import NamedTuple

from hushfleet.aggregator.results.report.grids import NAME_WIDTH
from hushfleet.aggregator.results.report.svg import Canvas, Scale, whole_ticks
from hushfleet.aggregator.results.result import FleetTimeline

WIDE = 960.0
LEFT, RIGHT = NAME_WIDTH + 8, 10.0
MIDDLE = (LEFT + WIDE - RIGHT) / 2


class Unit(NamedTuple):
    """In what a time axis counts."""

    seconds: float
    name: str


def time_unit(seconds: float) -> Unit:
    """Seconds, minutes or hours, so that a run's length stays a small number."""
    if seconds > 3 * 3600:
        return Unit(3600.0, "hours")
    return Unit(60.0, "minutes") if seconds > 600 else Unit(1.0, "seconds")


def time_axis(canvas: Canvas, x: Scale, bottom: float) -> None:
    """Below `bottom`: the time since the run's start."""
    unit = time_unit(x.high - x.low)
    canvas.line(LEFT, bottom, WIDE - RIGHT, bottom, "axis")
    for tick in Scale(x.low / unit.seconds, x.high / unit.seconds, x.start, x.stop).ticks(10):
        at = x(tick * unit.seconds)
        canvas.line(at, bottom, at, bottom + 4, "axis")
        canvas.text(at, bottom + 17, f"{round(tick, 6):,g}", anchor="middle")
    canvas.text(MIDDLE, bottom + 34, f"{unit.name} since the run's start", "t soft", anchor="middle")


def round_axis(canvas: Canvas, timeline: FleetTimeline, bottom: float) -> None:
    """Below `bottom`: the rounds, all of the same width."""
    numbers = [row.round for row in timeline.rounds]
    shown, width = set(whole_ticks(numbers[0], numbers[-1], 21)), (WIDE - RIGHT - LEFT) / len(numbers)
    for n, round_number in enumerate(numbers):
        if round_number in shown:
            canvas.text(LEFT + (n + 0.5) * width, bottom + 15, f"{round_number:,}", anchor="middle")
    canvas.text(MIDDLE, bottom + 33, "round", "t soft", anchor="middle")
