"""`hushfleet release`: make, sign and roll out the software of a fleet's boards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.options import FILE, Dir, WheelsFolder, Yes, opened
from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput, BadSignature
from hushfleet.version import __version__

if TYPE_CHECKING:
    from hushfleet.aggregator.fleet.trust.registry import FleetRegistry
    from hushfleet.release.statements import ReleaseKeys

release = typer.Typer(
    no_args_is_help=True,
    help="""Make releases of the boards' software, sign them, and roll them out.

    Examples:

    `hushfleet release make greenhouse --version 0.3.1`

    `hushfleet release rollout greenhouse --newest`

    Where a key is on another machine, or more than one must sign:

    `hushfleet release sign hushfleet-0.3.1-cp313-aarch64.hfr --key release.key`

    `hushfleet release add greenhouse hushfleet-0.3.1-cp313-aarch64.hfr`
    """,
)


@release.command("make")
@with_options
def _make(
    path: Dir,
    python: Annotated[str, typer.Option(metavar="3.X", help="Python of the boards' system: 3.13 on Raspberry Pi OS "
"Trixie, 3.11 on Bookworm.")] = "3.13",
    arch: Annotated[str, typer.Option(help="Architecture of the boards: aarch64 or x86_64.")] = "aarch64",
    version: Annotated[str, typer.Option(help="Version that boards will report: two to four numbers.")] = __version__,
    wheels: WheelsFolder = None,
    downgrade_from: Annotated[list[str] | None, typer.Option(metavar="VERSION", help="Boards that run this version take it although it is not newer; it withdraws all versions up to this one; repeatable.")] = None,
    system: Annotated[bool, typer.Option("--system", help="It also renews what runs as root on a board, slots.pyz and the units; root must sign it, too.")] = False,
    unsigned: Annotated[bool, typer.Option("--unsigned", help="Leave the release unsigned, although a key is here, to be signed elsewhere.")] = False,
) -> None:  # fmt: skip
    """Build a release of the software that is installed here, for cards and for roll-outs.

    Other packages come from pip's index, with the versions and SHA-256 that this software knows of them, and are kept.
    The release is signed by `release.key` where that is in DIR. Else it waits in `DIR/unsigned` to be signed elsewhere
    (`hushfleet release sign`) and added here (`hushfleet release add`).

    Example: `hushfleet release make greenhouse --python 3.13 --version 0.3.1`
    """
    from hushfleet.aggregator.fleet.software.cards import ReleasePlatform, build_release
    from hushfleet.aggregator.fleet.software.releases import add_release, describe_signing
    from hushfleet.aggregator.report.console import Console
    from hushfleet.aggregator.report.progress import show_progress

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
            made = add_release(folder, registry, out)
        except BadSignature as error:
            print(f"built {out}, {out.stat().st_size / 1e6:.1f} MB; {error}.\n{describe_signing(folder, out)}")
            return
        out.unlink()
    for name, digest in sorted(made.manifest.wheels.items()):
        print(f"sha256:{digest}  {name}")
    print(
        f"built {made.file}, {made.size / 1e6:.1f} MB: new cards get it\n"
        f"next, for boards that run: hushfleet release rollout {path} --to {made.version}"
    )


@release.command("sign")
@with_options
def _sign(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A release, or the statement on release keys of `release keys` or `fleet init`. The signature is added to it.", **FILE)],
    key: Annotated[Path, typer.Option(metavar="KEYFILE", help="The private key: a release key, or root's.", **FILE)],
    yes: Yes = False,
) -> None:  # fmt: skip
    """Sign a release, or with root's key a statement of who signs releases, after showing it. Needs no fleet's folder.

    Compare the SHA-256 with what the builder tells you, or with a release that you have built yourself; and public keys
    with what their owners tell you: who is named in a statement decides what boards run.

    Examples:

    `hushfleet release sign hushfleet-0.3.1-cp313-aarch64.hfr --key release.key`

    `hushfleet release sign release_keys.unsigned --key root.key`
    """
    from hushfleet import atomic_file
    from hushfleet.aggregator.storage.identity_file import load
    from hushfleet.release.archive import add_signature, check_payload, read_head
    from hushfleet.release.statements import read_keys

    identity = load(key)
    public = identity.public_key.hex()
    statement = read_keys(file.read_text("utf-8"))[0] if _is_statement(file) else None
    if statement is not None:
        if public not in statement.statement.signers:
            raise BadInput(f"{key} is not the root key of this statement, {' or '.join(statement.statement.signers)}")
        _print_keys(statement.statement)
    else:
        with file.open("rb") as opened_file:
            head = read_head(opened_file)
            check_payload(opened_file, head.manifest)
        manifest = head.manifest
        print(f"release {manifest.version} for {manifest.python} on {manifest.arch}, SHA-256 {manifest.payload_sha256}")
        if manifest.downgrade_from:
            print(f"  boards may go back to it from {', '.join(manifest.downgrade_from)}")
        if manifest.system:
            print("  it renews what runs as root on a board, and root must sign it, too")
        for name, digest in manifest.wheels.items():
            print(f"  {digest}  {name}")
        for each in sorted(head.signatures):
            print(f"  {'signed by' if head.is_signed_by(each.hex()) else 'WRONGLY signed by'} {each.hex()}")
    if not yes:
        typer.confirm(f"sign it by {public}?", abort=True)
    if statement is not None:
        statement = statement.with_signature(identity)
        atomic_file.write_whole(file, f"{statement.to_line()}\n".encode(), durable=True)
    signatures = add_signature(file, identity).signatures if statement is None else statement.signatures
    print(f"{len(signatures)} signed; next, on the fleet's machine: hushfleet release add DIR {file.name}")


@release.command("add")
def _add(
    path: Dir,
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Releases, or signed statements on release keys. Default: list the known releases.", **FILE)] = None,
) -> None:  # fmt: skip
    """Make releases known to the fleet, or who signs them, after checking the signatures.

    No board is told of a release before `release rollout`. A statement on release keys is told to boards at once, and
    the keys that it names must sign releases from then on.

    Examples:

    `hushfleet release add greenhouse hushfleet-0.3.1-cp313-aarch64.hfr`

    `hushfleet release add greenhouse release_keys.unsigned`
    """
    from hushfleet.aggregator.fleet.software.releases import Withdrawal, add_release, releases, take

    with opened(path) as (folder, registry):
        for file in files or ():
            if _is_statement(file):
                _print_keys(take(folder, file.read_text("utf-8")))
            else:
                add_release(folder, registry, file)
        known = releases(registry)
    withdrawn = Withdrawal.of(known)
    for each in known:
        is_out = withdrawn is not None and withdrawn.includes(each.version)
        print(
            f"{each.version}  {each.platform}  {each.size / 1e6:.1f} MB  {folder.releases / each.file}{'  withdrawn' * is_out}"
        )


@release.command("keys")
def _keys(
    path: Dir,
    new: Annotated[bool, typer.Option("--new", help="Name a new release key in DIR, in place of all earlier ones.")] = False,
    key: Annotated[list[str] | None, typer.Option(metavar="FILE|PUBLIC", help="Key that signs releases from now on, in place of all earlier ones; name all of them.")] = None,
    threshold: Annotated[int, typer.Option(min=1, help="Number of keys that must sign each release.")] = 1,
    root_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Root's private key. Default: DIR/root.key; without either the statement waits to be signed.", **FILE)] = None,
    next_root: Annotated[str | None, typer.Option(metavar="FILE", help="Private key of another root, which replaces the present one; with PUBLIC, 64 hex digits, the statement waits for its signature.")] = None,
    daily_key: Annotated[bool, typer.Option("--daily-key", help="Also make a new key for the daily statement of the newest release.")] = False,
) -> None:  # fmt: skip
    """Show root's statement of who signs releases; with --new or --key, name other keys.

    Boards that have received the statement refuse all keys that it does not name. Releases that such a key signed go
    on running, and must be signed again before they are rolled out.

    Root's key signs this statement, and nothing else. Keep `root.key` offline: only its owner can change the release
    keys, so this command shuts out a thief of a release key. If root's key is on another machine, the statement waits
    in DIR: `hushfleet release sign release_keys.unsigned --key root.key` there, then
    `hushfleet release add greenhouse release_keys.unsigned` here. Connected boards receive it within a minute, and
    check it with the root key on their card.

    Examples:

    `hushfleet release keys greenhouse`

    `hushfleet release keys greenhouse --new`

    `hushfleet release keys greenhouse --key PUBLIC --key PUBLIC --key PUBLIC --threshold 2`
    """
    from hushfleet.aggregator.fleet.software.releases import describe_signing, keys_in_force, name_keys, new_release_key
    from hushfleet.aggregator.fleet.trust.keys import read_public

    with opened(path) as (folder, _):
        if not (new or key):
            if threshold != 1 or root_key or next_root or daily_key:
                raise BadInput(
                    "name the keys that sign releases from now on: --new for a new one in DIR, or each with --key"
                )
            _print_keys(keys_in_force(folder))
            return
        successor = "" if next_root is None else read_public(next_root, "--next-root").hex()
        keys = [read_public(each, "--key").hex() for each in key or ()] or [new_release_key(folder)]
        holders = [root_key or folder.root_key, *([] if next_root is None else [Path(next_root)])]
        made, waits = name_keys(
            folder, keys=keys, threshold=threshold, new_daily_key=daily_key, next_root=successor, holders=holders
        )
        _print_keys(made)
        if waits is None:
            print("boards hear of it when they are connected; releases are to be signed by these keys from now on")
        else:
            print(
                f"nothing has changed yet; {waits} waits for root's signature.\n{describe_signing(folder, waits, 'root.key')}"
            )


@release.command("rollout")
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
    from hushfleet.aggregator.fleet.software.releases import check_signed
    from hushfleet.aggregator.fleet.software.rollout import begin, change

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
    from hushfleet.aggregator.fleet.software.rollout import board_rollouts, current, rollout_view

    view, rollout = rollout_view(registry, now=time.time()), current(registry)
    if view is None or rollout is None:
        print("no release is being rolled out")
        return
    print(descriptions.rollout(view))
    for board in board_rollouts(registry, rollout, now=time.time()):
        if board.why:
            print(f"  {board.device}: {board.why}")


def _print_keys(keys: ReleaseKeys) -> None:
    """Prints a statement of who signs releases."""
    print(f"statement {keys.number} of root {keys.root}")
    for key in keys.keys:
        print(f"  release key  {key}")
    print(f"  signatures   {keys.threshold} of these {len(keys.keys)} for each release")
    print(f"  daily key    {keys.newest_key}")
    if keys.next_root:
        print(f"  next root    {keys.next_root}")


def _is_statement(file: Path) -> bool:
    """Returns whether the file has statements on release keys, which are lines of JSON, and not a release."""
    with file.open("rb") as opened_file:
        return opened_file.read(1) == b"{"
