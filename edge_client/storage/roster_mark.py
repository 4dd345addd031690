"""What a board keeps of the newest roster that its operator has signed, so that no older one is taken."""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.config.schema import Checked, Count
from hushfleet.config.spec import Digest
from hushfleet.secure.roster import Roster


@dataclass(frozen=True)
class RosterMark(Checked):
    """:param number: of the roster.
    :param digest: of all that was signed.
    :param name: for people.
    :param devices: how many it names.
    """

    number: Count
    digest: Digest
    name: str
    devices: Count

    @staticmethod
    def scope(federation: str, operator: bytes) -> str:
        """Under which a store keeps it.

        :param operator: its public key.
        """
        return f"{federation} {operator.hex()}"

    @classmethod
    def of(cls, roster: Roster) -> RosterMark:
        return cls(roster.number, roster.digest(), roster.name, len(roster.devices))
