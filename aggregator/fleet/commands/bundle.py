"""`hushfleet fleet bundle`: build a release of the software that is installed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hushfleet
from hushfleet.aggregator.fleet.commands.setup import Dir, opened
from hushfleet.errors import BadSignature

app = typer.Typer()


@app.command("bundle")
def _bundle(
    path: Dir,
    python: Annotated[str, typer.Option(metavar="3.X", help="Python of the boards' system: 3.13 on Raspberry Pi OS Trixie, 3.11 on Bookworm.")] = "3.13",
    arch: Annotated[str, typer.Option(help="Architecture of the boards: aarch64 or x86_64.")] = "aarch64",
    version: Annotated[str, typer.Option(help="Version that boards will report: two to four numbers.")] = hushfleet.__version__,
    wheels: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder with the wheels of other packages; default: the package index.", exists=True, file_okay=False)] = None,
    downgrade_from: Annotated[list[str] | None, typer.Option(metavar="VERSION", help="Boards that run this version take it although it is not newer; it withdraws all versions up to this one; repeatable.")] = None,
    system: Annotated[bool, typer.Option("--system", help="It also renews what runs as root on a board, slots.pyz and the units; root must sign it, too.")] = False,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Leave the release unsigned, although a key is here, to be signed elsewhere.")] = False,
) -> None:  # fmt: skip
    """Build a release of the software that is installed here, for cards and for roll-outs.

    Other packages come from pip's index, with the versions and SHA-256 that this software knows of them, and are kept.
    The release is signed by `release.key` where that is in DIR. Where it lies on another machine, or more than one key
    must sign:

    1. here: `hushfleet fleet bundle greenhouse --version 0.3.1`

    2. where a key is: `hushfleet fleet sign hushfleet-0.3.1-cp313-aarch64.hfr --key release.key`

    3. here: `hushfleet fleet release greenhouse hushfleet-0.3.1-cp313-aarch64.hfr`

    Example: `hushfleet fleet bundle greenhouse --python 3.13 --version 0.3.1`
    """
    from hushfleet.aggregator.fleet.cards import ReleasePlatform, build_release, describe_signing
    from hushfleet.aggregator.fleet.releases import add_release
    from hushfleet.aggregator.observe.console import Console
    from hushfleet.aggregator.observe.progress import show_progress

    with opened(path) as (folder, registry):
        with show_progress(Console()):
            out = build_release(
                folder,
                registry,
                ReleasePlatform(python, arch),
                version=version,
                wheels=wheels,
                downgrade_from=downgrade_from or (),
                system=system,
                sign=not unsigned,
            )
        try:
            release = add_release(folder, registry, out)
        except BadSignature as error:
            print(f"built {out}, {out.stat().st_size / 1e6:.1f} MB; {error}.\n{describe_signing(folder, out)}")
            return
        out.unlink()
    for name, digest in sorted(release.manifest.wheels.items()):
        print(f"sha256:{digest}  {name}")
    print(
        f"built {release.file}, {release.size / 1e6:.1f} MB: new cards get it\n"
        f"next, for boards that run: hushfleet fleet rollout {path} --to {release.version}"
    )
