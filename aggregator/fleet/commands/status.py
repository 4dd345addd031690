"""`hushfleet fleet status` and `report`: the fleet now and over all its tasks, from its folder alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

REDRAW_S = 1.0
WIDTH = 160


app = typer.Typer()


@app.command("status")
def _status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Also show epsilon by adversary, bytes and certificates.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw each second until Ctrl-C.")] = False,
) -> None:  # fmt: skip
    """Show boards and their health, the round's progress, privacy spent, and what needs somebody.

    Examples:

    `hushfleet fleet status greenhouse`

    `hushfleet fleet status greenhouse --json`
    """
    from rich.live import Live

    from hushfleet.aggregator.fleet.folder import FleetFolder
    from hushfleet.aggregator.fleet.table import table
    from hushfleet.aggregator.fleet.watch import FleetWatch
    from hushfleet.aggregator.observe.console import Console

    source = FleetWatch(FleetFolder(folder))
    try:
        if as_json:
            print(json.dumps(source.view().to_json(), allow_nan=False))
        elif not watch:
            console = Console()
            if not console.is_terminal:  # what a program or a log gets is not cut to 80 columns
                console.width = WIDTH
            console.print(table(source.view(), details=details))
        else:
            with Live(table(source.view(), details=details), console=Console(), auto_refresh=False) as live:
                while True:
                    live.update(table(source.view(), details=details), refresh=True)
                    time.sleep(REDRAW_S)
    finally:
        source.close()


@app.command("report")
def _report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="HTML file to write; default: report.html in the folder.")
    ] = None,
) -> None:
    """Write one page on the fleet over all its tasks: rounds, boards, epsilon, releases, and what went wrong.

    It needs nothing else and may be sent to the boards' owners. Each run has a report of its own: `hushfleet report`.

    Example: `hushfleet fleet report greenhouse`
    """
    from hushfleet.aggregator.fleet.fleet_report import render_fleet_report
    from hushfleet.aggregator.fleet.folder import FleetFolder
    from hushfleet.aggregator.results.result import write_whole
    from hushfleet.user_files import checked_file

    path = checked_file(out or folder / "report.html")
    write_whole(path, render_fleet_report(FleetFolder(folder)))
    print(f"report  {path}")


@app.command("page")
def _page(folder: Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder.")]) -> None:
    """Print the address of the status page, with its token. The token allows reading, and nothing else."""
    from hushfleet.aggregator.fleet.folder import FleetFolder
    from hushfleet.aggregator.fleet.page.server import page_url

    print(page_url(FleetFolder(folder)))
