"""`hushfleet fleet approve|renew|block|unblock|forget`: let boards in, and lock them out."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.fleet.commands.setup import Dir, Id, applied, opened
from hushfleet.errors import BadInput

app = typer.Typer()


@app.command("approve")
def _approve(
    path: Dir,
    device: Id,
    key: Annotated[str | None, typer.Option(help="First digits of the board's key, if several keys have come.")] = None,
) -> None:
    """Let a waiting board in. Compare its key with what `hushfleet-edge status DEVICE.toml` prints on the board."""
    with opened(path) as (_, registry):
        row = registry.needed(device)
        if row.state == "blocked":
            raise BadInput(
                f"{device} is locked out ({row.reason}); take it back first: hushfleet fleet unblock {path} {device}"
            )
        if row.public_key is not None:
            raise BadInput(
                f"{device} is known by another key. If its card was written anew: hushfleet fleet renew {path} {device} --new-card"
            )
        fitting = [
            each for each in registry.refused_requests(device) if each.public_key.hex().startswith((key or "").lower())
        ]
        if not fitting:
            raise BadInput(f"no board with such a key asks as {device}; who has asked: hushfleet fleet list {path}")
        if len(fitting) > 1:
            keys = ", ".join(each.public_key.hex()[:16] for each in fitting)
            raise BadInput(f"several boards ask as {device}; choose one by --key: {keys}")
        registry.approve(device, fitting[0].public_key)
    print(
        f"{device} is let in with the key {fitting[0].public_key.hex()}; it gets its certificate when it asks again, within minutes"
    )


@app.command("renew")
def _renew(
    path: Dir,
    device: Annotated[str | None, typer.Argument(metavar="[ID]", help="The board's id.")] = None,
    new_card: Annotated[bool, typer.Option("--new-card", help="The board has a new card: revoke the former key.")] = False,
    broker: Annotated[bool, typer.Option("--broker", help="Issue new certificates for the fleet's own processes, with the names of fleet.toml.")] = False,
    drop_names: Annotated[bool, typer.Option("--drop-names", help="Drop names that the broker's certificate had.")] = False,
) -> None:  # fmt: skip
    """Let a board in with a new card, or give the broker a new certificate.

    What was spent under a board's id so far is told to its new card, which counts it. A lock-out ends with the card
    that it was for. Certificates of boards that run out are renewed by the boards themselves.

    Examples:

    `hushfleet fleet renew greenhouse greenhouse-07 --new-card`

    `hushfleet fleet renew greenhouse --broker`
    """
    if broker and device is None and not new_card:
        _renew_own(path, drop_names=drop_names)
        return
    if not new_card or device is None or broker:
        raise BadInput(
            "boards renew their certificates by themselves; give ID --new-card for a board with a new card, or "
            "--broker for the broker's certificate"
        )
    from hushfleet.aggregator.devices.register import DeviceRegister

    with opened(path) as (folder, registry):
        row = registry.needed(device)
        with DeviceRegister(folder.aggregator) as register:
            known = register.device(device)
            registry.expect_new_card(device)
            register.forget(device)  # `apply` keeps a row without a key that the aggregator has blocked
        reason = (known and known.blocked) or (row.reason if row.state == "blocked" else None)
        waits = applied(folder, registry)
    print(f"{device} comes in with its next card; write it: hushfleet flash --fleet {path} --device {device}{waits}")
    if reason is not None:
        print(
            f"it was locked out ({reason}), and its next card is not; if it should be: hushfleet fleet block {path} {device}"
        )


def _renew_own(path: Path, *, drop_names: bool) -> None:
    from hushfleet.aggregator.fleet.access import locked, reload_brokers
    from hushfleet.aggregator.fleet.authority import Authority
    from hushfleet.aggregator.fleet.folder import FILE_NAME, FleetFolder
    from hushfleet.aggregator.fleet.own_certificates import ends, lost_names, write_own

    folder = FleetFolder(path)
    lost = lost_names(folder)
    if lost and not drop_names:
        raise BadInput(
            f"boards may know the broker as {', '.join(lost)}, and would be lost: keep this in broker.names of "
            f"{path / FILE_NAME}, or say --drop-names"
        )
    with locked(folder):
        authority = Authority.load(folder.ca / "ca.pem", folder.ca / "ca.key")
        write_own(folder.path, folder.config, authority, now=datetime.datetime.now(datetime.UTC))
        asked = reload_brokers(folder)
    end = datetime.datetime.fromtimestamp(ends(folder)["broker/broker"]).astimezone()
    print(
        f"the broker's certificate holds until {end:%Y-%m-%d}, for {', '.join(folder.config.broker.names)}; {asked} of 2 "
        "brokers run here and have taken it\nfleet service, its page and aggregator take theirs when they are started "
        "again: sudo systemctl restart hushfleet-fleet hushfleet-aggregator, or fleet up"
    )


@app.command("block")
def _block(
    path: Dir, device: Id, reason: Annotated[str, typer.Option(help="Reason, shown in the list and in the board's log.")] = "by its operator"
) -> None:  # fmt: skip
    """Lock a board out of rounds, broker and secure sums, even while it is connected."""
    with opened(path) as (folder, registry):
        registry.needed(device)
        registry.block(device, reason)
        waits = applied(folder, registry)
    print(f"{device} is locked out; to take it back: hushfleet fleet unblock {path} {device}{waits}")


@app.command("unblock")
def _unblock(path: Dir, device: Id) -> None:
    """Take back a board that an operator or the aggregator has locked out."""
    from hushfleet.aggregator.devices.register import DeviceRegister

    with opened(path) as (folder, registry):
        row = registry.needed(device)
        with DeviceRegister(folder.aggregator) as register:
            lifted = register.unblock(device)
        if row.state != "blocked" and not lifted:
            raise BadInput(f"{device} is not locked out; it is {row.state}")
        registry.unblock(device)
        waits = applied(folder, registry)
    print(f"{device} is no longer locked out{waits}")


@app.command("forget")
def _forget(path: Dir, device: Id) -> None:
    """Remove a board from the fleet. The privacy spent under its id stays recorded, in case the id returns."""
    with opened(path) as (folder, registry):
        registry.needed(device)
        registry.forget(device)
        waits = applied(folder, registry)
    print(f"{device} is forgotten{waits}")
