"""How large a committee is, how many of its members may be corrupt, and how many may be missing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

MOST_MEMBERS = 64
_CHANCE = 1e-9  # of more corrupt members than a committee stands


@dataclass(frozen=True)
class CommitteeRule:
    """The numbers of a committee; a function of public numbers, so that every board finds the same.

    :param members: m.
    :param corrupt: c, how many members the aggregator may have on its side.
    :param secrecy: T: so many shares of a mask say nothing of it. 2 T >= m + c, so that of two different sets of
        devices only one can ever be opened, as each honest member answers once.
    :param packed: L, secrets in one polynomial.
    """

    members: int
    corrupt: int
    secrecy: int
    packed: int

    @property
    def threshold(self) -> int:
        """t: how many answers open a sum."""
        return self.secrecy + self.packed

    @property
    def may_miss(self) -> int:
        """How many members may never answer."""
        return self.members - self.threshold

    def width(self, count: int) -> int:
        """Values of a share of `count` values."""
        return -(-count // self.packed)


@lru_cache(maxsize=256)
def committee_rule(cohort: int, *, honest_fraction: float, missing_fraction: float = 0.125) -> CommitteeRule:
    """For a cohort of so many devices, of which at least `honest_fraction` are honest.

    :param missing_fraction: of the members that may never answer.
    """
    members = min(cohort, MOST_MEMBERS)
    bad = math.floor((1 - honest_fraction) * cohort + 1e-9)
    corrupt = _most_corrupt(cohort, bad, members)
    secrecy = max(1, -(-(members + corrupt) // 2))
    missing = min(math.floor(missing_fraction * members + 1e-9), max(0, members - secrecy - 1))
    return CommitteeRule(members, corrupt, secrecy, max(0, members - secrecy - missing))


def _most_corrupt(cohort: int, bad: int, members: int) -> int:
    """The least c that a draw of `members` among `cohort` exceeds with a chance of at most 1e-9."""
    whole, tail = math.comb(cohort, members), 0
    for count in range(min(bad, members), -1, -1):
        tail += math.comb(bad, count) * math.comb(cohort - bad, members - count)
        if tail > _CHANCE * whole:
            return count
    return 0
