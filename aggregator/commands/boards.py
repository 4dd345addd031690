"""`hushfleet boards`: list the board profiles, or show one with the source of each number."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from hushfleet.aggregator.report.console import Console

if TYPE_CHECKING:
    from hushfleet.firmware_profiles.board import Board, Quantity


def boards(
    name: Annotated[str | None, typer.Argument(help="Name of a board: show all its figures and their sources.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """List the board profiles, or show one in full.

    Example: `hushfleet boards raspberry-pi-5-8gb`
    """
    from hushfleet.firmware_profiles.board import board_names, load_board

    chosen = [load_board(each) for each in ([name] if name else board_names())]
    if as_json:
        content = [dataclasses.asdict(board) for board in chosen]
        typer.echo(json.dumps(content[0] if name else content, indent=2, ensure_ascii=False))
    elif name:
        _print_one(chosen[0])
    else:
        _print_all(chosen)


def _print_all(boards: list[Board]) -> None:
    table = Table(
        caption="~ is an estimate; speed is of one core, generic-x86 = 1. `hushfleet boards NAME` shows the system, "
        "the Python to target and the source of every number.",
        caption_justify="left",
    )
    table.add_column("board", no_wrap=True)
    for heading in ("cores", "MiB", "speed", "Mbit/s down/up", "W idle/active"):
        table.add_column(heading, justify="right")
    for board in boards:
        table.add_row(
            board.name,
            _short(board.cores),
            _short(board.memory_mib),
            _short(board.relative_cpu_speed),
            f"{_short(board.network_down_mbit_s)}/{_short(board.network_up_mbit_s)}",
            f"{_short(board.power_idle_w)}/{_short(board.power_active_w)}",
        )
    Console().print(table)


def _print_one(board: Board) -> None:
    console = Console()
    console.print(Text(f"{board.title}  ({board.name})", style="bold"))
    texts = Table(show_header=False, box=None)
    for field in dataclasses.fields(board):
        value = getattr(board, field.name)
        if isinstance(value, str) and field.name not in ("name", "title"):
            texts.add_row(field.name.replace("_", " "), Text(value))
    console.print(texts)
    table = Table()
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("where it comes from")
    for name, quantity in board.quantities():
        basis = f": {quantity.basis}" if quantity.basis else ""
        table.add_row(name, f"{quantity.value:g}", Text(quantity.source or f"estimate{basis}"))
    console.print(table)
    for note in board.notes:
        console.print(Text(f"- {note}"))


def _short(quantity: Quantity) -> str:
    return f"{'~' if quantity.estimated else ''}{quantity.value:g}"
