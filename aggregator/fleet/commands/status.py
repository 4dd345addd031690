"""`hushfleet fleet status`: the fleet now, from its folder alone."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.options import RUN_IT, DirOrRun

if TYPE_CHECKING:
    from hushfleet.aggregator.fleet.trust.membership import Membership
    from hushfleet.aggregator.fleet.view import FleetView
    from hushfleet.aggregator.storage.board import Board

REDRAW_S = 1.0
WIDTH = 160


app = typer.Typer()


@app.command("status", rich_help_panel=RUN_IT)
def _status(
    folder: DirOrRun,
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="Show all facts on these boards alone; ids, or "
"patterns in quotes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    details: Annotated[bool, typer.Option("--details", help="Also show epsilon by adversary, bytes and certificates.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Redraw each second until Ctrl-C.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Print the address of the status page, with its token, which "
"allows reading and nothing else.")] = False,
) -> None:  # fmt: skip
    """Show boards and their health, the round's progress, privacy spent, who asks to be let in, and what needs
    somebody.

    Of a run without a fleet it shows the devices: `known` by a key that you gave, `pinned` by the first key that they
    showed, `expected` before that, or `blocked`.

    Examples:

    `hushfleet fleet status greenhouse`

    `hushfleet fleet status greenhouse greenhouse-07`

    `hushfleet fleet status runs/field`
    """
    from rich.live import Live

    from hushfleet.aggregator.fleet.trust.folder import FleetFolder
    from hushfleet.aggregator.fleet.trust.keys import service
    from hushfleet.aggregator.fleet.trust.membership import chosen_ids, is_fleet, membership
    from hushfleet.aggregator.fleet.watching.table import table
    from hushfleet.aggregator.fleet.watching.watch import FleetWatch
    from hushfleet.aggregator.report.console import Console

    if not is_fleet(folder):
        with membership(folder) as boards:
            _print_devices(boards)
        return
    if page:
        from hushfleet.aggregator.fleet.page.server import page_url  # with its web server

        print(page_url(FleetFolder(folder)))
        return
    with FleetWatch(FleetFolder(folder)) as source:
        if ids:
            view = source.view()
            shown = {board.device: board for board in view.boards}
            for device in chosen_ids(shown, ids, None, folder=folder):
                _print_board(shown[device], view)
        elif as_json:
            print(json.dumps(source.view().to_json(), allow_nan=False))
        elif not watch:
            console = Console()
            if not console.is_terminal:  # what a program or a log gets is not cut to 80 columns
                console.width = WIDTH
            console.print(table(source.view(), details=details))
            if details:
                key = service(FleetFolder(folder)).public_key.hex()
                console.print(f'a board without a card has in DEVICE.toml: fleet.service_key = "{key}"', soft_wrap=True)
        else:
            with Live(table(source.view(), details=details), console=Console(), auto_refresh=False) as live:
                while True:
                    live.update(table(source.view(), details=details), refresh=True)
                    time.sleep(REDRAW_S)


def _print_board(board: Board, view: FleetView) -> None:
    from hushfleet.aggregator.fleet.watching.columns import COLUMNS, day

    print(board.device)
    for column in COLUMNS:
        if column.text is not None and (value := column.text(board, view.at)):
            print(f"  {column.name:12} {value}")
    for problem in board.problems:
        print(f"  {'problem':12} {problem.what}: {problem.advice}")
    for each in view.asking:
        if each.device == board.device:
            print(f"  {'not let in':12} {day(each.at, view.at)}, key {each.public_key.hex()}: {each.reason}")


def _print_devices(devices: Membership) -> None:
    """Prints the devices of a run without a fleet, and those that announced themselves but were not accepted."""
    from rich.table import Table

    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.readable import ago
    from hushfleet.aggregator.results.events import iterate_events
    from hushfleet.aggregator.results.fleet_state import FleetState, SeenDevice

    now, refused = time.time(), devices.activity.refused_births()
    run = FleetState()
    for event in iterate_events(devices.path / "events.jsonl"):
        run.apply(event)
    console = Console(markup=False)  # the board itself reports its kind, which may contain markup
    console.width = max(console.width, WIDTH)  # a key stays on one line, to be copied
    table = Table("device", "state", "board", "rounds", "last seen", "key", box=None, header_style="bold")
    known = [board for board in devices.members.values() if board.standing != "new"]  # others only ask
    for row in known:
        key = "" if row.public_key is None else row.public_key.hex()
        state = f"blocked: {row.reason}" if row.is_blocked else row.standing
        active = run.devices.get(row.device, SeenDevice())
        table.add_row(row.device, state, active.board, str(active.rounds), ago(active.last_seen, now), key)
    console.print(table if known else "no device is known")
    if refused:
        console.print("\nnot accepted; compare the key with what `status` prints on the board, then: fleet approve")
        table = Table("device", "times", "last seen", "key", box=None, header_style="bold")
        for birth in refused:
            table.add_row(birth.device, str(birth.count), ago(birth.last_seen, now), birth.public_key.hex())
        console.print(table)
