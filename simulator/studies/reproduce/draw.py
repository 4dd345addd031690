"""Draws figures: for a table, our accuracies beside the printed ones; for a paper, all its numbers against ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from hushfleet.simulator.studies.reproduce.table import PaperTable

_PRINTED, _OURS = "#8a8a8a", "#1b6ca8"
_MARKS = "os^Dv"
_HOLDS = {"yes": "#2a8f4d", "partly": "#d9a400", "no": "#b3261e", "open": _PRINTED}
"""What was found of a claim, with its colour."""
# Text is stored as text, and the same numbers give the same bytes.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "hushfleet", "font.size": 8}


class Point(NamedTuple):
    """A finished number.

    :param group: its table and row group, for the legend.
    :param ours: in percent, by seed.
    :param apart: true if it is of another reading than the first, or of a table with `judged_as`.
    """

    group: str
    printed: float
    ours: tuple[float, ...]
    apart: bool


def draw_paper(points: Sequence[Point], path: Path) -> None:
    """Writes an SVG: printed numbers against ours, with standard deviations over seeds; on the line they are equal."""
    groups = list(dict.fromkeys(point.group for point in points))
    panels = {"first reading": False, "other readings": True}
    shown = {title: [each for each in points if each.apart == apart] for title, apart in panels.items()}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 4.1 + 0.16 * len(groups)), layout="constrained")
        axes = figure.subplots(1, len(panels), sharex=True, sharey=True)
        for each, (title, those) in zip(axes, shown.items(), strict=True):
            each.plot((0, 100), (0, 100), color=_PRINTED, linewidth=0.8)
            for at, group in enumerate(groups):
                here = [point for point in those if point.group == group]
                means = [fmean(point.ours) for point in here]
                spreads = [stdev(point.ours) if len(point.ours) > 1 else 0.0 for point in here]
                where = [point.printed for point in here]
                each.errorbar(where, means, spreads, fmt=_MARKS[at % 5], color=f"C{at}", ms=4, lw=0.8, label=group)
            each.set(title=f"{title} ({len(those)})", xlim=(0, 100), ylim=(0, 100), aspect="equal")
            each.set_xlabel("printed accuracy, %")
            each.grid(alpha=0.25)
        axes[0].set_ylabel("ours, %")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1, frameon=False)
        _settle(figure)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw_claims(papers: Mapping[str, Sequence[str]], path: Path) -> None:
    """Writes an SVG: a line for each paper, and a dot for each of its claims, under what was found."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 0.7 + 0.34 * len(papers)), layout="constrained")
        axes = figure.subplots()
        for line, found in enumerate(papers.values()):
            for at, (holds, colour) in enumerate(_HOLDS.items()):
                count = found.count(holds)
                places = [at + 0.11 * (each - (count - 1) / 2) for each in range(count)]
                axes.scatter(places, [line] * count, s=60, color=colour)
        axes.set_yticks(range(len(papers)), papers)
        axes.set_xticks(range(len(_HOLDS)), _HOLDS)
        axes.set(xlim=(-0.5, len(_HOLDS) - 0.5), ylim=(len(papers) - 0.5, -0.5))
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.set_xticks([at + 0.5 for at in range(len(_HOLDS) - 1)], minor=True)
        axes.grid(which="minor", axis="x", alpha=0.25)
        axes.spines[:].set_visible(False)
        _settle(figure)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def draw(table: PaperTable, path: Path) -> None:
    """Writes an SVG: a panel for each group and reading with a run of its own, and in it a line for each place."""
    blocks = with_own_runs(table.finished)
    heights = [len(block) for block in blocks]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, 0.6 + 0.24 * sum(heights) + 0.45 * len(blocks)), layout="constrained")
        panels = figure.subplots(len(blocks), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, block in zip(panels, blocks, strict=True):
            _panel(axes, block)
        panels[0].legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
        panels[-1].set_xlabel("accuracy, %")
        _settle(figure)
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def with_own_runs(places: pd.DataFrame) -> list[pd.DataFrame]:
    """Returns the finished places by block, without each block whose runs are all in earlier ones: readings share the
    runs that they do not change.

    :param places: `PaperTable.finished`.
    """
    runs = places.explode("runs")
    own = runs.drop_duplicates(["group", "row", "runs"]).block.unique()
    return [block for number, block in places.groupby("block") if number in own]


def _settle(figure: Figure) -> None:
    """Rounds positions: their last bits differ between processes, and names in the file are digests of positions."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:
        axes.set_position(tuple(round(each, 6) for each in axes.get_position().bounds))


def _panel(axes: Any, places: pd.DataFrame) -> None:
    lines = range(len(places))
    axes.scatter(places.paper, lines, s=28, facecolors="none", edgecolors=_PRINTED, label="the paper")
    axes.scatter(places.ours, lines, s=22, color=_OURS, label="ours")
    for line, values in zip(lines, places["values"], strict=True):
        axes.plot((min(values), max(values)), (line, line), color=_OURS, linewidth=1.2)
    axes.set_yticks(lines, [f"{place.method}, {place.at}" for place in places.itertuples()])
    axes.set_title(places.title.iloc[0], loc="left", fontsize=8)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
