"""Dots of a table: the paper's and ours on one line for each method, grouped by column."""

from __future__ import annotations

from hushfleet.aggregator.results.report.svg import Canvas, Scale, span
from hushfleet.simulator.studies.reproduce.table import Block, Square

_LINE, _GAP, _TOP, _BOTTOM = 19.0, 30.0, 6.0, 24.0
_WIDTH, _LEFT, _RIGHT = 560.0, 168.0, 14.0
_RADIUS = 4.2


def dots(block: Block) -> str:
    """SVG: hollow is the paper, filled is ours with its spread; empty where there is nothing to draw."""
    values = [
        value
        for square in block.squares.values()
        for value in (square.paper, *square.values)
        if value is not None
    ]
    if not any(square.ours is not None for square in block.squares.values()):
        return ""
    lines = {
        column.id: [row for row in block.rows if _has_numbers(block.squares.get((row.id, column.id)))]
        for column in block.columns
    }
    groups = [column for column in block.columns if lines[column.id]]
    height = _TOP + sum(_GAP + _LINE * len(lines[column.id]) for column in groups) + _BOTTOM
    canvas = Canvas(height, f"{block.title}: accuracy in percent, the paper and ours", _WIDTH)
    low, high = span(values, margin=0.08)
    scale = Scale(max(0.0, low), min(100.0, high), _LEFT, _WIDTH - _RIGHT)
    for tick in scale.ticks(6):
        canvas.line(scale(tick), _TOP + _GAP * 0.6, scale(tick), height - _BOTTOM, "grid")
        canvas.text(scale(tick), height - 7, f"{tick:g} %", "t soft small", anchor="middle")
    y = _TOP
    for column in groups:
        canvas.text(0, y + _GAP * 0.62, column.title, "t")
        y += _GAP
        for row in lines[column.id]:
            square = block.squares[row.id, column.id]
            canvas.text(_LEFT - 12, y + 4, row.title, "t soft", anchor="end")
            _pair(canvas, scale, square, y)
            y += _LINE
    return canvas.svg()


def _pair(canvas: Canvas, scale: Scale, square: Square, y: float) -> None:
    if square.paper is not None and square.ours is not None:
        canvas.line(scale(square.paper), y, scale(square.ours), y, "axis guide")
    if len(square.values) > 1:
        canvas.line(scale(min(square.values)), y, scale(max(square.values)), y, "joint l1")
    if square.paper is not None:
        canvas.circle(scale(square.paper), y, _RADIUS, "hollow", tip=f"paper {square.paper:.2f} %")
    if square.ours is not None:
        canvas.circle(scale(square.ours), y, _RADIUS, "f1", tip=f"ours {square.ours:.2f} %")


def _has_numbers(square: Square | None) -> bool:
    return square is not None and (square.paper is not None or square.ours is not None)
