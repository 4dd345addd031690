"""The table for people: in a terminal, and as one HTML page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hushfleet.aggregator.results.report import page
from hushfleet.simulator.studies.reproduce.recipe import Paper
from hushfleet.simulator.studies.reproduce.table import NOT_RUN, Block, PaperTable, Ranking, measured_as

_HEAD = ("method", "", "paper", "ours", "difference", "paper's ε", "ε server", "ε release", "seeds")
_NAMES = 2
_MOST_NAMED = 6
_SMALL = "bright_black"
_WIDEST = 10_000


def print_table(console: Console, table: PaperTable, paper: str) -> None:
    """A line for each place: a terminal is seldom wide enough for a paper's columns."""
    recipe = table.recipe
    console.print(f"[bold]{escape(paper)}, {escape(recipe.label)}[/]: {escape(recipe.title)}", highlight=False)
    for label in table.labels:
        console.print(f"  {escape(label)}", style="yellow", highlight=False)
    for block in table.blocks:
        console.print(_fitting(block, console))
        small = [measured_as(recipe, block.metric), *(f"order at {words}" for words in _orders(block))]
        console.print(Text("\n".join(f"  {words}" for words in small), style=_SMALL))
    notes = [raw] if (raw := raw_words(table.places)) else []
    reasons = table.places[~table.places.open.isin(["", NOT_RUN])]
    for reason, places in reasons.groupby("open", sort=False):
        notes.append(f"open ({', '.join(sorted(set(places.row)))}): {reason}")
    for note in notes:
        console.print(Text(f"  {note}", style=_SMALL))
    console.print(f"{table.done} of {table.asked} cells are finished", highlight=False)


def _fitting(block: Block, console: Console) -> Table:
    """The columns for which there is room: what follows from others, or from a column's name, is left out first."""
    lines = [_words(line) for line in block.places.itertuples()]
    filled = [place for place in range(len(_HEAD)) if any(words[place] for words in lines)]
    for left_out in ((), ("difference",), ("difference", "paper's ε")):
        kept = [place for place in filled if _HEAD[place] not in left_out]
        shown = Table(
            title=escape(block.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for place in kept:
            shown.add_column(_HEAD[place], justify="left" if place < _NAMES else "right", overflow="fold")
        for words in lines:
            shown.add_row(*(Text(words[place], _SMALL if words[place].css == "open" else "") for place in kept))
        if console.measure(shown, options=console.options.update(max_width=_WIDEST)).maximum <= console.width:
            break
    return shown


def _words(place: Any, *, named: bool = True) -> list[page.Cell]:
    """A line of the table; see `_HEAD`."""
    known = place.ours == place.ours
    spread = f" ± {place.spread:.2f}" if place.spread == place.spread else ""
    waiting = "failed" if place.open.startswith("failed") else "open"
    return [
        page.Cell(place.method if named else ""),
        page.Cell(place.at),
        page.Cell(_number(place.paper, "{:.2f}")),
        page.Cell(f"{place.ours:.2f}{spread}") if known else page.Cell(waiting, "open"),
        page.Cell(_number(place.difference, "{:+.2f}"), "better" if place.difference > 0 else "worse"),
        *(page.Cell(epsilon) for epsilon in (_epsilon(place.paper_epsilon), *epsilons(place))),
        page.Cell(f"{len(place.seeds)} of {place.asked}", "" if known else "open"),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else form.format(value)


def _epsilon(value: float | None) -> str:
    return "none" if value == math.inf else _number(value, "{:.3g}")


def epsilons(place: Any) -> tuple[str, str]:
    """Against the server and against readers of the model; in brackets what a paper's accounting covers, if any."""
    if not place.raw_values:
        return _epsilon(place.epsilon_server), _epsilon(place.epsilon_release)
    noised = place.noised_server, place.noised_release
    server, release = (f"inf ({_epsilon(each)})" if each != math.inf else "inf" for each in noised)
    return server, release


def raw_words(places: pd.DataFrame) -> str:
    """Why some epsilons are infinite, or nothing."""
    raw = dict.fromkeys(words for several in places.raw_values for words in several)
    if not raw:
        return ""
    return f"inf (x): without noise leave the device {', '.join(raw)}; x is what the paper's accounting covers"


def _orders(block: Block) -> Iterator[str]:
    titles = dict(zip(block.places.column, block.places["at"], strict=True))
    yield from (f"{titles[ranking.column]}: {_order(ranking)}" for ranking in block.rankings)


def _order(ranking: Ranking) -> str:
    if ranking.paper == ranking.ours:
        return f"as in the paper: {' > '.join(ranking.paper)}"
    tau = "" if ranking.agreement is None else f" (Kendall's tau {ranking.agreement:+.2f})"
    return f"paper {' > '.join(ranking.paper)}; ours {' > '.join(ranking.ours)}{tau}"


def render_page(table: PaperTable, paper: Paper) -> str:
    """The report as HTML."""
    recipe, places = table.recipe, table.places
    rankings = [ranking for block in table.blocks for ranking in block.rankings]
    tiles = [(f"{table.done} of {table.asked}", "cells finished")]
    if places.difference.notna().any():
        tiles.append((f"{places.difference.abs().mean():.1f} points", "mean distance from the paper"))
    if rankings:
        first = sum(each.paper[0] == each.ours[0] for each in rankings)
        same = sum(each.paper == each.ours for each in rankings)
        tiles.append((f"{first} of {len(rankings)}", "columns where the paper's best is ours too"))
        tiles.append((f"{same} of {len(rankings)}", "columns with the paper's whole order"))
    whose = "The paper: " if places.paper.notna().any() else ""
    blocks = sorted(table.blocks, key=lambda block: not block.begun)  # those with something to see come first
    sections = [_section(table, block, f"part-{number}") for number, block in enumerate(blocks)]
    return page.page(
        f"{paper.name}, {recipe.label}: {recipe.title}",
        [*sections, *_open(places), _about(table)],
        under=paper.source,
        answer=[*([whose + recipe.claim] if recipe.claim else []), *table.labels],
        tiles=tiles,
    )


def _section(table: PaperTable, block: Block, anchor: str) -> page.Section:
    recipe = table.recipe
    lead = f"Accuracy in percent: {measured_as(recipe, block.metric)}."
    if block.reading and block.reading.note:
        lead += f" Reading: {block.reading.note}."
    repeated = block.places.row.duplicated()
    lines = [_words(line, named=not again) for line, again in zip(block.places.itertuples(), repeated, strict=True)]
    folded = "" if block.begun else "nothing of it was run here; the paper's numbers"
    parts: list[page.PagePart] = [_plot(block)] if block.begun else []
    parts.append(page.Table(_HEAD, lines, names=_NAMES, folded=folded))
    rows = [row for row in recipe.rows if row.id in set(block.places.row)]
    notes = [f"{row.title}: {row.note}." for row in rows if row.note]
    if not block.group.metric:
        notes += [f"{row.title}: measured as {measured_as(recipe, row.metric)}." for row in rows if row.metric]
    notes += [f"{block.group.title}, {row}: {where}." for row, where in block.group.quoted.items()]
    notes += [f"Order of the methods, best first, at {order}" for order in _orders(block)]
    return page.Section(anchor, block.title, lead, [*parts, *([page.Prose(notes, css="note")] if notes else [])])


def _plot(block: Block) -> page.Plot:
    """The paper's accuracy and ours on one line for each method, grouped by column."""
    places = block.places[block.places.paper.notna() | block.places.ours.notna()]
    places = places.sort_values(["column", "row"], kind="stable")
    axis = [places["at"].tolist(), places.method.tolist()]
    paper, ours = places.paper.tolist(), places.ours.tolist()
    pairs = [value for both in zip(paper, ours, strict=True) for value in (*both, None)]
    figure = go.Figure()
    figure.add_scatter(
        x=pairs,
        y=[[title for title in titles for _ in range(3)] for titles in axis],
        mode="lines",
        line={"color": page.SOFT, "width": 1, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
    )
    hover = "%{y}: %{x:.2f} %"
    figure.add_scatter(
        x=paper, y=axis, mode="markers", name="paper", hovertemplate=hover,
        marker={"color": page.SOFT, "symbol": "circle-open", "size": 9, "line": {"width": 2}},
    )  # fmt: skip
    seeds = list(zip(places["values"], ours, strict=True))
    above = [max(values) - mean if values else 0 for values, mean in seeds]
    below = [mean - min(values) if values else 0 for values, mean in seeds]
    figure.add_scatter(
        x=ours, y=axis, mode="markers", name="ours", hovertemplate=hover, marker={"color": page.BLUE, "size": 9},
        error_x={"type": "data", "symmetric": False, "width": 0, "array": above, "arrayminus": below},
    )  # fmt: skip
    figure.update_layout(height=110 + 24 * len(places), xaxis_ticksuffix=" %")
    figure.update_yaxes(autorange="reversed", automargin=True)
    printed = bool(places.paper.notna().any())
    title = "The paper and ours" if printed else "Accuracy"
    return page.Plot(figure, title, note="Hollow: the paper. Filled: ours; its line spans the seeds.", wide=True)


def _open(places: pd.DataFrame) -> Iterator[page.Section]:
    facts = []
    for reason, those in places[places.open != ""].groupby("open", sort=False):
        names = [f"{line.block}: {line.method} at {line.at}" for line in those.itertuples()]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        facts.append((f"{len(names)} cells", f"{reason}. {'; '.join(names[:_MOST_NAMED])}{more}."))
    if facts:
        lead = "Cells without a number or with fewer seeds, and why."
        yield page.Section("open", "What is open", lead, [page.Facts(facts)])


def _about(table: PaperTable) -> page.Section:
    recipe = table.recipe
    facts = [
        ("what the paper leaves open", recipe.readings_text or "nothing of weight"),
        *((f"reading: {each.title}", each.note) for each in recipe.readings),
        ("paper's ε", "what the paper prints"),
        ("ε server", "what the ledger says of the worst device, against whoever sees single updates"),
        ("ε release", "the same, against whoever sees only the aggregate models"),
        *([("inf (x)", raw.removeprefix("inf (x): "))] if (raw := raw_words(table.places)) else []),
        ("spread", "standard deviation over seeds"),
    ]
    return page.Section("about", "How to read this", "Settings, readings and words.", [page.Facts(facts)])
