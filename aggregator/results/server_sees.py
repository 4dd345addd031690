"""Writes the sentences on what the server of a run sees of its devices. They follow from facts, and only this file has
them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hushfleet.schema import Checked

MembershipListBy = Literal["aggregator", "operator", "simulation"]
"""The party that decides which devices may take part in secure aggregation."""


@dataclass(frozen=True)
class SumFacts(Checked):
    """The parties that could unmask the devices of secure aggregation.

    :param roster_by: `aggregator`: its own list, which nobody else has signed; `operator`: a list that the operator's
        key signed; `simulation`: one machine is the server and all devices.
    :param keys_in_folder: files in a fleet's folder with private keys of the operator, or for releases; None: this is
        not a fleet, and nothing is known about such files.
    """

    roster_by: MembershipListBy
    keys_in_folder: tuple[str, ...] | None = None

    def or_worse(self, before: SumFacts | None) -> SumFacts:
        """Merges the facts of an earlier start of the same run, because a key once in the folder may have been used."""
        if before is None or before.roster_by == "aggregator":
            return before or self
        keys = dict.fromkeys((*(before.keys_in_folder or ()), *(self.keys_in_folder or ())))
        return self if self.keys_in_folder is None else replace(self, keys_in_folder=tuple(keys))


_SENTENCES = {
    "unknown": "The server sees {sums} only if somebody else signed the list of devices; this result does not say who.",
    "simulation": "In the field the server sees {sums}, unless whoever runs it also holds the operator's key, which "
    "signs the list of devices. This is a simulation: one machine is the server and all devices.",
    "aggregator": "The server sees {sums} only if it follows the protocol: the devices take its own list of devices, "
    "so it could add devices of its own and read the updates of the others.",
    "operator": "The server sees {sums}, unless whoever runs it also holds the operator's key, which signed the list "
    "of devices.",
    "no keys": "The server sees {sums}, unless whoever runs it also holds the operator's key or one that signs "
    "releases; none of them lies in the fleet's folder.",
    "keys": "The server sees {sums}, unless whoever runs it also holds the operator's key or one that signs releases, "
    "as in this fleet: {keys} in its folder.",
}


def server_sees(facts: SumFacts | None, *, min_devices: int | None = None) -> str:
    """Returns a sentence on what the server sees with secure aggregation, and which key this depends on.

    :param facts: None: not known, because the file is of an earlier version.
    :param min_devices: the smallest number of devices in a sum; None: not known.
    """
    case, named = "unknown" if facts is None else str(facts.roster_by), ""
    if facts is not None and facts.roster_by == "operator" and facts.keys_in_folder is not None:
        *others, last = facts.keys_in_folder or [""]
        case = "keys" if last else "no keys"
        named = f"{', '.join(others)} and {last} lie" if others else f"{last} lies"
    sums = "nothing but sums" + ("" if min_devices is None else f" of at least {min_devices} devices")
    return _SENTENCES[case].format(sums=sums, keys=named)
