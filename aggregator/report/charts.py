"""Draws charts for several sections. Colours come from the style sheet; each series also has its own symbol, for
readers who cannot distinguish the colours.

A line connects its measured values, because a run may measure only every few rounds. It ends where a value is infinite.
A series is a trace of Plotly as plain data: its own Python classes check each value, which takes seconds a report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hushfleet.aggregator.report.page import (
    BLUE,
    CARD,
    ORANGE,
    SERIES,
    Plot,
    SectionPart,
    label,
    missing,
)
from hushfleet.aggregator.report.readable import points

Values = Sequence[float | None]
Trace = dict[str, Any]
MOST_SYMBOLS = 24
MOST_LINES = 12
MOST_NAMES = 40
MOST_BARS = 1000
MOST_ROWS = 400
SYMBOLS = ("circle", "square", "triangle-up", "diamond")
PERCENT: dict[str, Any] = {"yaxis": {"tickformat": "~%", "hoverformat": ".1%"}}


def line(name: str, xs: Sequence[float], values: Values, color: int, *, dashed: bool = False) -> Trace:
    """Returns one series; a dashed line is a reference and not a course of the run.

    :param color: an index in `SERIES` and in `SYMBOLS`.
    """
    known = [(x, y if math.isfinite(y) else None) for x, y in zip(xs, values, strict=True) if y is not None]
    plain = len(known) > 1 and (dashed or len(known) > MOST_SYMBOLS)
    return {
        "type": "scatter",
        "x": [x for x, _ in known],
        "y": [y for _, y in known],
        "name": name,
        "mode": "lines" if plain else "lines+markers",
        "marker": {"symbol": SYMBOLS[color], "size": 7},
        "line": {"color": SERIES[color], "width": 1.8 if dashed else 2.2, "dash": "dash" if dashed else "solid"},
    }


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """Returns a logarithmic axis of positive values, with round numbers at its ticks."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1) if values else ()
    ticks = [factor * 10.0**power for power in powers for factor in ((1, 2, 5) if len(powers) <= 4 else (1,))]
    return {"type": "log", "tickvals": ticks, "tickformat": ",~g"}


def per_device(
    devices: Sequence[str],
    xs: Sequence[int],
    grid: Sequence[Values],
    color: int,
    name: str = "a device",
    dash: str = "solid",
) -> list[Trace]:
    """Returns a thin line per device for small fleets; the range and the median for large ones.

    :param grid: `[round][device]`.
    """

    def drawn(title: str, values: Values, *, width: float = 2.2, **look: Any) -> Trace:
        trace = line(title, xs, values, color)
        shape = {**trace["line"], "dash": dash, "width": width}
        return {**trace, "mode": "lines", "legendgroup": name, "line": shape, **look}

    if len(devices) <= MOST_LINES:
        thin: dict[str, Any] = {"width": 1.4, "opacity": 0.6, "showlegend": False}
        lines = [drawn(label(device), [row[n] for row in grid], **thin) for n, device in enumerate(devices) if grid]
        entry = {**drawn(name, [None] * len(xs), width=1.4), "x": [None], "y": [None], "showlegend": True}
        return [entry, *lines] if lines else []
    finite = [[value for value in row if value is not None and math.isfinite(value)] for row in grid]
    low, high, middle = ([of(row) if row else None for row in finite] for of in (min, max, median))
    return [
        drawn(f"{name}: lowest", low, width=0, showlegend=False),
        drawn(f"{name}: highest", high, width=0, showlegend=False, fill="tonexty"),
        drawn(f"{name}: median and range", middle),
    ]


def over(
    title: str,
    series: Sequence[Trace],
    otherwise: str,
    *,
    note: str = "",
    x: str = "round",
    xaxis: Mapping[str, Any] | None = None,
    **layout: Any,
) -> SectionPart:
    """Returns lines over rounds, or over another `x`; if nothing was measured, the text `otherwise`, which says why."""
    dashed = [each for each in series if each["line"]["dash"] == "dash"]
    solid = [each for each in series if each not in dashed and any(value is not None for value in each["y"])]
    if not solid:
        return missing(otherwise)
    drawn = [each for each in series if each in solid or each in dashed or each["x"] == [None]]
    entries = sum(each.get("showlegend", True) for each in drawn)
    few = x == "round" and max(len(each["x"]) for each in solid) <= 12
    layout |= {"hovermode": "x unified", "showlegend": True, "height": 320 + 18 * max(0, entries - 2)}
    layout["xaxis"] = {**titled(x), **({"dtick": 1} if few else {}), **(xaxis or {})}
    return Plot(drawn, layout, title, note)


def titled(words: str) -> dict[str, Any]:
    """Returns an axis with a title."""
    return {"title": {"text": words}}


def heat_map(
    title: str, rows: Sequence[str], columns: Sequence[str], grid: Sequence[Values], *, form: str, x: str, note: str
) -> Plot:
    """Returns a cell per row and column, with a stronger colour for larger values; a small grid also shows values.

    A grid with more than `MOST_ROWS` rows shows some of them, at equal distances.
    """
    if (every := math.ceil(len(rows) / MOST_ROWS)) > 1:
        title, rows, grid = f"{title}, 1 device in {every}", rows[::every], grid[::every]
    few = len(rows) <= 16 and len(columns) <= 12
    heat = {
        "type": "heatmap",
        "z": grid,
        "zmin": 0,
        "colorscale": [[0, CARD], [1, BLUE]],
        "showscale": False,
        "xgap": 1,
        "ygap": 1 if len(rows) <= MOST_NAMES else 0,
        "texttemplate": f"%{{z:{form}}}" if few else "",
        "hovertemplate": f"%{{y}}, {x} %{{x}}: %{{z:{form}}}<extra></extra>",
    }
    return rows_of_names(title, [heat], rows, note, xaxis={**titled(x), **named(columns)})


def gains(title: str, names: Sequence[str], local_only: Values, federated: Values, *, note: str) -> Plot:
    """Returns a bar per device that was measured twice, from the largest loss to the largest gain; for a large fleet,
    how many devices gained how much."""
    rows = zip(names, local_only, federated, strict=True)
    ordered = sorted((f - a, label(name), a, f) for name, a, f in rows if a is not None and f is not None)
    if len(ordered) > MOST_BARS:
        return _gains_counted(title, [gain for gain, *_ in ordered], note=note)
    places, percents = list(range(len(ordered))), {"tickformat": "+~%"}
    bars = {
        **_bars_from_loss_to_gain(places, [gain for gain, *_ in ordered], [gain for gain, *_ in ordered]),
        "hovertext": [f"{name}: {a:.1%} alone, {f:.1%} federated" for _, name, a, f in ordered],
        "hovertemplate": "%{hovertext}: %{y:+.1%}<extra></extra>",
    }
    names_fit = len(ordered) <= MOST_SYMBOLS
    words = {"tickvals": places, "ticktext": [name for _, name, *_ in ordered], "showticklabels": names_fit}
    axis = {**titled(f"{len(ordered)} devices, sorted"), **words}
    return Plot([bars], {"bargap": 0.1, "xaxis": axis, "yaxis": percents}, title, note)


def _gains_counted(title: str, gains: Sequence[float], *, note: str) -> Plot:
    """Returns a bar per percentage point with the number of devices that gained so much."""
    counts = sorted(Counter(math.floor(100 * gain) for gain in gains).items())
    middles = [(point + 0.5) / 100 for point, _ in counts]
    bars = {
        **_bars_from_loss_to_gain(middles, [count for _, count in counts], middles),
        "hovertext": [f"{points(point / 100, '')} to {points((point + 1) / 100)}" for point, _ in counts],
        "hovertemplate": "%{hovertext}: %{y} devices<extra></extra>",
    }
    axes = {"xaxis": {**titled("gain"), "tickformat": "+~%"}, "yaxis": titled("devices")}
    return Plot([bars], {"bargap": 0.1, **axes}, title, note)


def _bars_from_loss_to_gain(xs: Sequence[float], ys: Sequence[float], gains: Sequence[float]) -> Trace:
    """Returns bars that show the losses by their colour and, for readers who cannot distinguish it, by a pattern."""
    losses = sum(gain < 0 for gain in gains)
    marker = {
        "color": [ORANGE] * losses + [BLUE] * (len(gains) - losses),
        "pattern": {"shape": ["/"] * losses + [""] * (len(gains) - losses)},
        "line": {"width": 0},
    }
    return {"type": "bar", "x": xs, "y": ys, "marker": marker}


def row_height(rows: int) -> float:
    """Returns the height of a row in pixels, for a chart with one row per name."""
    return 26 if rows <= 16 else 17 if rows <= MOST_NAMES else max(1.2, 420 / rows)


def named(names: Sequence[str], *, shown: bool = True) -> dict[str, Any]:
    """Returns an axis of names at the numbers 0, 1, ..., because two names may be the same after they are shortened."""
    words = [label(name, longest=32) for name in names]
    return {"tickvals": list(range(len(names))), "ticktext": words, "showticklabels": shown}


def rows_of_names(title: str, traces: Sequence[Trace], names: Sequence[str], note: str, **layout: Any) -> Plot:
    """Returns a plot with one row per name, the first at the top; names are shown if there is room for them."""
    rows = len(names)
    axis = {**named(names, shown=rows <= MOST_NAMES), "range": [rows - 0.5, -0.5], "showgrid": rows <= MOST_NAMES}
    height = round(100 + rows * row_height(rows))
    return Plot(traces, {"height": height, "yaxis": axis, **layout}, title, note)
