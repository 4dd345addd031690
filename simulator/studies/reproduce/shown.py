"""The table and the list in a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hushfleet.simulator.engines.clock.cli import shown_time
from hushfleet.simulator.studies.reproduce.table import Block, PaperTable, Ranking, Square, measured_as

_OPEN = "·"


def print_table(console: Console, table: PaperTable, paper: str) -> None:
    """A line for each cell: a terminal is seldom wide enough for a paper's columns."""
    recipe = table.entry.recipe
    console.print(f"[bold]{escape(paper)}, {escape(table.entry.label)}[/]: {escape(recipe.title)}", highlight=False)
    for label in table.labels:
        console.print(f"  {escape(label)}", style="yellow", highlight=False)
    for block in table.blocks:
        console.print(_block(block))
        console.print(f"  {measured_as(table.entry, block.metric)}", style="bright_black", highlight=False)
        for ranking in block.rankings:
            console.print(_ranking(block, ranking), highlight=False)
    if raw := raw_words(table.squares):
        console.print(f"  {escape(raw)}", style="bright_black", highlight=False)
    notes: dict[str, list[str]] = {}
    for square in table.squares:
        if square.open and square.open != "not run yet":
            notes.setdefault(square.open, []).append(square.row)
    for reason, rows in notes.items():
        names = escape(", ".join(sorted(set(rows))))
        console.print(f"  open ({names}): {escape(reason)}", style="bright_black", highlight=False)
    console.print(f"{table.done} of {table.asked} cells are finished", highlight=False)


def _block(block: Block) -> Table:
    table = Table(title=escape(block.title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("paper", "ours", "diff.", "paper's ε", "ε server", "ε release"):
        table.add_column(heading, justify="right")
    for row in block.rows:
        for column in block.columns:
            square = block.squares.get((row.id, column.id))
            if square is not None:
                table.add_row(escape(row.title), escape(column.title), *_figures(square))
    return table


def _figures(square: Square) -> list[str | Text]:
    return [
        number(square.paper),
        ours(square) or Text(f"{_OPEN} {waiting(square)}", style="bright_black"),
        "" if square.difference is None else f"{square.difference:+.2f}",
        epsilon(square.paper_epsilon),
        *epsilons(square),
    ]


def ours(square: Square) -> str:
    """The mean with its spread; a number of seeds where not all are there; empty without any."""
    if square.ours is None:
        return ""
    spread = f" ± {square.spread:.2f}" if square.spread is not None else ""
    seeds = f" ({len(square.seeds)} of {square.asked})" if len(square.seeds) < square.asked else ""
    return f"{square.ours:.2f}{spread}{seeds}"


def waiting(square: Square) -> str:
    """What an empty place says: how long it would take, or that it is open."""
    if square.open.startswith("failed"):
        return "failed"
    return f"~{shown_time(square.estimate_s)}" if square.estimate_s is not None else "open"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def epsilon(value: float | None) -> str:
    if value is None:
        return ""
    return "none" if math.isinf(value) else f"{value:.3g}"


def epsilons(square: Square) -> tuple[str, str]:
    """Against the server and against readers of the model; in brackets what a paper's accounting covers."""
    if not square.raw_values:
        return epsilon(square.epsilon_server), epsilon(square.epsilon_release)
    return f"inf ({epsilon(square.noised_server)})", f"inf ({epsilon(square.noised_release)})"


def raw_words(squares: Iterable[Square]) -> str:
    """Why some epsilons are infinite, or nothing."""
    raw = dict.fromkeys(words for square in squares for words in square.raw_values)
    if not raw:
        return ""
    return f"inf (x): without noise leave the device {', '.join(raw)}; x is what the paper's accounting covers"


def _ranking(block: Block, ranking: Ranking) -> Text:
    column = next(column.title for column in block.columns if column.id == ranking.column)
    return Text(f"  order at {column}: {rank_words(ranking)}", style="bright_black")


def rank_words(ranking: Ranking) -> str:
    if ranking.paper == ranking.ours:
        return f"as in the paper: {' > '.join(ranking.paper)}"
    tau = "" if ranking.agreement is None else f" (Kendall's tau {ranking.agreement:+.2f})"
    return f"paper {' > '.join(ranking.paper)}; ours {' > '.join(ranking.ours)}{tau}"


def listed(lines: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> Group:
    """:param lines: for each paper its name and its lines: label, title, done, time, what is missing."""
    tables = []
    for paper, rows in lines:
        table = Table(title=escape(paper), title_justify="left", title_style="bold", expand=True, box=SIMPLE_HEAD)
        table.add_column("", no_wrap=True)
        table.add_column("what", ratio=3)
        table.add_column("cells", justify="right", no_wrap=True)
        table.add_column("time left", justify="right", no_wrap=True)
        table.add_column("what is missing here", ratio=4)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        tables.append(table)
    return Group(*tables)
