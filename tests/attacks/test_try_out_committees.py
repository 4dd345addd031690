"""An aggregator with a tenth of the devices wants more of them in a committee than the rule counts on.

It may choose: the number of the round, the rate, and the key of a device of its own that is enrolled last. Held by: the
operator's random bytes, which nobody knows when keys are chosen; a highest round; and a tail of 10^-18 for each draw.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import pytest

from hushfleet.errors import BadInput
from hushfleet.secure.committee import committee_rule, corrupt_devices
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.spec import MAX_SECURE_ROUNDS, SecureSpec
from support.secure_aggregation import identity, plan_of

DEVICES, CORRUPT, TRIES = 200, 20, 300
NAMES = [f"d{number:03}" for number in range(DEVICES)]
OPERATOR = identity("operator")


def corrupt_members(membership_list: MembershipList, round: int = 1) -> int:
    """How many of the first `CORRUPT` devices are in the committee of a round."""
    spec = SecureSpec(16, min_devices=100, honest_devices=1, honest_fraction=0.9)
    return len(
        set(NAMES[:CORRUPT])
        & set(SecureRound(spec, plan_of(membership_list, round=round), membership_list, size=1).members)
    )


def with_last_key(key: bytes) -> MembershipList:
    """Signed by nobody: as membership lists were, before an operator's random bytes were in them."""
    keys = {name: hashlib.sha256(name.encode()).digest() for name in NAMES}
    return MembershipList.of({**keys, NAMES[0]: key})


def test_by_the_key_of_the_device_that_is_enrolled_last() -> None:
    tried = {
        key: corrupt_members(with_last_key(key))
        for key in (bytes([1, *divmod(n, 256)]) * 10 + b"kk" for n in range(TRIES))
    }
    expected = 96 * CORRUPT / DEVICES  # 9.6
    best = max(tried, key=lambda key: tried[key])
    assert tried[best] >= expected + 5  # what a search finds where it can look
    # The operator draws the random bytes when the keys are fixed, so the chosen key is worth no more than another.
    nonces = [hashlib.sha256(b"operator %d" % number).digest() for number in range(100)]
    found = [corrupt_members(with_last_key(best).signed(OPERATOR, nonce=nonce)) for nonce in nonces]
    assert abs(sum(found) / len(found) - expected) < 1  # the mean of 100 has a deviation of 0.22


def test_by_the_number_of_the_round() -> None:
    """Any of a million was taken, in any order."""
    membership_list = with_last_key(bytes(32))
    spec = SecureSpec(16, min_devices=100, honest_devices=1, honest_fraction=0.9)
    SecureRound(spec, plan_of(membership_list, round=MAX_SECURE_ROUNDS, rounds=1_000_000), membership_list, size=1)
    for number in (MAX_SECURE_ROUNDS + 1, 777_777):
        with pytest.raises(BadInput, match="is above 10000, the most"):
            SecureRound(spec, plan_of(membership_list, round=number, rounds=1_000_000), membership_list, size=1)


@pytest.mark.parametrize("devices", [1000, 100_000])
def test_by_all_that_may_be_chosen_together(devices: int) -> None:
    """The page's number: over every round, and every cohort that a rate can make, of one roster."""
    rule = committee_rule(devices, honest_fraction=0.9)
    bad = corrupt_devices(devices, honest_fraction=0.9)
    ways = sum(
        math.comb(bad, count) * math.comb(devices - bad, rule.members - count)
        for count in range(rule.corrupt + 1, rule.members + 1)
    )
    tail = float(Fraction(ways, math.comb(devices, rule.members)))
    assert tail <= 1e-18
    assert tail * MAX_SECURE_ROUNDS * devices <= 1e-14 * devices
    assert 1e-12 * 1_000_000 * 100_000 > 0.09  # as it was: a tenth, for 100,000 devices
