"""`hushfleet push`: install a fleet's client by ssh, on a board that runs already."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import Annotated

import typer

from hushfleet.aggregator.fleet.commands.options import FleetDir, ImagesFolder, WheelsFolder, opened
from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput


@with_options
def push(
    destination: Annotated[str, typer.Argument(metavar="USER@HOST", help="Destination for ssh. USER must be root, or "
"may use sudo.")],
    fleet: FleetDir,
    device: Annotated[str, typer.Option(metavar="ID", help="Id of the board in the fleet.")],
    ssh: Annotated[str, typer.Option(metavar="OPTIONS", help="Options of ssh, such as '-p 2222 -i key'.")] = "",
    images: ImagesFolder = None,
    wheels: WheelsFolder = None,
    force: Annotated[bool, typer.Option("--force", help="Also install a board that has a card or was installed before.")] = False,
) -> None:  # fmt: skip
    """Install the client on a board that runs already: what a card does, by ssh. For Jetsons, and for single boards.

    Example:

    `hushfleet push me@jetson.local --fleet greenhouse --device greenhouse-41`
    """
    from hushfleet.aggregator.fleet.software.cards import (
        ReleasePlatform,
        card_of,
        choose_boards,
        note_token,
        release_of,
    )
    from hushfleet.aggregator.fleet.software.push import look_at, push
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress
    from hushfleet.firmware_profiles import load_board
    from hushfleet.firmware_profiles.cards.bundle import PYTHONS

    with opened(fleet) as (folder, registry):
        (board,) = choose_boards(registry, devices=[device], again=force, token_again=True, now=time.time())
        try:
            options = shlex.split(ssh)
        except ValueError as error:
            raise BadInput(f"--ssh {ssh!r}: {error}") from error
        host, wanted = look_at(destination, options), load_board(board.board).architecture
        if host.arch != wanted:
            raise BadInput(f"{destination} is {host.arch}, and {device} is a {board.board}, which is {wanted}")
        if host.bits != "64":
            raise BadInput(
                f"{destination} has a {host.bits}-bit system on a 64-bit processor, and releases are for 64-bit "
                "systems: write the 64-bit image to it"
            )
        targets = [ReleasePlatform(python, host.arch) for python in host.pythons if python in PYTHONS]
        if not targets:
            raise BadInput(
                f"{destination} has {f'Python {host.pythons[0]}' if host.pythons else 'no Python'}, and releases are "
                f"made for {', '.join(PYTHONS)}: install one of them there, beside its own"
            )
        with show_progress(Console()):
            release = release_of(folder, registry, targets, wheels=wheels)
        target = next(target for target in targets if target.platform == release.platform)
        card = replace(card_of(folder, board, target=target, images=images), release=folder.releases / release.file)
        note_token(folder, registry, card)
    push(host, card)
    print(f"{device} is installed on {destination}; it enrols by itself: hushfleet fleet status {fleet}")
