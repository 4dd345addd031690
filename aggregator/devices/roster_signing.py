"""A roster is signed where the operator's key lies, which may be a machine that knows nothing else of the fleet.

What is to be signed is a roster without a signature, with the number at which it was written. Beside the key lies, for
each federation, the last roster that it signed: changes are shown against that, and an older list is not signed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hushfleet import atomic_file
from hushfleet.aggregator.devices.roster_file import last_signed
from hushfleet.aggregator.storage.identity_file import load
from hushfleet.errors import BadInput, WireError
from hushfleet.secure.roster import Roster, RosterContent
from hushfleet.wire.format.identity import Identity


@dataclass(frozen=True)
class RosterChanges:
    """What a roster says that the one before it did not.

    :param added, removed, changed: ids of devices; `changed`: by another key.
    :param limits: what else is another, in words.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    limits: tuple[str, ...]

    @classmethod
    def between(cls, before: RosterContent | None, after: RosterContent | None) -> RosterChanges:
        """:param before, after: None: a list of nobody."""
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


class RosterSigner:
    """The operator's key of `file`, with the last roster that it signed for a federation beside it.

    Raises `BadInput` where there is no key.
    """

    def __init__(self, file: Path, federation: str) -> None:
        self._key: Identity = load(file)
        self.last_file = file.with_name(f"{file.name}.{federation}.roster")
        """Keep it with the key: what is older is not signed again."""
        self.last = last_signed(self.last_file, self._key.public_key)
        if self.last is None and self.last_file.exists():
            raise BadInput(
                f"{self.last_file} should be the last roster that this key has signed, and is not. Without it an older "
                "list could be signed again: put the right one back, or move it away if you know what boards there are"
            )

    def changes(self, wanted: Roster) -> RosterChanges:
        """Against the last roster that was signed here. Raises `BadInput` for what must not be signed."""
        if wanted.signature:
            raise BadInput("this roster is signed already: give the file of hushfleet fleet roster export")
        if self.last is not None and wanted.number <= self.last.number:
            raise BadInput(
                f"the file has the number {wanted.number}, and {self.last.name} was signed here since: it may bring "
                "back boards that were locked out. Export again (hushfleet fleet roster export) and sign that"
            )
        return RosterChanges.between(self.last, wanted)

    def sign(self, wanted: Roster, out: Path) -> Roster:
        """Signs, and writes the roster beside the key, then to `out`. Raises `BadInput` or `StoreError`."""
        self.changes(wanted)
        signed = wanted.content.signed(self._key, after=0 if self.last is None else self.last.number)
        for file in (self.last_file, out):
            atomic_file.write_whole(file, signed.to_bytes(), durable=True)
        self.last = signed
        return signed


def read_roster(file: Path) -> Roster:
    """A roster, signed or not. Raises `BadInput`."""
    try:
        return Roster.from_bytes(file.read_bytes())
    except (OSError, WireError) as error:
        raise BadInput(f"{file} is no roster that can be read: {error}") from error


def _keys(roster: RosterContent | None) -> dict[str, bytes]:
    return {} if roster is None else {device: roster.key(index) for index, device in enumerate(roster.devices)}


def _limits(before: RosterContent, after: RosterContent) -> tuple[str, ...]:
    named = (
        ("at least {:g} of the boards are honest", before.honest_fraction, after.honest_fraction),
        ("no sum of fewer than {:g} boards is opened", before.min_devices, after.min_devices),
    )
    return tuple(f"{words.format(new)} (before: {old:g})" for words, old, new in named if old != new)
