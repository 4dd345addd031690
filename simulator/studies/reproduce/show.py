"""Prints a table in a terminal."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hushfleet.aggregator.report.console import Console
from hushfleet.simulator.studies.reproduce.recipe import METRICS
from hushfleet.simulator.studies.reproduce.table import NOT_RUN, PaperTable

_HEAD = ("method", "", "paper", "ours", "difference", "paper's ε", "ε server", "ε release", "seeds")
_NAMES = 2
_SMALL = "bright_black"
_WIDEST = 10_000


def print_table(console: Console, table: PaperTable, paper: str) -> None:
    """Prints a line for each place, because a terminal is rarely wide enough for a paper's columns."""
    recipe = table.recipe
    console.print(f"[bold]{escape(paper)}, {escape(recipe.label)}[/]: {escape(recipe.title)}", highlight=False)
    for label in table.labels:
        console.print(f"  {escape(label)}", style="yellow", highlight=False)
    for block in table.blocks:
        console.print(_fitting(block, console))
        first = block.iloc[0]
        rounds = table.window([group for group in recipe.groups if group.id == first.group])
        measured = METRICS[first.metric] + ("" if first.metric == "round_time" else f", {rounds}")
        console.print(Text(f"  {measured}", style=_SMALL))
    raw = ", ".join(table.raw_values)
    covered = f"inf (x): without noise leave the device {raw}; x is what the paper's accounting covers"
    notes = [covered] if raw else []
    reasons = table.places[~table.places.open.isin(["", NOT_RUN])]
    for reason, places in reasons.groupby("open", sort=False):
        notes.append(f"open ({', '.join(sorted(set(places.row)))}): {reason}")
    for note in notes:
        console.print(Text(f"  {note}", style=_SMALL))
    console.print(f"{table.done} of {table.asked} cells are finished", highlight=False)


def _fitting(block: pd.DataFrame, console: Console) -> Table:
    """Returns the columns that fit: a column that follows from others, or from a column's name, is left out first."""
    lines = [_table_row(line) for line in block.itertuples()]
    filled = [place for place in range(len(_HEAD)) if any(words[place] for words in lines)]
    for left_out in ((), ("difference",), ("difference", "paper's ε")):
        kept = [place for place in filled if _HEAD[place] not in left_out]
        title = escape(block.title.iloc[0])
        shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place in kept:
            shown.add_column(_HEAD[place], justify="left" if place < _NAMES else "right", overflow="fold")
        for words in lines:
            shown.add_row(*(words[place] for place in kept))
        if console.measure(shown, options=console.options.update(max_width=_WIDEST)).maximum <= console.width:
            break
    return shown


def _table_row(place: Any) -> list[Text]:
    """Returns a line of the table; see `_HEAD`."""
    known = place.ours == place.ours
    spread = f" ± {place.spread:.2f}" if place.spread == place.spread else ""
    waiting, style = "failed" if place.open.startswith("failed") else "open", "" if known else _SMALL
    return [
        Text(place.method),
        Text(place.at),
        Text(_number(place.paper, "{:.2f}")),
        Text(f"{place.ours:.2f}{spread}" if known else waiting, style),
        Text(_number(place.difference, "{:+.2f}")),
        *(Text(epsilon) for epsilon in (_epsilon(place.paper_epsilon), *epsilons(place))),
        Text(f"{len(place.seeds)} of {place.asked}", style),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else form.format(value)


def _epsilon(value: float | None) -> str:
    return "none" if value == math.inf else _number(value, "{:.3g}")


def epsilons(place: Any) -> tuple[str, str]:
    """Returns epsilon against the server and against readers of the model; in brackets as a paper counts it."""
    if not place.raw_values:
        return _epsilon(place.epsilon_server), _epsilon(place.epsilon_release)
    noised = place.noised_server, place.noised_release
    server, release = (f"inf ({_epsilon(each)})" if each != math.inf else "inf" for each in noised)
    return server, release
