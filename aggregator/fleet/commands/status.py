"""`hushfleet fleet status`: how the fleet is, from its folder alone; the page shows the same."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from hushfleet.aggregator.fleet import words
from hushfleet.aggregator.fleet.folder import FleetFolder
from hushfleet.aggregator.fleet.view import BoardView, FleetView, Problem
from hushfleet.aggregator.fleet.watch import FleetWatch
from hushfleet.aggregator.observe.display import COLORS, SOFT, WARNING

URGENT = "#e07b5a"
REDRAW_S = 1.0
WIDTH = 160


def register(fleet: typer.Typer) -> None:
    """Adds `status` to `hushfleet fleet`."""

    @fleet.command("status")
    def status(
        folder: Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")],
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
        watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C, redrawn each second.")] = False,
    ) -> None:
        """Show boards and their health, the round's progress, privacy spent, and what needs somebody.

        Examples:

        `hushfleet fleet status greenhouse`

        `hushfleet fleet status greenhouse --json`
        """
        source = FleetWatch(FleetFolder(folder))
        try:
            if as_json:
                print(json.dumps(source.view().to_json(), allow_nan=False))
            elif not watch:
                console = Console()
                if not console.is_terminal:  # what a program or a log gets is not cut to 80 columns
                    console.width = WIDTH
                console.print(table(source.view()))
            else:
                with Live(table(source.view()), console=Console(), auto_refresh=False) as live:
                    while True:
                        live.update(table(source.view()), refresh=True)
                        time.sleep(REDRAW_S)
        finally:
            source.close()

    @fleet.command("page")
    def page(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")]) -> None:
        """Print the address of the status page, with its token. Who has it can look, and nothing more."""
        from hushfleet.aggregator.fleet.page.server import page_url

        print(page_url(FleetFolder(folder)))


def table(view: FleetView) -> RenderableType:
    """The fleet for a terminal."""
    parts: list[RenderableType] = [Text.assemble((view.federation, "bold"), "  ", words.summary(view))]
    if view.run is not None:
        parts += [Text(line) for line in (words.progress(view.run), words.privacy(view.run), words.traffic(view.run))]
    if view.rollout is not None:
        parts.append(Text(words.rollout(view.rollout)))
    parts += [Text(said, SOFT) for said in (words.certificates(view),) if said]
    parts += [_problem("", problem) for problem in view.problems]
    if view.boards:
        parts.append(_boards(view))
    parts += [_problem(board.device, problem) for board in view.boards for problem in board.problems]
    parts += [Text(words.stranger(each), WARNING) for each in view.strangers]
    return Group(*parts)


def _boards(view: FleetView) -> Table:
    rows = Table(
        Column("board", no_wrap=True), "state", "seen", "release", "health", "rounds", "spent", "sent",
        box=None, header_style="bold",
    )  # fmt: skip
    for board in view.boards:
        rows.add_row(
            board.device,
            _state(board),
            words.ago(board.seen, view.at),
            words.release(board),
            words.health(board),
            str(board.rounds),
            words.spent(board),
            words.sent(board),
        )
    return rows


def _state(board: BoardView) -> Text:
    style = COLORS.get(board.state, SOFT)
    return Text(words.state(board), URGENT if board.is_urgent else style)


def _problem(device: str, problem: Problem) -> Text:
    who = f"{device} " if device else ""
    return Text.assemble((f"{who}{problem.what}", URGENT if problem.urgent else WARNING), (f"  {problem.advice}", SOFT))
