"""`hushfleet fleet roster export|sign|import`: the list of boards for secure aggregation, signed where the operator's
key is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.aggregator.fleet.commands.options import FILE, Dir, DirOrRun, Yes, opened
from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput
from hushfleet.privacy.terms import HONEST_FRACTION, MIN_DEVICES

if TYPE_CHECKING:
    from hushfleet.aggregator.storage.membership_list_signing import MembershipListChanges
    from hushfleet.secure.membership_list import MembershipList

app = typer.Typer()
KEYS = "Who signs"
roster = typer.Typer(
    no_args_is_help=True,
    help="""Have the list of boards for secure aggregation signed on another machine, where the operator's key is.

    A person with both the fleet's folder and the operator's key can add boards to the list and then read what single
    boards send. So another person should keep the key elsewhere (`--operator-key` of `hushfleet fleet init`).
    After boards were added, locked out or given new cards:

    1. here: `hushfleet fleet roster export greenhouse --out roster.unsigned`

    2. where the key is: `hushfleet fleet roster sign roster.unsigned --key operator.key --out roster.signed`

    3. here: `hushfleet fleet roster import greenhouse roster.signed`

    Rounds go on meanwhile with the last signed list. A fleet with `operator.key` in its own folder signs each change
    at once and needs none of these steps.
    """,
)
app.add_typer(roster, name="roster", rich_help_panel=KEYS)


@app.command("key", rich_help_panel=KEYS)
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


@roster.command("export")
def _export(
    path: DirOrRun,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, for the machine that has the operator's "
"key.")],
    federation: Annotated[str, typer.Option(help="Of a run: name of its federation, as in the devices' files.")] = "default",
    honest_fraction: Annotated[float, typer.Option(min=0.01, max=1, help="Of a run: least share of honest devices. "
"Boards decline a task that assumes more.")] = HONEST_FRACTION,
    min_devices: Annotated[int, typer.Option(min=2, max=100_000, help="Of a run: fewest devices in a sum. Boards "
"decline a task that opens smaller sums.")] = MIN_DEVICES,
) -> None:  # fmt: skip
    """Write the list of boards for the operator to sign, and show what it changes.

    The list of a run without a fleet has all accepted devices whose key is known, and limits from the options; a
    fleet's limits are in fleet.toml. A run's signed list goes to its aggregator by `--roster`. Boards check it if
    `device.roster_key` in DEVICE.toml names the operator's key: nobody who runs the aggregator, or makes certificates,
    can then fill a sum with devices of their own, or assume more honest devices than the operator does.

    Examples:

    `hushfleet fleet roster export greenhouse --out roster.unsigned`

    `hushfleet fleet roster export runs/field --out roster.unsigned --federation greenhouse`
    """
    from hushfleet import atomic_file
    from hushfleet.aggregator.fleet.trust.membership import membership
    from hushfleet.aggregator.fleet.trust.membership_list import to_sign, waiting
    from hushfleet.aggregator.storage.board import membership_list_keys
    from hushfleet.secure.membership_list import MembershipList, MembershipListContent
    from hushfleet.user_files import checked_file
    from hushfleet.wire.format.topics import check_name

    checked_file(out)
    with membership(path) as boards:
        boards.done()
        if boards.decides is None:
            check_name(federation, "the federation's name")
            if not (keys := membership_list_keys(list(boards.members.values()))):
                raise BadInput(f"{path} knows no device by its key, so there is no list to write")
            content = MembershipListContent.of(
                keys, federation=federation, honest_fraction=honest_fraction, min_devices=min_devices
            )
            asked, changes = MembershipList.to_sign(content, number=int(time.time())), None
        else:
            folder, _ = boards.decides
            known = list(boards.members.values())
            asked, changes = to_sign(folder, known), waiting(folder, known)
            if not changes:
                print(f"nothing waits to be signed: the operator has signed this list of {len(asked.devices)} boards")
                return
    atomic_file.write_whole(out, asked.to_bytes(), durable=True)
    if changes is not None:
        _print_changes(changes)
    print(
        f"{len(asked.devices)} boards are in {out}; next, where the operator's key is:\n"
        f"  hushfleet fleet roster sign {out.name} --key operator.key --out roster.signed"
    )


@roster.command("sign")
@with_options
def _sign(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="List that `fleet roster export` wrote.", **FILE)],
    key: Annotated[Path, typer.Option(metavar="KEYFILE", help="The operator's private key.", **FILE)],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write: the signed list, for `fleet roster import`.")],
    yes: Yes = False,
) -> None:  # fmt: skip
    """Sign a list of boards, after showing what it changes. Needs no fleet's folder.

    Compare what it shows with what you know: each board that is added should be one that you, or somebody whom you
    trust, has set up, with the key that `hushfleet-edge status DEVICE.toml` prints on it. Boards that nobody has set
    up, in a list that you sign, let whoever runs the server read the updates of the others.

    The last list that was signed is kept beside the key, as KEYFILE.FEDERATION.last: an older one is refused.

    Example: `hushfleet fleet roster sign roster.unsigned --key operator.key --out roster.signed`
    """
    from hushfleet.aggregator.storage.membership_list_signing import MembershipListSigner, read_membership_list
    from hushfleet.user_files import checked_file

    checked_file(out)
    wanted = read_membership_list(file)
    signer = MembershipListSigner(key, wanted.federation)
    changes = signer.changes(wanted)
    before = "the first that this key signs for it" if signer.last is None else f"the last was {signer.last.number}"
    print(f"list {wanted.number} of the federation {wanted.federation}, {len(wanted.devices)} boards; {before}")
    _print_changes(changes, wanted)
    print(
        f"boards will take it that at least {wanted.honest_devices} of these {len(wanted.devices)} are honest, and "
        f"open no sum of fewer than {wanted.min_devices}"
    )
    if not yes:
        typer.confirm("sign it?", abort=True)
    signed = signer.sign(wanted, out)
    print(f"{signed.name} is in {out}; next, on the fleet's machine: hushfleet fleet roster import DIR {out.name}")


@roster.command("import")
def _import(path: Dir, file: Annotated[Path, typer.Argument(metavar="FILE", help="List that `fleet roster sign` wrote.", **FILE)]) -> None:  # fmt: skip
    """Import a list of boards that the operator has signed; it is used from the next round on.

    It refuses a list that is not signed by this fleet's operator, is of another federation, is not newer than the valid
    one, or has a board that has been locked out, forgotten or given a new card since.

    Example: `hushfleet fleet roster import greenhouse roster.signed`
    """
    from hushfleet.aggregator.fleet.trust.access import apply, locked
    from hushfleet.aggregator.fleet.trust.membership_list import describe_waiting, export_command, take, waiting
    from hushfleet.aggregator.fleet.trust.registry import boards_of

    with opened(path) as (folder, registry):
        apply(folder, registry)
        with locked(folder):
            boards = boards_of(folder)
            signed = take(folder, boards, file.read_bytes())
            left = waiting(folder, boards)
    print(f"{signed.name} of {len(signed.devices)} boards holds from the next round on")
    if left:
        print(f"{describe_waiting(left)}: {export_command(str(path))}")


def _print_changes(changes: MembershipListChanges, wanted: MembershipList | None = None) -> None:
    """Prints the changes.

    :param wanted: a membership list whose keys are shown, so that a person can compare them."""
    keys = {} if wanted is None else {device: wanted.key(index).hex() for index, device in enumerate(wanted.devices)}
    for word, devices in (("added", changes.added), ("removed", changes.removed), ("another key", changes.changed)):
        for device in devices:
            print(f"  {word:12} {device}  {keys.get(device, '')}".rstrip())
    for each in changes.limits:
        print(f"  {'changed':12} {each}")
    if not changes:
        print("  nothing is changed")
