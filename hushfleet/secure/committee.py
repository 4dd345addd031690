"""Computes the size of a committee, and how many of its members may be corrupt or missing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

MOST_MEMBERS = 96
DROP_OUT = 0.05
"""The expected share of devices that drop out in a round."""
_TOO_MANY_CORRUPT = 10**18  # at most one draw in this many; docs/privacy.md gives the number of draws
_EXACT = 1e-9  # a share times a number of devices this close to a whole number counts as this number
_GIVEN_UP = 0.02  # share of the rounds that fail for too few answers


@dataclass(frozen=True)
class CommitteeRule:
    """The numbers of a committee; a function of public numbers, so that every board computes the same.

    :param members: m.
    :param corrupt: c, number of members that may collude with the aggregator.
    :param secrecy: T: this many shares of a mask reveal nothing about it. 2 T >= m + c, and 3 T >= 2 m + c - 2: for any
        sets of devices that the members are asked for, only the sum over one set can be learned (docs/privacy.md).
    :param packed: L, number of secrets in one polynomial.
    """

    members: int
    corrupt: int
    secrecy: int
    packed: int

    @property
    def threshold(self) -> int:
        """t: number of answers that open a sum."""
        return self.secrecy + self.packed

    @property
    def may_miss(self) -> int:
        """Number of members that may never answer."""
        return self.members - self.threshold

    def width(self, count: int) -> int:
        """Returns the number of values in a share of `count` values."""
        return -(-count // self.packed)


@lru_cache(maxsize=256)
def committee_rule(
    cohort: int, *, honest_fraction: float, membership_list: int | None = None, drop_out: float = DROP_OUT
) -> CommitteeRule:
    """Returns the rule for a cohort of `cohort` devices.

    :param honest_fraction: smallest honest share of the devices in the roster.
    :param membership_list: number of devices in the membership list; None: as many as the cohort.
    :param drop_out: the probability that a member never answers; a round then has enough answers in 98 of 100 cases,
        unless that leaves no room for a secret.

    `packed` is 0 if there is no such committee.

    >>> rule = committee_rule(10, honest_fraction=0.9)
    >>> rule.members, rule.corrupt
    (10, 1)
    """
    members = min(cohort, MOST_MEMBERS)
    devices = max(cohort, membership_list or 0)
    corrupt = _most_corrupt(devices, honest_fraction=honest_fraction, drawn=members)
    secrecy = max(1, -(-(members + corrupt) // 2), -(-(2 * members + corrupt - 2) // 3))
    room = members - secrecy
    may_miss = max(0, min(_most_missing(members, drop_out), room - 1))
    return CommitteeRule(members, corrupt, secrecy, max(0, room - may_miss))


@lru_cache(maxsize=256)
def _most_corrupt(devices: int, *, honest_fraction: float, drawn: int) -> int:
    """Returns the least c such that more than c of the `drawn` among `devices` are corrupt in at most one of 10^18
    draws."""
    bad = corrupt_devices(devices, honest_fraction=honest_fraction)
    good, most = devices - bad, min(bad, drawn)
    whole, tail = math.comb(devices, drawn), 0
    draws = math.comb(bad, most) * math.comb(good, drawn - most)  # with `count` corrupt ones
    for count in range(most, -1, -1):  # the upper tail of the hypergeometric distribution, exactly
        tail += draws
        if tail * _TOO_MANY_CORRUPT > whole:
            return count
        # without a remainder; two binomials for each count would take a board hours with 100,000 devices
        draws = draws * count * (good - drawn + count) // ((bad - count + 1) * (drawn - count + 1))
    return 0


def corrupt_devices(devices: int, *, honest_fraction: float) -> int:
    """Returns the largest number of a membership list's devices that may be corrupt.

    >>> corrupt_devices(100, honest_fraction=0.9)
    10
    """
    return math.floor((1 - honest_fraction) * devices + _EXACT)


def least_honest(min_devices: int, *, devices: int, honest_fraction: float, drawn: int) -> int:
    """Returns how many devices of the smallest sum are honest if all corrupt ones are in it; 0: possibly none.

    :param devices: number in the roster.
    :param drawn: number in the cohort.

    >>> least_honest(90, devices=100, honest_fraction=0.9, drawn=100)
    80
    """
    corrupt = _most_corrupt(devices, honest_fraction=honest_fraction, drawn=min(drawn, devices))
    return max(0, min_devices - corrupt)


def _most_missing(members: int, drop_out: float) -> int:
    tail = 0.0
    for count in range(members, -1, -1):
        tail += math.comb(members, count) * drop_out**count * (1 - drop_out) ** (members - count)
        if tail > _GIVEN_UP:
            return count
    return 0
