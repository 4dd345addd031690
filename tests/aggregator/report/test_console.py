"""The console of the commands: it commands the terminal, and no text in it does."""

from __future__ import annotations

import io
import sys

import pytest
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hushfleet.aggregator.report.console import Console
from hushfleet.output import escape_output
from support.hostile import HOSTILE, SHOWN, assert_harmless


def a_table(text: str) -> Table:
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    table.add_row(Text(text, style="red"))
    return table


@pytest.mark.parametrize(
    "shown",
    [HOSTILE, escape(HOSTILE), Text(HOSTILE, style="bold"), a_table(HOSTILE), Panel(HOSTILE, title=HOSTILE)],
)
def test_texts_are_escaped_and_colours_stay(shown: object) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=300)
    console.print("[bold red]error:[/]", shown, highlight=False)
    assert r"\x1b[2J\x9b31m\u202e" in out.getvalue()
    assert "\x1b[1;31merror:\x1b[0m" in out.getvalue()
    assert_harmless(out.getvalue().replace("\nERROR   all", ""), colours=True)


def test_the_width_of_an_escaped_text_is_known() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(a_table(HOSTILE.replace("\n", " ")))
    assert len({len(line) for line in out.getvalue().splitlines()[1:]}) == 1


def test_a_display_moves_the_cursor_although_others_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    escape_output()
    with Live(HOSTILE.replace("\n", " "), console=Console(force_terminal=True, width=100), auto_refresh=False) as live:
        live.refresh()
        print(f"beside the display: {HOSTILE}")
    print(HOSTILE)
    assert "\x1b[2K" in out.getvalue()
    assert SHOWN.split(r"\n")[0] in out.getvalue()
    assert_harmless(out.getvalue().replace("\nERROR   all", "").replace("\r\x1b[2K", ""), colours=True)
