"""Shows a report's table on a terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table as TerminalTable
from rich.text import Text

from hushfleet.aggregator.results.report.page import PageCell, Table

_STYLES = {"better": "green", "worse": "yellow", "nothing": "red", "close": "bright_black", "open": "bright_black"}


def terminal_table(table: Table, *, title: str) -> TerminalTable:
    """Converts a report's table; a verdict keeps its colour."""
    shown = TerminalTable(title=escape(title))
    for n, name in enumerate(table.head):
        shown.add_column(escape(name.replace("_", "_\n")), justify="left" if n < table.names else "right")
    for row in table.rows:
        shown.add_row(*(Text(cell, _STYLES.get(cell.css, "") if isinstance(cell, PageCell) else "") for cell in row))
    return shown
