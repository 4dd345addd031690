"""`hushfleet fleet bundle`: build a release of the software that is installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hushfleet
from hushfleet.aggregator.fleet.commands.desk import Dir, opened


def register(fleet: typer.Typer) -> None:
    fleet.command("bundle")(_bundle)


def _bundle(
    path: Dir,
    python: Annotated[str, typer.Option(metavar="3.X", help="Of the boards' system: 3.13 on Raspberry Pi OS Trixie, 3.11 on Bookworm.")] = "3.13",
    arch: Annotated[str, typer.Option(help="Of the boards: aarch64 or x86_64.")] = "aarch64",
    version: Annotated[str, typer.Option(help="What boards will say that they run: two to four numbers.")] = hushfleet.__version__,
    wheels: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Wheels of other packages, where no package index can be reached.", exists=True, file_okay=False)] = None,
    downgrade_from: Annotated[list[str] | None, typer.Option(metavar="VERSION", help="Boards that run this newer version may go back to it; repeatable.")] = None,
) -> None:  # fmt: skip
    """Build a signed release of the software that is installed here, for cards and for roll-outs. A minute or two.

    Other packages come from pip's index, with the versions and SHA-256 that this software knows of them, and are kept.

    Example:  hushfleet fleet bundle greenhouse --python 3.13 --version 0.3.1
    """
    from rich.console import Console

    from hushfleet.aggregator.fleet.cards import Target, build_release
    from hushfleet.aggregator.observe.progress import shown

    with opened(path) as (folder, registry):
        target = Target(python, arch)
        with shown(Console()):
            release = build_release(
                folder, registry, target, version=version, wheels=wheels, downgrade_from=downgrade_from or ()
            )
    for name, digest in sorted(release.manifest.wheels.items()):
        print(f"sha256:{digest}  {name}")
    print(
        f"built {release.file}, {release.size / 1e6:.1f} MB: new cards get it\n"
        f"next, for boards that run: hushfleet fleet rollout {path} --to {release.version}"
    )
