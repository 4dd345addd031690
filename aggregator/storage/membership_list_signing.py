"""Signs a membership list on the machine with the operator's key, which may have no other information about the fleet.

A list to be signed is a membership list without a signature, with the number under which it was written. The last list
of each federation that a key has signed is stored next to the key: changes are shown relative to it, and no older list
is signed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.errors import BadInput, WireError
from hushfleet.secure.membership_list import MembershipList, MembershipListContent
from hushfleet.wire.format.identity import Identity

_MOST_AHEAD_S = 366 * 86400


@dataclass(frozen=True)
class MembershipListChanges:
    """The differences between a membership list and the one before it.

    :param added: ids of devices.
    :param removed: ids of devices.
    :param changed: ids of devices with another key.
    :param limits: the other differences, in words.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    limits: tuple[str, ...]

    @classmethod
    def between(
        cls, before: MembershipListContent | None, after: MembershipListContent | None
    ) -> MembershipListChanges:
        """Compares two lists.

        :param before: None: an empty list.
        :param after: None: an empty list.
        """
        old, new = _keys(before), _keys(after)
        limits = () if before is None or after is None else _limits(before, after)
        return cls(
            added=tuple(sorted(new.keys() - old.keys())),
            removed=tuple(sorted(old.keys() - new.keys())),
            changed=tuple(sorted(each for each in old.keys() & new.keys() if old[each] != new[each])),
            limits=limits,
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.limits)


class MembershipListSigner:
    """Signs with the operator's key in `file`. The last list that it signed for a federation is stored next to it.

    Raises `BadInput` if there is no key, or if that list cannot be read, because an older one could be signed again.
    """

    def __init__(self, file: Path, federation: str) -> None:
        self._key: Identity = load(file)
        self._last_file = file.with_name(f"{file.name}.{federation}.last")  # it belongs to the key
        self.last = read_membership_list(self._last_file) if self._last_file.exists() else None

    def changes(self, wanted: MembershipList, *, now: float | None = None) -> MembershipListChanges:
        """Returns the changes since the last list that was signed here. Raises `BadInput` if it must not be signed.

        :param now: unix seconds; None: the clock.
        """
        if wanted.signature:
            raise BadInput("this membership list is signed already: give the file of hushfleet fleet roster export")
        last = 0 if self.last is None else self.last.number
        if wanted.number <= last:
            raise BadInput(
                f"list {wanted.number} is not newer than list {last}, the last that was signed here: it may bring back "
                "boards that were locked out. Export again (hushfleet fleet roster export) and sign that"
            )
        # an attacker who has the fleet's machine for a day must not use up the numbers of all later membership lists
        if wanted.number > max(last, time.time() if now is None else now) + _MOST_AHEAD_S:
            raise BadInput(
                f"the number of this list, {wanted.number}, is unix seconds, and more than a year ahead: set the clock "
                "of this machine or of the fleet's right, and export again"
            )
        return MembershipListChanges.between(self.last, wanted)

    def sign(self, wanted: MembershipList, out: Path) -> MembershipList:
        """Signs the membership list and writes it to `out`, after storing the list as the last one.

        Raises `BadInput` or `StoreError`.
        """
        self.changes(wanted)
        signed = wanted.content.signed(self._key, after=wanted.number - 1)
        atomic_file.write_whole(self._last_file, wanted.to_bytes(), durable=True)
        atomic_file.write_whole(out, signed.to_bytes(), durable=True)
        self.last = wanted
        return signed


def read_membership_list(file: Path) -> MembershipList:
    """Reads a membership list, signed or not. Raises `BadInput`."""
    try:
        return MembershipList.from_bytes(file.read_bytes())
    except (OSError, WireError) as error:
        raise BadInput(f"{file} is not a readable membership list: {error}") from error


def _keys(membership_list: MembershipListContent | None) -> dict[str, bytes]:
    return (
        {}
        if membership_list is None
        else {device: membership_list.key(index) for index, device in enumerate(membership_list.devices)}
    )


def _limits(before: MembershipListContent, after: MembershipListContent) -> tuple[str, ...]:
    named = (
        ("at least {:g} of the boards are honest", before.honest_fraction, after.honest_fraction),
        ("no sum of fewer than {:g} boards is opened", before.min_devices, after.min_devices),
    )
    return tuple(f"{words.format(new)} (before: {old:g})" for words, old, new in named if old != new)
