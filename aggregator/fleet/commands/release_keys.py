"""`hushfleet release keys|rotate`: who signs releases, here or elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.setup import Dir, opened

if TYPE_CHECKING:
    from hushfleet.release import ReleaseKeys

_FILE = {"exists": True, "dir_okay": False}


app = typer.Typer()


@app.command("keys")
def _keys(path: Dir) -> None:
    """Show root's statement in force: the keys that sign releases, and how many of them must."""
    from hushfleet.aggregator.fleet.release_keys import keys_in_force

    with opened(path) as (folder, _):
        print_keys(keys_in_force(folder))


@app.command("rotate")
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

    Root's key signs this statement, and nothing else. Keep `root.key` offline: only its owner can change the release
    keys, so this command shuts out a thief of a release key. If root's key is on another machine, the statement waits
    in DIR: `hushfleet release sign release_keys.unsigned --key root.key` there, then
    `hushfleet release add greenhouse release_keys.unsigned` here. Connected boards receive it within a minute, and check
    it with the root key on their card.

    Examples:

    `hushfleet release rotate greenhouse`

    `hushfleet release rotate greenhouse --key PUBLIC --key PUBLIC --key PUBLIC --threshold 2`
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
        print_keys(signed.statement)
        if len(holders) == len(signed.statement.signers):
            take(folder, signed.to_line())
            print("boards hear of it when they are connected; releases are to be signed by these keys from now on")
            return
        waits = folder.path / UNSIGNED_FILE
        atomic_file.write_whole(waits, f"{signed.to_line()}\n".encode(), durable=True)
        print(
            f"nothing has changed yet; {waits} waits for root's signature. Where root's key is:\n"
            f"  hushfleet release sign {waits.name} --key root.key\n"
            f"then here: hushfleet release add {path} {waits}"
        )


def print_keys(keys: ReleaseKeys) -> None:
    """Prints a statement of who signs releases."""
    print(f"statement {keys.number} of root {keys.root}")
    for key in keys.keys:
        print(f"  release key  {key}")
    print(f"  signatures   {keys.threshold} of these {len(keys.keys)} for each release")
    print(f"  daily key    {keys.newest_key}")
    if keys.next_root:
        print(f"  next root    {keys.next_root}")
