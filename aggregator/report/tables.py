"""Defines a table, which pages and terminals show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.markup import escape
from rich.table import Table as TerminalTable
from rich.text import Text

_STYLES = {"better": "green", "worse": "yellow", "nothing": "red", "close": "bright_black", "open": "bright_black"}


class PageCell(str):
    """A cell of a table or a tile's number in a class of the style sheet: `open`, or a `GainVerdict`."""

    css: str

    def __new__(cls, text: str, css: str = "") -> PageCell:
        cell = super().__new__(cls, text)
        cell.css = css
        return cell


@dataclass(frozen=True)
class Table:
    """A table whose first `names` columns (1 or 2) are words and whose others are numbers.

    :param folded: the text to click on to see the table; empty: it is always visible.
    """

    kind: ClassVar = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    folded: str = ""


def terminal_table(table: Table, *, title: str) -> TerminalTable:
    """Converts a report's table; a verdict keeps its colour."""
    shown = TerminalTable(title=escape(title))
    for n, name in enumerate(table.head):
        shown.add_column(escape(name.replace("_", "_\n")), justify="left" if n < table.names else "right")
    for row in table.rows:
        shown.add_row(*(Text(cell, _STYLES.get(cell.css, "") if isinstance(cell, PageCell) else "") for cell in row))
    return shown
