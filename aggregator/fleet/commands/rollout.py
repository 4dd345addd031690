"""`hushfleet release rollout`: send a release to the boards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.setup import Dir, opened
from hushfleet.errors import BadInput

if TYPE_CHECKING:
    from hushfleet.aggregator.fleet.registry import FleetRegistry

app = typer.Typer()


@app.command("rollout")
def _rollout(
    path: Dir,
    to: Annotated[str | None, typer.Option(metavar="VERSION", help="Begin a roll-out of this release.")] = None,
    newest: Annotated[bool, typer.Option("--newest", help="Begin a roll-out of the newest release that was not withdrawn.")] = False,
    pause: Annotated[bool, typer.Option("--pause", help="Offer the release to no further board, and send no more of it.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a roll-out that is paused or has stopped.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Withdraw the offer: no further board gets the release.")] = False,
) -> None:  # fmt: skip
    """Send a release to the boards: one first, then a tenth, then all; it stops by itself when too many go back.

    Without an option it says how far the roll-out is. A board that has failed with a release tries it again in a new
    roll-out only.

    Examples:

    `hushfleet release rollout greenhouse --newest`

    `hushfleet release rollout greenhouse`
    """
    if (to is not None) + newest + pause + resume + cancel > 1:
        raise BadInput("say one of --to, --newest, --pause, --resume and --cancel")
    from hushfleet.aggregator.fleet.releases import check_signed
    from hushfleet.aggregator.fleet.rollout import begin, change

    with opened(path) as (folder, registry):
        if to is not None or newest:
            check_signed(folder, registry, to)
            begin(registry, to, now=time.time())
        elif pause:
            change(registry, "paused")
        elif resume:
            change(registry, "running")
        elif cancel:
            change(registry, "cancelled")
        _tell(registry)


def _tell(registry: FleetRegistry) -> None:
    from hushfleet.aggregator.fleet import descriptions
    from hushfleet.aggregator.fleet.rollout import board_rollouts, current, rollout_view

    view, rollout = rollout_view(registry, now=time.time()), current(registry)
    if view is None or rollout is None:
        print("no release is being rolled out")
        return
    print(descriptions.rollout(view))
    for board in board_rollouts(registry, rollout, now=time.time()):
        if board.why:
            print(f"  {board.device}: {board.why}")
