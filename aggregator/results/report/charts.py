"""The report's charts over rounds or over a numeric axis: lines, bands and bars.

Every function returns SVG text. A line joins its measured values, since a run may measure only every few
rounds, and ends where a value is infinite. Colours are the style sheet's
series 1 to 4, and each series has its own mark besides, for eyes that do not tell the colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from hushfleet.aggregator.results.report.svg import WIDTH, Canvas, Scale, span, whole_ticks
from hushfleet.aggregator.results.report.verdict import tick_text

Values = Sequence[float | None]
LEFT, RIGHT, TOP, BOTTOM = 54.0, 10.0, 12.0, 40.0
MOST_MARKS = 24
MOST_LINES = 12


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its values (one per x), and how it is drawn.

    :param color: 1 to 4, the style sheet's series colours.
    :param dashed: for what is a reference and no course of the run.
    :param faint: for one of many lines of the same kind.
    :param band: lowest and highest value per x, drawn as an area under the line.
    """

    name: str
    values: Values
    color: int
    dashed: bool = False
    faint: bool = False
    band: tuple[Values, Values] | None = None


def lines(
    xs: Sequence[float],
    series: Sequence[Series],
    *,
    label: str,
    y_text: Callable[[float], str] = tick_text,
    x_title: str = "round",
    x_log: bool = False,
    y_log: bool = False,
    floor: float | None = None,
    ceiling: float | None = None,
    guide: float | None = None,
    height: float = 270,
) -> str:
    """Lines over rounds (whole x) or over a numeric axis (`x_log`); `guide` is an x to be marked."""
    canvas = Canvas(height, label)
    x = _x_scale(xs, log=x_log)
    y = _y_scale(series, height, log=y_log, floor=floor, ceiling=ceiling)
    _y_axis(canvas, y, y_text)
    _x_axis(canvas, x, xs, height, x_title)
    if guide is not None and x.low < guide < x.high:
        canvas.line(x(guide), TOP, x(guide), height - BOTTOM, "axis guide")
    for one in series:
        if one.band:
            _band(canvas, x, y, xs, one)
    for one in series:
        _line(canvas, x, y, xs, one, y_text, x_title)
    return canvas.svg()


def bars(
    xs: Sequence[float],
    values: Values,
    references: Sequence[Series],
    *,
    label: str,
    name: str,
    y_text: Callable[[float], str],
    height: float = 270,
) -> str:
    """Bars from zero, one per round, and references as lines over them."""
    canvas = Canvas(height, label)
    x = _x_scale(xs, log=False, pad=0.6)
    y = _y_scale([Series(name, values, 1), *references], height, log=False, floor=0.0, ceiling=None)
    _y_axis(canvas, y, y_text)
    _x_axis(canvas, x, xs, height, "round")
    width = min(26.0, 0.66 * (x(xs[0] + 1) - x(xs[0])))
    for at, value in zip(xs, values, strict=True):
        if _drawable(value):
            top = y(value)
            canvas.rect(x(at) - width / 2, top, width, y(0) - top, "f1", tip=f"round {at:g}: {name} {y_text(value)}")
    for reference in references:
        _line(canvas, x, y, xs, reference, y_text, "round")
    return canvas.svg()


def per_device(grid: list[list[float | None]], name: str, color: int) -> list[Series]:
    """A thin line per device for small fleets; the range and the median for large ones."""
    if not grid:
        return []
    if len(grid[0]) <= MOST_LINES:
        return [Series(name, [row[n] for row in grid], color, faint=True) for n in range(len(grid[0]))]
    finite = [[v for v in row if v is not None and math.isfinite(v)] for row in grid]
    low = [min(row) if row else None for row in finite]
    high = [max(row) if row else None for row in finite]
    middle = [median(row) if row else None for row in finite]
    return [Series(f"{name}: median and range", middle, color, band=(low, high))]


def legend_of(series: Sequence[Series]) -> list[Series]:
    """One entry for each name."""
    return list({one.name: one for one in series}.values())


def needs_log(values: Sequence[float | None]) -> bool:
    """Whether positive values spread over more than a factor of thirty."""
    positive = [value for value in values if _drawable(value) and value > 0]
    return bool(positive) and max(positive) > 30 * min(positive)


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _x_scale(xs: Sequence[float], *, log: bool, pad: float = 0.25) -> Scale:
    low, high = min(xs), max(xs)
    if log:
        low, high = low * 0.85, high * 1.18
    else:
        low, high = low - pad, high + pad
    return Scale(low, high, LEFT, WIDTH - RIGHT, log)


def _y_scale(
    series: Sequence[Series], height: float, *, log: bool, floor: float | None, ceiling: float | None
) -> Scale:
    values = [v for one in series for v in one.values if _drawable(v)]
    values += [v for one in series if one.band for side in one.band for v in side if _drawable(v)]
    if log:
        positive = [v for v in values if v > 0]
        return Scale(min(positive) * 0.8, max(positive) * 1.25, height - BOTTOM, TOP, log=True)
    low, high = span(values)
    if floor is not None:
        low = floor if floor == 0 else max(low, floor)
    if ceiling is not None:
        high = min(high, ceiling)
    return Scale(low, high, height - BOTTOM, TOP)


def _y_axis(canvas: Canvas, y: Scale, y_text: Callable[[float], str]) -> None:
    for tick in y.ticks():
        canvas.line(LEFT, y(tick), WIDTH - RIGHT, y(tick), "grid")
        canvas.text(LEFT - 7, y(tick) + 4.3, y_text(tick), anchor="end")


def _x_axis(canvas: Canvas, x: Scale, xs: Sequence[float], height: float, title: str) -> None:
    bottom = height - BOTTOM
    canvas.line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis")
    ticks = x.ticks(6) if x.log else whole_ticks(int(min(xs)), int(max(xs)), 11)
    for tick in ticks:
        canvas.text(x(tick), bottom + 16, f"{tick:,g}", anchor="middle")
    canvas.text((LEFT + WIDTH - RIGHT) / 2, bottom + 33, title, "t soft", anchor="middle")


def _runs(values: Values, *, positive: bool) -> list[list[int]]:
    """Indices that one line joins: it passes over what was not measured and ends at what cannot be drawn."""
    runs: list[list[int]] = [[]]
    for index, value in enumerate(values):
        if _drawable(value) and (not positive or value > 0):
            runs[-1].append(index)
        elif value is not None and runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _line(
    canvas: Canvas,
    x: Scale,
    y: Scale,
    xs: Sequence[float],
    series: Series,
    y_text: Callable[[float], str],
    x_title: str,
) -> None:
    css = f"l{series.color}" + (" dash" if series.dashed else "") + (" faint" if series.faint else "")
    for run in _runs(series.values, positive=y.log):
        points = [(x(xs[n]), y(series.values[n])) for n in run]
        if series.dashed and len(points) == 1:
            points = [(x.start, points[0][1]), (x.stop, points[0][1])]
        if len(points) > 1:
            canvas.path(points, f"line {css}")
        if series.dashed or series.faint or (len(xs) > MOST_MARKS and len(points) > 1):
            continue
        for n, (px, py) in zip(run, points, strict=True):
            tip = f"{series.name}, {x_title} {xs[n]:,g}: {y_text(series.values[n])}"
            canvas.mark(series.color - 1, px, py, f"f{series.color}", tip=tip)


def _band(canvas: Canvas, x: Scale, y: Scale, xs: Sequence[float], series: Series) -> None:
    low, high = series.band or ((), ())
    both = [a if b is not None else None for a, b in zip(low, high, strict=True)]
    for run in _runs(both, positive=y.log):
        there = [(x(xs[n]), y(high[n])) for n in run]
        back = [(x(xs[n]), y(low[n])) for n in reversed(run)]
        canvas.path(there + back, f"band f{series.color}", closed=True)
