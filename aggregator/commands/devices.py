"""`hushfleet devices`: manage the devices of a run. A running aggregator follows within a second."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hushfleet.errors import BadInput
from hushfleet.privacy.terms import HONEST_FRACTION, MIN_DEVICES

if TYPE_CHECKING:
    from hushfleet.aggregator.devices.register import DeviceRegister

WIDTH = 160  # a key stays on one line, to be copied

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder: `--out` of `hushfleet aggregator`.")]
_Id = Annotated[str, typer.Argument(metavar="ID", help="The device's id.")]


devices = typer.Typer(
    no_args_is_help=True,
    help="""List, add, forget and block the devices that an aggregator accepts. It may run meanwhile.

    Examples:

    `hushfleet devices list runs/field`

    `hushfleet devices add runs/field greenhouse-07 --key 64-HEX-DIGITS`

    `hushfleet devices block runs/field greenhouse-07 --reason stolen`
    """,
)


@devices.command("list")
def _list(run: _Run) -> None:
    """Show the known devices, and devices that announced themselves but were not accepted.

    A device is `known` by a key that you gave, `pinned` by the first key that it showed, `expected` before that,
    or `blocked`.
    """
    from rich.table import Table

    from hushfleet.aggregator.observe.console import Console
    from hushfleet.aggregator.observe.device_activity import DeviceActivity, add_activity
    from hushfleet.aggregator.results.events import iterate_events
    from hushfleet.aggregator.results.report.readable import ago

    now = time.time()
    with _opened(run) as register:
        known, refused = register.devices(), register.refused_births()
    activity: dict[str, DeviceActivity] = {}
    add_activity(activity, iterate_events(run / "events.jsonl"))
    console = Console(markup=False)  # the board itself reports its kind, which may contain markup
    console.width = max(console.width, WIDTH)
    table = Table("device", "state", "board", "rounds", "last seen", "key", box=None, header_style="bold")
    for row in known:
        key = "" if row.public_key is None else row.public_key.hex()
        state = row.state if row.blocked is None else f"blocked: {row.blocked}"
        active = activity.get(row.device, DeviceActivity())
        table.add_row(row.device, state, active.board, str(active.rounds), ago(active.last_seen, now), key)
    console.print(table if known else "no device is known")
    if refused:
        console.print("\nnot accepted; a key to add should be compared with what `status` prints on the board:")
        table = Table("device", "times", "last seen", "key", box=None, header_style="bold")
        for birth in refused:
            table.add_row(birth.device, str(birth.count), ago(birth.last_seen, now), birth.public_key.hex())
        console.print(table)


@devices.command("add")
def _add(
    run: _Run,
    device: _Id,
    key: Annotated[
        str | None, typer.Option(help="Public key of the device, 64 hex digits. Default: the first key that it shows.")
    ] = None,
) -> None:
    """Accept a device; also one that was blocked.

    Leave the key out only if the broker's access list binds a device's topics to the name in its certificate.
    """
    from hushfleet.aggregator.devices.devices_file import parse_key
    from hushfleet.aggregator.devices.register import KnownDevice
    from hushfleet.wire.format.topics import check_name, check_new_name

    check_name(device, "the device id")
    with _opened(run, may_create=True) as register:
        if register.device(device) is None:
            check_new_name(device, "the device id")
        given = None if key is None else parse_key(key, "--key")
        register.add([KnownDevice(device, given, pinned=given is None)])
        again = register.unblock(device)
        row = register.device(device)
    of_key = "the first key that is seen" if row is None or row.public_key is None else row.public_key.hex()
    print(f"{device} is {'accepted again' if again else 'accepted'}, with {of_key}")


@devices.command("forget")
def _forget(run: _Run, device: _Id) -> None:
    """Forget a device and its key, for example because its card was flashed again. Add it again with its new key.

    The new card's privacy ledger is empty: count what the old card has spent as spent by the same data.
    """
    with _opened(run) as register:
        if not register.forget(device):
            raise BadInput(f"{device} is not a known device of {run}; see: hushfleet devices list {run}")
    print(f"{device} is forgotten; to accept it with another key: hushfleet devices add {run} {device} --key KEY")


@devices.command("block")
def _block(
    run: _Run,
    device: _Id,
    reason: Annotated[str, typer.Option(help="Reason, shown in the list and in the device's log.")] = "by its operator",
) -> None:
    """Ignore all messages of a device and refuse its updates from now on, also in the open round."""
    from hushfleet.wire.format.topics import check_name

    check_name(device, "the device id")
    with _opened(run, may_create=True) as register:
        register.block(device, reason)
    print(f"{device} is blocked; to lift it: hushfleet devices add {run} {device}")


@devices.command("roster")
def _roster(
    run: _Run,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File to write, for the machine that has the operator's key.")],
    federation: Annotated[str, typer.Option(help="Name of the federation, as in the devices' files.")] = "default",
    honest_fraction: Annotated[float, typer.Option(min=0.01, max=1, help="Least share of honest devices. Boards decline a task that assumes more.")] = HONEST_FRACTION,
    min_devices: Annotated[int, typer.Option(min=2, max=100_000, help="Fewest devices in a sum. Boards decline a task that opens smaller sums.")] = MIN_DEVICES,
) -> None:  # fmt: skip
    """Write the list of devices for secure sums, to be signed: all accepted devices whose key is known.

    Boards can check the list if a key signs it that the aggregator does not have (`hushfleet fleet key`, and `device.roster_key` in DEVICE.toml):
    nobody who runs the aggregator, or makes certificates, can then fill a sum with devices of their own, or assume
    more honest devices than the operator does. Sign it on the machine with that key, and give the result to the aggregator:

    `hushfleet devices roster runs/field --out roster.unsigned`

    `hushfleet fleet roster sign roster.unsigned --key operator.key --out roster.signed`

    `hushfleet aggregator task.toml --broker mqtts://broker:8883 --roster roster.signed`
    """
    from hushfleet import atomic_file
    from hushfleet.secure.roster import Roster, RosterContent
    from hushfleet.user_files import checked_file
    from hushfleet.wire.format.topics import check_name

    checked_file(out)
    check_name(federation, "the federation's name")
    with _opened(run) as register:
        keys = register.roster_keys()
    if not keys:
        raise BadInput(f"{run} knows no device by its key, so there is no list to write")
    content = RosterContent.of(keys, federation=federation, honest_fraction=honest_fraction, min_devices=min_devices)
    atomic_file.write_whole(out, Roster.to_sign(content, number=int(time.time())).to_bytes(), durable=True)
    print(
        f"{len(keys)} devices are in {out}; next: hushfleet fleet roster sign {out} --key operator.key --out roster.signed"
    )


def _opened(run: Path, *, may_create: bool = False) -> DeviceRegister:
    from hushfleet.aggregator.devices.register import DeviceRegister
    from hushfleet.aggregator.storage.store import AggregatorStore

    if (run / "fleet.toml").exists():
        raise BadInput(
            f"{run} is a fleet's folder: use hushfleet fleet list|approve|block|forget, or fleet roster export"
        )
    if not (may_create or DeviceRegister.exists(run)):
        hint = "its aggregator is of an earlier version" if AggregatorStore.exists(run) else "it is not a run's folder"
        raise BadInput(f"{run} has no list of devices: {hint}")
    return DeviceRegister(run)
