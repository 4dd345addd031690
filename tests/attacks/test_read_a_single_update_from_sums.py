"""An aggregator of a fleet with secure aggregation wants what one device sent.

It may say different things to different devices, ask for what it likes, keep everything, and have devices of its own.
Held by: one answer of a member for a round, for ever (the store of answers); enough members for one set only (the
committee's rule); keys that follow from all that was said. The exact argument is in docs/privacy.md, "Secure
aggregation", and `tests/hushfleet/secure/test_secrecy.py` tries every way to ask small committees.
"""

from __future__ import annotations

import numpy as np
import pytest

from hushfleet.errors import BadInput, Malformed
from hushfleet.secure.committee import CommitteeRule
from hushfleet.secure.masking import Masked
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.spec import SecureSpec
from support.secure_aggregation import SumFleet, plan_of

DEVICES = 24


@pytest.fixture
def fleet() -> SumFleet:
    return SumFleet(DEVICES)


def difference(fleet: SumFleet, secure: SecureRound, sets: list[list[str]], halves: list[list[str]]) -> object:
    """Opens two sums that differ by one device, of which each half of the committee answers one; the difference."""
    opened = []
    for included, members in zip(sets, halves, strict=True):
        opened.append(secure.opened(fleet.sums(secure, included), fleet.answers(secure, included, members))[0])
    return ((opened[0].astype(np.int64) - opened[1]) % fleet.prime).tolist()


def test_by_two_sums_that_differ_by_it(fleet: SumFleet) -> None:
    """If half of the members opened a sum, each half would open another one."""
    secure = fleet.round()
    victim, *others = secure.devices
    half = len(secure.members) // 2
    halves = [secure.members[:half], secure.members[half:]]
    with pytest.raises(BadInput, match="are needed"):
        difference(fleet, secure, [secure.devices, others], halves)
    secure.rule = CommitteeRule(DEVICES, 0, half - 1, 1)  # a rule without 2 T >= m + c
    assert difference(fleet, secure, [secure.devices, others], halves) == fleet.values(victim).tolist()


def test_by_devices_of_its_own_in_the_committee(fleet: SumFleet) -> None:
    """They answer both sets, and count twice; the rule has counted them as often."""
    fleet.spec = SecureSpec(16, 12, 1, honest_fraction=0.75)
    secure = fleet.round()
    assert secure.rule.corrupt >= 6
    own, honest = secure.members[: secure.rule.corrupt], secure.members[secure.rule.corrupt :]
    most = -(-len(honest) // 2)
    assert len(own) + most <= secure.rule.secrecy < secure.rule.threshold


def test_by_a_cohort_of_which_only_it_knows() -> None:
    """The victim is told of another rate than the rest, or of another membership list: nobody's masks are those of its
    sum."""
    fleet = SumFleet(DEVICES)
    told = fleet.round()
    plan = plan_of(fleet.membership_list, rate=0.99999999)
    other = SecureRound(fleet.spec, plan, fleet.membership_list, size=fleet.size)
    assert other.devices == told.devices
    victim, *rest = told.devices
    sums, single = fleet.sums(told, rest), fleet.masked(other, victim)
    mixed = Masked((sums.values + single.values) % fleet.prime, (sums.corrections + single.corrections) % fleet.prime)
    with pytest.raises(BadInput, match="contradict"):
        told.opened(mixed, fleet.answers(told, told.devices, told.members))
    with pytest.raises(BadInput, match="contradict"):
        other.opened(single, fleet.answers(other, told.devices, told.members))


def test_by_a_sum_of_one(fleet: SumFleet) -> None:
    secure = fleet.round()
    with pytest.raises(Malformed, match="the sum has 1 devices"):
        fleet.answers(secure, secure.devices[:1], secure.members[:1])


def test_by_an_answer_of_an_earlier_round(fleet: SumFleet) -> None:
    """An old answer fits neither the next round's masks nor the same round of another task."""
    first = fleet.round(1)
    answers = fleet.answers(first, first.devices, first.members)
    for later in (fleet.round(2), fleet.round(1, task="sum-2")):
        with pytest.raises(BadInput, match="contradict"):
            later.opened(fleet.sums(later, later.devices), {name: answers[name] for name in later.members})


def test_by_what_it_sent_alone(fleet: SumFleet) -> None:
    """Masked values and corrections are uniform; the same values in two rounds have nothing in common."""
    fleet.size = 40_000
    one, two = (fleet.masked(fleet.round(number), "pi-00003") for number in (1, 2))
    for parts in (one.values, one.corrections.reshape(-1), (one.values.astype(np.int64) - two.values) % fleet.prime):
        counts = np.bincount(parts.astype(np.int64) * 16 // fleet.prime, minlength=16)
        expected = len(parts) / 16
        assert abs(counts - expected).max() < 6 * np.sqrt(expected)
