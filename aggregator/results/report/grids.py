"""The report's charts over devices and layers: dumbbells, sorted gains, heat maps and bubbles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hushfleet.aggregator.results.report.svg import WIDTH, Canvas, Scale, span
from hushfleet.aggregator.results.report.verdict import percent, points, tick_text

Values = Sequence[float | None]
NAME_CHARS = 15
NAME_WIDTH = 112.0


def dumbbells(names: Sequence[str], alone: Values, federated: Values, *, label: str, tests: str) -> str:
    """Per device, what it reaches alone (hollow) and federated (filled), joined by a bar."""
    row = 24.0
    height = row * len(names) + 46
    canvas = Canvas(height, label)
    known = [value for value in (*alone, *federated) if value is not None]
    low, high = span(known, margin=0.08)
    x = Scale(max(0.0, low), min(1.0, high), NAME_WIDTH + 8, WIDTH - 14)
    bottom = row * len(names) + 8
    for tick in x.ticks(5):
        canvas.line(x(tick), 4, x(tick), bottom, "grid")
        canvas.text(x(tick), bottom + 16, f"{100 * tick:.3g}", anchor="middle")
    canvas.text((x.start + x.stop) / 2, bottom + 33, f"accuracy on {tests}, %", "t soft", anchor="middle")
    for n, name in enumerate(names):
        y = 8 + row * (n + 0.5)
        canvas.text(NAME_WIDTH, y + 4.3, short(name), anchor="end")
        before, after = alone[n], federated[n]
        if before is not None and after is not None:
            better = after >= before
            canvas.line(x(before), y, x(after), y, "joint l1" if better else "joint l2")
        if before is not None:
            canvas.circle(x(before), y, 4.6, "hollow", tip=f"{name}, alone: {percent(before)}")
        if after is not None:
            worse = before is not None and after < before
            css = "f2" if worse else "f1"
            canvas.mark(1 if worse else 0, x(after), y, css, radius=5, tip=f"{name}, federated: {percent(after)}")
    return canvas.svg()


def sorted_gains(gains: Sequence[float], *, label: str) -> str:
    """One thin bar a device, from the largest loss to the largest gain: for fleets too large for names."""
    height, left, bottom = 270.0, 54.0, 232.0
    canvas = Canvas(height, label)
    ordered = sorted(gains)
    low, high = span([*ordered, 0.0])
    y = Scale(low, high, bottom, 12)
    width = (WIDTH - 10 - left) / len(ordered)
    for tick in y.ticks():
        canvas.line(left, y(tick), WIDTH - 10, y(tick), "grid")
        canvas.text(left - 7, y(tick) + 4.3, tick_text(100 * tick), anchor="end")
    for n, gain in enumerate(ordered):
        top, foot = sorted((y(gain), y(0)))
        css = "f1" if gain >= 0 else "f2"
        canvas.rect(left + n * width, top, max(0.5, width * 0.86), foot - top, css, tip=points(gain))
    canvas.line(left, y(0), WIDTH - 10, y(0), "axis")
    canvas.text((left + WIDTH) / 2, height - 8, f"{len(ordered)} devices, sorted", "t soft", anchor="middle")
    return canvas.svg()


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    grid: Sequence[Values],
    *,
    label: str,
    text: Callable[[float], str],
    column_title: str,
    highest: float | None = None,
) -> str:
    """A cell per row and column, the darker the larger; values are printed where they fit."""
    named = len(rows) <= 40
    row = 24.0 if len(rows) <= 16 else (15.0 if named else max(1.2, 420 / len(rows)))
    left = NAME_WIDTH + 8 if named else 54.0
    bottom = row * len(rows) + 4
    canvas = Canvas(bottom + 42, label)
    width = (WIDTH - 8 - left) / max(1, len(columns))
    top_value = highest or max((v for line in grid for v in line if v is not None), default=1.0) or 1.0
    for n, name in enumerate(rows):
        y = 4 + n * row
        if named:
            canvas.text(left - 8, y + row / 2 + 4.3, short(name), anchor="end")
        for m, value in enumerate(grid[n]):
            if value is None:
                continue
            shade = min(1.0, max(0.0, value / top_value))
            tip = f"{name}, {column_title} {columns[m]}: {text(value)}"
            gap = 1.5 if row > 6 else 0.0
            canvas.rect(
                left + m * width,
                y,
                width - min(gap, width / 4),
                row - gap,
                "f1",
                tip=tip,
                opacity=0.06 + 0.94 * shade,
            )
            if width >= 31 and row >= 20:
                css = "t small onfill" if shade > 0.55 else "t small"
                canvas.text(left + (m + 0.5) * width, y + row / 2 + 3.8, text(value), css, anchor="middle")
    if not named:
        canvas.text(left - 8, 16, "first", "t soft", anchor="end")
        canvas.text(left - 8, bottom - 3, "last", "t soft", anchor="end")
    _column_names(canvas, columns, left, width, bottom + 15)
    canvas.text((left + WIDTH) / 2, bottom + 34, column_title, "t soft", anchor="middle")
    return canvas.svg()


def bubbles(rows: Sequence[str], columns: Sequence[str], counts: Sequence[Sequence[int]], *, label: str) -> str:
    """A disc per device and class whose area is the number of images."""
    row = 24.0 if len(rows) <= 24 else 15.0
    left = NAME_WIDTH + 8
    bottom = row * len(rows) + 4
    canvas = Canvas(bottom + 42, label)
    width = (WIDTH - 8 - left) / max(1, len(columns))
    most = max((count for line in counts for count in line), default=1) or 1
    largest = min(row, width) * 0.48
    for n, name in enumerate(rows):
        y = 4 + (n + 0.5) * row
        canvas.line(left, y, WIDTH - 8, y, "grid")
        canvas.text(left - 8, y + 4.3, short(name), anchor="end")
        for m, count in enumerate(counts[n]):
            if count:
                radius = max(0.8, largest * math.sqrt(count / most))
                tip = f"{name}, class {columns[m]}: {count} images"
                canvas.circle(left + (m + 0.5) * width, y, radius, "f1", tip=tip)
    _column_names(canvas, columns, left, width, bottom + 15)
    canvas.text((left + WIDTH) / 2, bottom + 34, "class", "t soft", anchor="middle")
    return canvas.svg()


def short(name: str) -> str:
    """A name that fits the margin; the full one is in the tip and the table."""
    return name if len(name) <= NAME_CHARS else f"{name[:6]}\N{HORIZONTAL ELLIPSIS}{name[-8:]}"


def _column_names(canvas: Canvas, columns: Sequence[str], left: float, width: float, y: float) -> None:
    longest = max((len(name) for name in columns), default=1)
    numbers = longest * 7.5 > width and not all(name.isdigit() for name in columns)
    names = [str(n) for n in range(len(columns))] if numbers else list(columns)
    room = max((len(name) for name in names), default=1) * 8.5
    every = next((step for step in (1, 2, 5, 10, 20, 50, 100) if step * width >= room), 200)
    for n, name in enumerate(names):
        if n % every == 0:
            canvas.text(left + (n + 0.5) * width, y, name, anchor="middle")
