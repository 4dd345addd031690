"""`hushfleet fleet approve|renew|block|unblock|forget`: let boards in, and lock them out.

All take several boards, check all of them first, and also work on a run without a fleet, except `renew`.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from hushfleet.aggregator.fleet.commands.options import Dir, DirOrRun, IdsFile
from hushfleet.aggregator.report.options import with_options
from hushfleet.errors import BadInput

app = typer.Typer()

BOARDS = "Boards, in and out"
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="The boards' ids, or patterns in quotes: 'greenhouse-0*'.")
]


@app.command("approve", rich_help_panel=BOARDS)
@with_options
def _approve(
    path: DirOrRun,
    ids: Ids = None,
    file: IdsFile = None,
    key: Annotated[str | None, typer.Option(help="First digits of the board's key, if several keys have come.")] = None,
) -> None:
    """Let waiting boards in. Compare their keys with what `hushfleet-edge status DEVICE.toml` prints on each board.

    Example: `hushfleet fleet approve greenhouse greenhouse-07 greenhouse-08`
    """
    from hushfleet.aggregator.fleet.trust.membership import membership

    with membership(path) as boards:
        keys: dict[str, bytes] = {}
        for each in boards.chosen(
            ids, file, fits=lambda one: boards.asking[one.device] and one.public_key is None and not one.is_blocked
        ):
            if each.is_blocked:
                lift = f"hushfleet fleet unblock {path} {each.device}"
                raise BadInput(f"{each.device} is locked out ({each.reason}); take it back first: {lift}")
            if each.public_key is not None:
                anew = (
                    f"forget {path} {each.device}"
                    if boards.decides is None
                    else f"renew {path} {each.device} --new-card"
                )
                raise BadInput(
                    f"{each.device} is known by another key. If its card was written anew: hushfleet fleet {anew}"
                )
            fitting = [one for one in boards.asking[each.device] if one.hex().startswith((key or "").lower())]
            if not fitting:
                raise BadInput(
                    f"no board with such a key asks as {each.device}; who has asked: hushfleet fleet status {path}"
                )
            if len(fitting) > 1:
                choice = ", ".join(one.hex()[:16] for one in fitting)
                raise BadInput(f"several boards ask as {each.device}; choose one by --key: {choice}")
            (keys[each.device],) = fitting
        for device, accepted in keys.items():
            boards.store.approve(device, accepted)
            print(f"{device} is let in with the key {accepted.hex()}")
    if boards.decides is not None:
        print("each gets its certificate when it asks again, within minutes")


@app.command("renew", rich_help_panel=BOARDS)
@with_options
def _renew(
    path: Dir,
    ids: Ids = None,
    file: IdsFile = None,
    new_card: Annotated[bool, typer.Option("--new-card", help="The boards have new cards: revoke their former keys.")] = False,
    broker: Annotated[bool, typer.Option("--broker", help="Issue new certificates for the fleet's own processes, with "
"the names of fleet.toml.")] = False,
    drop_names: Annotated[bool, typer.Option("--drop-names", help="Drop names that the broker's certificate had.")] = False,
) -> None:  # fmt: skip
    """Let boards in with new cards, or give the broker a new certificate.

    What was spent under a board's id so far is told to its new card, which counts it. A lock-out ends with the card
    that it was for. Certificates of boards that run out are renewed by the boards themselves.

    Examples:

    `hushfleet fleet renew greenhouse greenhouse-07 --new-card`

    `hushfleet fleet renew greenhouse --broker`
    """
    from hushfleet.aggregator.fleet.trust.membership import membership

    named = bool(ids) or file is not None
    if broker and not named and not new_card:
        _renew_own(path, drop_names=drop_names)
        return
    if not new_card or not named or broker:
        raise BadInput(
            "boards renew their certificates by themselves; give ID --new-card for a board with a new card, or "
            "--broker for the broker's certificate"
        )
    with membership(path) as boards:
        if boards.decides is None:
            raise BadInput(f"{path} is a run without a fleet, which knows no cards: use fleet forget and fleet approve")
        chosen = boards.chosen(ids, file)
        for each in chosen:
            boards.decides[1].expect_new_card(each.device)
            boards.activity.unblock(each.device)  # a lock-out ends with the card that it was for
        waits = boards.done()
    named_again = " ".join(f"--device {each.device}" for each in chosen)
    devices = " ".join(each.device for each in chosen)
    print(f"let in with the next card: {devices}; write it: hushfleet flash --fleet {path} {named_again}{waits}")
    for each in chosen:
        if each.is_blocked:
            print(
                f"{each.device} was locked out ({each.reason}), and its next card is not; if it should be: "
                f"hushfleet fleet block {path} {each.device}"
            )


def _renew_own(path: Path, *, drop_names: bool) -> None:
    from hushfleet.aggregator.fleet.trust.access import locked, reload_brokers
    from hushfleet.aggregator.fleet.trust.authority import Authority
    from hushfleet.aggregator.fleet.trust.folder import FILE_NAME, FleetFolder
    from hushfleet.aggregator.fleet.trust.own_certificates import ends, lost_names, write_own

    folder = FleetFolder(path)
    lost = lost_names(folder)
    if lost and not drop_names:
        raise BadInput(
            f"boards may know the broker as {', '.join(lost)}, and would be lost: keep this in broker.names of "
            f"{path / FILE_NAME}, or say --drop-names"
        )
    with locked(folder):
        authority = Authority.load(folder.ca)
        write_own(folder.path, folder.config, authority, now=datetime.datetime.now(datetime.UTC))
        asked = reload_brokers(folder)
    end = datetime.datetime.fromtimestamp(ends(folder)["broker/broker"]).astimezone()
    print(
        f"the broker's certificate holds until {end:%Y-%m-%d}, for {', '.join(folder.config.broker.names)}; {asked} "
        "of 2 brokers run here and have taken it\nfleet service, its page and aggregator take theirs when they are "
        "started again: sudo systemctl restart hushfleet-fleet hushfleet-aggregator, or fleet up"
    )


@app.command("block", rich_help_panel=BOARDS)
@with_options
def _block(
    path: DirOrRun,
    ids: Ids = None,
    file: IdsFile = None,
    reason: Annotated[str, typer.Option(help="Reason, shown in the list and in the board's log.")] = "by its operator",
) -> None:
    """Lock boards out of rounds, broker and secure aggregation, even while they are connected.

    Examples:

    `hushfleet fleet block greenhouse greenhouse-07 --reason stolen`

    `hushfleet fleet block greenhouse --file lost.txt`
    """
    from hushfleet.aggregator.fleet.trust.membership import membership

    with membership(path) as boards:
        chosen = boards.chosen(ids, file, fits=lambda each: not each.is_blocked)
        for each in chosen:
            boards.store.block(each.device, reason)
        waits = boards.done()
    devices = " ".join(each.device for each in chosen)
    print(f"locked out: {devices}; to take back: hushfleet fleet unblock {path} {devices}{waits}")


@app.command("unblock", rich_help_panel=BOARDS)
@with_options
def _unblock(path: DirOrRun, ids: Ids = None, file: IdsFile = None) -> None:
    """Take back boards that an operator or the aggregator has locked out."""
    from hushfleet.aggregator.fleet.trust.membership import membership

    with membership(path) as boards:
        chosen = boards.chosen(ids, file, fits=lambda each: each.is_blocked)
        for each in chosen:
            if not each.is_blocked:
                raise BadInput(f"{each.device} is not locked out; it is {each.standing}")
        for each in chosen:
            boards.activity.unblock(each.device)
            boards.store.unblock(each.device)
        waits = boards.done()
    print(f"no longer locked out: {' '.join(each.device for each in chosen)}{waits}")


@app.command("forget", rich_help_panel=BOARDS)
@with_options
def _forget(path: DirOrRun, ids: Ids = None, file: IdsFile = None) -> None:
    """Remove boards. What a fleet's board has spent stays recorded under its id, in case the id returns.

    In a run without a fleet nothing is recorded: what a board has spent is known to its own card alone.
    """
    from hushfleet.aggregator.fleet.trust.membership import membership

    with membership(path) as boards:
        chosen = boards.chosen(ids, file)
        for each in chosen:
            boards.activity.unblock(each.device)
            boards.store.forget(each.device)
        waits = boards.done()
    print(f"forgotten: {' '.join(each.device for each in chosen)}{waits}")
