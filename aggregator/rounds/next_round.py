"""Decides who can take part in the next round, and says why too few can."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hushfleet.aggregator.results.fleet_state import Shortfall
from hushfleet.aggregator.rounds.policy import FOR_GOOD
from hushfleet.aggregator.rounds.schedule import moment_text
from hushfleet.aggregator.rounds.thresholds import Thresholds
from hushfleet.durations import Period

UNKNOWN_S = 86400.0
"""A board without budget counts again after this time, if nothing is known of its period."""


class _Decline(NamedTuple):
    until: float
    of_period: bool  # it holds until the present period ends
    session: int


class Declines:
    """The declines that also hold in the next round. Each speaks for its device alone.

    In a fleet a decline about the budget holds until the present period ends, or for `UNKNOWN_S`; every other one for a
    deadline. It ends earlier if the device starts anew, because its owner may have changed something, and if an update
    of it is accepted. At the beginning of a period a board's clock may be late, so the decline holds for less.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._known: dict[str, _Decline] = {}

    def note(self, device: str, code: str, *, at: float, period: Period | None, of_fleet: bool, session: int) -> None:
        """:param at: unix seconds.
        :param period: of the limits of the fleet's cards; None if they have none, or are not known.
        :param session: the device's session at the decline."""
        if code not in FOR_GOOD:
            return
        until, of_period = at + self._deadline_s, False
        if code == "budget" and of_fleet and period is None:
            until = at + UNKNOWN_S
        elif code == "budget" and period is not None:
            in_time = period.start + min(UNKNOWN_S, (period.stop - period.start) / 10)
            of_period = at >= in_time
            until = period.stop if of_period else in_time
        self._known[device] = _Decline(until, of_period, session)

    def drop(self, device: str) -> None:
        self._known.pop(device, None)

    def hold(self, now: float, session: Callable[[str], int]) -> dict[str, float]:
        """Returns the devices whose declines hold at `now`, and when their periods end; 0 for other reasons.

        :param session: returns the present session of a device.
        """
        return {
            device: known.until if known.of_period else 0.0
            for device, known in self._known.items()
            if now < known.until and session(device) == known.session
        }


@dataclass(frozen=True)
class Eligible:
    """Who can take part in the next round. Every device that may take part at all is in exactly one of these sets.

    :param spent: cannot pay until this time, unix seconds; infinity: never again within the limits of its card.
    :param declined: has declined for a reason that still holds.
    :param unlisted: not in the valid roster of secure sums.
    :param absent: can take part when it comes.
    """

    able: frozenset[str]
    spent: Mapping[str, float]
    declined: frozenset[str]
    unlisted: frozenset[str]
    absent: frozenset[str]

    def possible(self, at: float) -> int:
        """Returns how many could take part at this time, unix seconds, if all that are absent came."""
        return len(self.able) + len(self.absent) + sum(frees <= at for frees in self.spent.values())

    def waiting(self, round: int, needed: Thresholds, *, zone: str) -> Shortfall:
        """Returns what the round waits for, as counts."""
        ends = [at for at in self.spent.values() if math.isfinite(at)]
        return Shortfall(
            round,
            able=len(self.able),
            min_devices=needed.devices,
            min_updates=needed.updates,
            least_updates=needed.least,
            absent=len(self.absent),
            unlisted=len(self.unlisted),
            declined=len(self.declined),
            spent=len(ends),
            frees=min(ends, default=None),
            spent_for_good=len(self.spent) - len(ends),
            timezone=zone,
        )


def participants(
    accepted: Iterable[str],
    *,
    present: Collection[str],
    listed: Collection[str] | None,
    spent: Mapping[str, float],
    declined: Mapping[str, float],
) -> Eligible:
    """Sorts the devices that may take part; what keeps a device out for longest is named first.

    :param listed: devices of the valid roster with their present keys; None: no roster is needed.
    :param spent: as `Budgets.spent`.
    :param declined: as `Declines.hold`.
    """
    devices = set(accepted)
    until = {device: max(spent.get(device, 0.0), declined.get(device, 0.0)) for device in devices}
    poor = {device: at for device, at in until.items() if at}
    left = devices - poor.keys()
    refusing = left & declined.keys()
    left -= refusing
    unlisted = set[str]() if listed is None else left.difference(listed)
    left -= unlisted
    able = left.intersection(present)
    return Eligible(frozenset(able), poor, frozenset(refusing), frozenset(unlisted), frozenset(left - able))


def shortfall_text(waiting: Shortfall, *, now: float) -> str:
    """Says what a round waits for: `round 3 waits: 11 of the 20 boards that it needs can take part; 14 have spent ...`.

    :param now: unix seconds.
    """
    ends = "" if waiting.frees is None else moment_text(waiting.frees, now=now, zone=waiting.timezone)
    counts = (
        (waiting.spent, f"have spent their period, which ends {ends}"),
        (waiting.spent_for_good, "have spent all that their cards allow"),
        (waiting.declined, "have declined the last round"),
        (waiting.unlisted, "are not in the roster"),
        (waiting.absent, "are not there"),
    )
    why = "".join(f"; {count} {words}" for count, words in counts if count)
    return f"round {waiting.round} waits: {waiting.able} of {waiting.needed} needed boards can take part{why}"


def shortfall_advice(waiting: Shortfall) -> str:
    """Says what an operator can do for a round that waits."""
    if waiting.spent_for_good:
        more = (
            "If owners allow more than their cards say ([limits] in DEVICE.toml), write it into [device.limits] of "
            "fleet.toml, too, and start the aggregator again"
        )
    elif waiting.unlisted:
        more = "Sign the next roster: hushfleet fleet roster sign DIR"
    else:
        more = "Nothing, if more boards come by themselves or are free again"
    keys = [
        f"round.{key}={max(1, waiting.able)}"
        for key in ("min_devices", "min_updates")
        if getattr(waiting, key) > waiting.able
    ]
    if not waiting.able:
        return f"{more}."
    if waiting.able < waiting.least_updates:
        return f"{more}; fewer than {waiting.least_updates} cannot make a model of this task."
    return f"{more}; to open with those that can: hushfleet fleet set DIR {' '.join(keys)}."
