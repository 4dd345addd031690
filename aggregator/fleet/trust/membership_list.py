"""The membership list for secure aggregation: as the registry asks for it, as the operator has signed it, and the
difference.

If the operator's private key is in the fleet's folder, `access.apply` signs each change. If the key is elsewhere, a
change waits: the list is exported, signed there, and imported here. Until then rounds use the valid membership list; a
board in it that is locked out cannot reach the broker, and counts as missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from hushfleet import atomic_file
from hushfleet.aggregator.fleet.trust import keys
from hushfleet.aggregator.fleet.trust.folder import FleetFolder
from hushfleet.aggregator.storage.board import Board, membership_list_keys
from hushfleet.aggregator.storage.membership_list_signing import MembershipListChanges
from hushfleet.errors import BadInput, WireError
from hushfleet.secure.membership_list import MembershipList, MembershipListContent
from hushfleet.wire.format.identity import Identity


def wanted(folder: FleetFolder, boards: Sequence[Board]) -> MembershipListContent | None:
    """Returns the list that the operator should sign now; None if no board has enrolled."""
    known = membership_list_keys(boards)
    if not known:
        return None
    sums = folder.config.secure_sums
    return MembershipListContent.of(
        known,
        federation=folder.config.federation,
        honest_fraction=sums.honest_fraction,
        min_devices=sums.min_devices,
    )


def held(folder: FleetFolder) -> MembershipList | None:
    """Returns the valid membership list, the last one that the operator has signed; None before the first."""
    operator = keys.operator_public(folder)
    with contextlib.suppress(OSError, WireError):
        return MembershipList.from_bytes(folder.membership_list.read_bytes(), operator=operator)
    return None


def waiting(folder: FleetFolder, boards: Sequence[Board]) -> MembershipListChanges:
    """Returns the changes that the operator has not signed yet; none while no board is enrolled."""
    asked, has = wanted(folder, boards), held(folder)
    return MembershipListChanges.between(has, has if asked is None else asked)


def sign_here(folder: FleetFolder, boards: Sequence[Board], operator: Identity) -> None:
    """Signs the list only if it has changed, because each signature draws other committees. Raises `StoreError`.

    If there is no board, the last membership list stays, so its number is not lost; the aggregator accepts none of its
    boards.
    """
    asked, has = wanted(folder, boards), held(folder)
    if asked is not None and (has is None or has.content != asked):
        _write(folder, asked.signed(operator, after=0 if has is None else has.number))


def to_sign(folder: FleetFolder, boards: Sequence[Board]) -> MembershipList:
    """Makes the list for the machine with the operator's key, with a number above the valid one.

    Raises `BadInput` if no board has enrolled.
    """
    asked, has = wanted(folder, boards), held(folder)
    if asked is None:
        raise BadInput(f"no board of {folder.path} has enrolled, so there is nothing to sign yet")
    return MembershipList.to_sign(asked, number=max(int(time.time()), 0 if has is None else has.number + 1))


def take(folder: FleetFolder, boards: Sequence[Board], data: bytes) -> MembershipList:
    """Takes a signed membership list, which is valid from the next round on.

    Raises `BadInput` for a membership list that must not be used, and `StoreError`.
    """
    try:
        signed = MembershipList.from_bytes(data, operator=keys.operator_public(folder))
    except WireError as error:
        raise BadInput(f"the operator of {folder.path} has not signed this membership list: {error}") from error
    federation, has = folder.config.federation, held(folder)
    if signed.federation != federation:
        raise BadInput(f"this membership list is of the federation {signed.federation}, and the fleet is {federation}")
    if has is not None and signed.number <= has.number:
        raise BadInput(
            f"{signed.name} is not newer than {has.name}, which holds: it may bring back boards that were locked out"
        )
    now = {row.device: row for row in boards}
    for index, device in enumerate(signed.devices):
        row = now.get(device)
        if row is None or row.is_blocked or row.public_key != signed.key(index):
            why = "is not a board of this fleet" if row is None else "has another key now"
            if row is not None and row.is_blocked:
                why = f"was locked out since ({row.reason})"
            raise BadInput(
                f"{device} is in this membership list, and {why}: export again and have that signed, so that it does "
                "not come back"
            )
    _write(folder, signed)
    return signed


def describe_waiting(changes: MembershipListChanges) -> str:
    """Describes what waits: `12 boards wait for a signed membership list, and 1 is to leave it`."""
    joining, leaving = len(changes.added) + len(changes.changed), len(changes.removed)
    if joining:
        told = f"{joining} board{'s wait' if joining > 1 else ' waits'} for a signed membership list"
        return told + f", and {leaving} {'are' if leaving > 1 else 'is'} to leave it" * bool(leaving)
    if leaving:
        return (
            f"{leaving} board{'s are' if leaving > 1 else ' is'} to leave the membership list, which waits to be signed"
        )
    return "the limits of the membership list have changed, which waits to be signed"


def export_command(folder: str = "DIR") -> str:
    """Returns the command that writes the list to be signed."""
    return f"hushfleet fleet roster export {folder} --out FILE"


def _write(folder: FleetFolder, signed: MembershipList) -> None:
    atomic_file.write_whole(folder.membership_list, signed.to_bytes(), durable=True)
