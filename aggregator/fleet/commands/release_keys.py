"""`hushfleet fleet release-key show|rotate|sign|import`, `fleet sign` and `fleet key`: who signs releases, here or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.setup import Dir, opened
from hushfleet.errors import BadInput

if TYPE_CHECKING:
    from hushfleet.release import ReleaseKeys

_FILE = {"exists": True, "dir_okay": False}
Key = Annotated[Path, typer.Option(metavar="KEYFILE", help="The private key.", **_FILE)]
Yes = Annotated[bool, typer.Option("--yes", help="Sign without asking.")]


app = typer.Typer()
keys = typer.Typer(
    no_args_is_help=True,
    help="""Manage the keys that sign the releases of boards. The root key signs the list of these keys, and nothing else.

    Keep `root.key` offline: only its owner can change the release keys, so `rotate` shuts out a thief of a release
    key. If root's key is on another machine:

    1. here: `hushfleet fleet release-key rotate greenhouse`

    2. where root's key is: `hushfleet fleet release-key sign release_keys.unsigned --key root.key`

    3. here: `hushfleet fleet release-key import greenhouse release_keys.unsigned`

    Connected boards receive the statement within a minute, and check it with the root key on their card.
    """,
)
app.add_typer(keys, name="release-key")


@app.command("key")
def _key(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File of the private key; it is made if it does not exist.")
    ],
) -> None:
    """Make a private key, for root, releases or the operator, and print its public half. Needs no fleet's folder.

    For a key that is there already only the public half is printed.

    Example: `hushfleet fleet key operator.key`
    """
    from hushfleet.aggregator.storage.identity_file import load_or_create

    print(load_or_create(file).public_key.hex())


@keys.command("show")
def _show(path: Dir) -> None:
    """Show root's statement in force: the keys that sign releases, and how many of them must."""
    from hushfleet.aggregator.fleet.release_keys import keys_in_force

    with opened(path) as (folder, _):
        _print_keys(keys_in_force(folder))


@keys.command("rotate")
def _rotate(
    path: Dir,
    key: Annotated[list[str] | None, typer.Option(metavar="FILE|PUBLIC", help="Key that signs releases from now on; name all of them. Default: a new one in DIR.")] = None,
    threshold: Annotated[int, typer.Option(min=1, help="Number of keys that must sign each release.")] = 1,
    root_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Root's private key. Default: DIR/root.key; without either the statement waits to be signed.", **_FILE)] = None,
    next_root: Annotated[str | None, typer.Option(metavar="FILE", help="Private key of another root, which replaces the present one; with PUBLIC, 64 hex digits, the statement waits for its signature.")] = None,
    daily_key: Annotated[bool, typer.Option("--daily-key", help="Also make a new key for the daily statement of the newest release.")] = False,
) -> None:  # fmt: skip
    """Name the keys that sign releases from now on, in place of all earlier ones.

    Boards that have received the statement refuse all keys that it does not name. Releases that such a key signed go
    on running, and must be signed again before they are rolled out.

    Examples:

    `hushfleet fleet release-key rotate greenhouse`

    `hushfleet fleet release-key rotate greenhouse --key PUBLIC --key PUBLIC --key PUBLIC --threshold 2`
    """
    from hushfleet import atomic_file
    from hushfleet.aggregator.fleet.keys import read_public
    from hushfleet.aggregator.fleet.release_keys import UNSIGNED_FILE, new_release_key, next_statement, take
    from hushfleet.aggregator.storage.identity_file import load

    with opened(path) as (folder, _):
        root = root_key or folder.root_key
        successor = "" if next_root is None else read_public(next_root, "--next-root").hex()
        keys = [read_public(each, "--key").hex() for each in key or ()] or [new_release_key(folder)]
        signed = next_statement(folder, keys=keys, threshold=threshold, new_daily_key=daily_key, next_root=successor)
        holders = [file for file in (root, None if next_root is None else Path(next_root)) if file and file.is_file()]
        for file in holders:
            signed = signed.with_signature(load(file))
        _print_keys(signed.statement)
        if len(holders) == len(signed.statement.signers):
            take(folder, signed.to_line())
            print("boards hear of it when they are connected; releases are to be signed by these keys from now on")
            return
        waits = folder.path / UNSIGNED_FILE
        atomic_file.write_whole(waits, f"{signed.to_line()}\n".encode(), durable=True)
        print(
            f"nothing has changed yet; {waits} waits for root's signature. Where root's key is:\n"
            f"  hushfleet fleet release-key sign {waits.name} --key root.key\n"
            f"then here: hushfleet fleet release-key import {path} {waits}"
        )


@keys.command("sign")
def _sign(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Statement that `release-key rotate` or `fleet init` has left to be signed.", **_FILE)],
    key: Key,
    yes: Yes = False,
) -> None:  # fmt: skip
    """Sign with root's key a statement of who signs releases, after showing it. Needs no fleet's folder.

    Compare the public keys with what their owners tell you: who is named here decides what boards run.

    Example: `hushfleet fleet release-key sign release_keys.unsigned --key root.key`
    """
    from hushfleet import atomic_file
    from hushfleet.aggregator.storage.identity_file import load
    from hushfleet.release.statements import read_keys

    (signed,) = read_keys(file.read_text("utf-8"))
    identity = load(key)
    if identity.public_key.hex() not in signed.statement.signers:
        raise BadInput(f"{key} is not the root key of this statement, {' or '.join(signed.statement.signers)}")
    _print_keys(signed.statement)
    if not yes:
        typer.confirm("sign it?", abort=True)
    signed = signed.with_signature(identity)
    atomic_file.write_whole(file, f"{signed.to_line()}\n".encode(), durable=True)
    print(f"signed; next, on the fleet's machine: hushfleet fleet release-key import DIR {file.name}")


@keys.command("import")
def _import(path: Dir, file: Annotated[Path, typer.Argument(metavar="FILE", help="Statement that `release-key sign` has signed.", **_FILE)]) -> None:  # fmt: skip
    """Import a statement that root has signed: boards receive it, and its keys must sign releases.

    Example: `hushfleet fleet release-key import greenhouse release_keys.unsigned`
    """
    from hushfleet.aggregator.fleet.release_keys import take

    with opened(path) as (folder, _):
        _print_keys(take(folder, file.read_text("utf-8")))


@app.command("sign")
def _sign_release(
    file: Annotated[Path, typer.Argument(metavar="FILE.hfr", help="A release; the signature is added to it.", **_FILE)],
    key: Key,
    yes: Yes = False,
) -> None:  # fmt: skip
    """Sign a release, after showing what is in it. Needs no fleet's folder.

    Compare the SHA-256 with what the builder tells you, or with a release that you have built yourself.

    Example: `hushfleet fleet sign hushfleet-0.3.1-cp313-aarch64.hfr --key release.key`
    """
    from hushfleet.aggregator.storage.identity_file import load
    from hushfleet.release import add_signature, check_payload, read_head

    with file.open("rb") as opened_file:
        head = read_head(opened_file)
        check_payload(opened_file, head.manifest)
    manifest, identity = head.manifest, load(key)
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
        typer.confirm(f"sign it by {identity.public_key.hex()}?", abort=True)
    signed = add_signature(file, identity)
    print(f"{len(signed.signatures)} signed; next, on the fleet's machine: hushfleet fleet release DIR {file.name}")


def _print_keys(keys: ReleaseKeys) -> None:
    print(f"statement {keys.number} of root {keys.root}")
    for key in keys.keys:
        print(f"  release key  {key}")
    print(f"  signatures   {keys.threshold} of these {len(keys.keys)} for each release")
    print(f"  daily key    {keys.newest_key}")
    if keys.next_root:
        print(f"  next root    {keys.next_root}")
