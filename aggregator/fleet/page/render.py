"""Renders a fleet as HTML: the whole page once, and its parts again when they change. Jinja escapes every text."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hushfleet.aggregator.fleet import descriptions
from hushfleet.aggregator.fleet.view import FleetView, RunView
from hushfleet.aggregator.fleet.watching import advice
from hushfleet.aggregator.fleet.watching.columns import TABLE
from hushfleet.aggregator.report.readable import epsilon_number, number, percent, size
from hushfleet.aggregator.storage.board import ACTIVITIES, Board

PARTS = ("summary", "attention", "round", "releases", "boards", "answers", "figures")
TEMPLATES = Path(__file__).parent / "templates"
LOOK = Path(__file__).parents[2] / "report" / "templates" / "page.css"
MOST_BOARDS = 500
"""At most so many boards are listed, because the list is sent again whenever one of them changes."""
_COLUMNS = [column for column in TABLE if column.name != "place"]  # it stands below the board's name
_LEFT, _WIDTH, _TOP, _HEIGHT = 46.0, 308.0, 8.0, 108.0


class Chart(NamedTuple):
    """The course of a run: `points` of an SVG polyline, or single `dots`; `lines`: heights and what they mean."""

    title: str
    points: str
    dots: list[tuple[float, float]]
    lines: list[tuple[float, str]]


def page(view: FleetView, parts: Mapping[str, str]) -> str:
    """Returns the whole page.

    :param parts: as `render_parts` returns them.
    """
    escaped = {name: Markup(html) for name, html in parts.items()}
    return _templates().get_template("page.html").render(view=view, parts=escaped)


def render_parts(view: FleetView) -> dict[str, str]:
    """Makes the HTML of each part. It depends on the view alone, so a part that has not changed need not be sent."""
    chart = None if view.run is None else _chart(view.run)
    variables = {
        "descriptions": descriptions, "advice": advice, "columns": _COLUMNS, "chart": chart, "inf": math.inf,
        "listed": _listed(view.boards),
    }  # fmt: skip
    module = _templates().get_template("parts.html").make_module(variables)
    return {name: str(getattr(module, name)(view)) for name in PARTS}


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"epsilon_number": epsilon_number, "number": number, "percent": percent, "size": size}
    environment.filters |= {"iso": _iso, "states": _states}
    return environment


def _listed(boards: Sequence[Board]) -> Sequence[Board]:
    """Returns all boards of a small fleet in their order; of a large one first urgent boards, then others."""
    if len(boards) <= MOST_BOARDS:
        return boards
    return sorted(boards, key=lambda board: (not board.is_urgent, not board.problems))[:MOST_BOARDS]


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _states(boards: Sequence[Board]) -> list[tuple[str, int]]:
    counted = Counter(board.state for board in boards)
    return [(state, counted[state]) for state in ACTIVITIES if counted[state]]


def _chart(run: RunView) -> Chart | None:
    """Draws the accuracy by round if it is known, or else the updates in each sum."""
    known = [(point.round, point.accuracy) for point in run.course if point.accuracy is not None]
    if known:
        title, scale, lines = "accuracy of the global model, by round", 1.0, [0.0, 0.5, 1.0]
        values = known
        labels = [f"{100 * value:.0f} %" for value in lines]
    else:
        values = [(point.round, float(point.participants)) for point in run.course]
        scale = max((value for _, value in values), default=0.0) or 1.0
        title, lines = "updates in the sum, by round", [0.0, scale]
        labels = [f"{value:.0f}" for value in lines]
    if not values:
        return None
    last = max(run.rounds, values[-1][0], 2)
    placed = [(_LEFT + _WIDTH * (n - 1) / (last - 1), _height(value / scale)) for n, value in values]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    heights = [_height(value / scale) for value in lines]
    return Chart(title, points, placed if len(placed) <= 50 else [], list(zip(heights, labels, strict=True)))


def _height(share: float) -> float:
    return round(_TOP + _HEIGHT * (1 - share), 1)
