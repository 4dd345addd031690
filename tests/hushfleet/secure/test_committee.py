"""The numbers of a committee, against sums of whole numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.secure.committee import MOST_MEMBERS, committee_rule, least_honest


@given(st.integers(1, 300), st.floats(0.5, 1.0), st.integers(0, 1000))
def test_what_secrecy_needs(cohort: int, honest: float, others: int) -> None:
    rule = committee_rule(cohort, honest_fraction=honest, membership_list=cohort + others)
    assert rule.members == min(cohort, MOST_MEMBERS)
    assert 2 * rule.secrecy >= rule.members + rule.corrupt
    assert 3 * rule.secrecy >= 2 * rule.members + rule.corrupt - 2
    assert rule.secrecy >= 1
    if rule.packed:
        assert rule.threshold + rule.may_miss == rule.members
        assert rule.may_miss >= 0


@pytest.mark.parametrize(("devices", "bad"), [(40, 4), (500, 50), (1000, 200)])
def test_more_corrupt_members_than_that_are_drawn_once_in_10_to_the_18(devices: int, bad: int) -> None:
    rule = committee_rule(devices, honest_fraction=1 - bad / devices)
    m = rule.members

    def chance_above(count: int) -> float:
        ways = sum(math.comb(bad, n) * math.comb(devices - bad, m - n) for n in range(count + 1, min(bad, m) + 1))
        return ways / math.comb(devices, m)

    assert chance_above(rule.corrupt) <= 1e-18
    assert rule.corrupt == 0 or chance_above(rule.corrupt - 1) > 1e-18


@pytest.mark.parametrize(("devices", "drawn"), [(1000, 300), (100_000, 50_000)])
def test_the_honest_devices_of_a_sum_by_logarithms(devices: int, drawn: int) -> None:
    """By a sum of binomials for each number, half of the largest membership list would take a quarter of an hour on a
    PC."""
    corrupt, bad = drawn - least_honest(drawn, devices=devices, honest_fraction=0.9, drawn=drawn), devices // 10

    def ways(n: int, k: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    def chance_above(count: int) -> float:
        whole = ways(devices, drawn)
        return sum(
            math.exp(ways(bad, n) + ways(devices - bad, drawn - n) - whole)
            for n in range(count + 1, min(bad, drawn) + 1)
        )

    assert chance_above(corrupt) <= 1e-18 < chance_above(corrupt - 1)


def test_a_committee_is_a_draw_of_the_membership_list_and_not_only_of_the_cohort() -> None:
    """A cohort of 20 among 1,000 may have more corrupt devices than a tenth."""
    assert committee_rule(20, honest_fraction=0.9).corrupt == 2
    assert committee_rule(20, honest_fraction=0.9, membership_list=1000).corrupt > 8


@pytest.mark.parametrize("cohort", [30, 100, 1000, 100_000])
def test_enough_members_answer(cohort: int) -> None:
    rule = committee_rule(cohort, honest_fraction=0.95)
    m, p = rule.members, 0.05
    enough = sum(math.comb(m, n) * p**n * (1 - p) ** (m - n) for n in range(rule.may_miss + 1))
    assert enough > 0.98
    assert rule.packed > 2


def test_where_most_may_be_corrupt_there_is_no_committee() -> None:
    assert committee_rule(100, honest_fraction=0.0).packed == 0
    assert committee_rule(1, honest_fraction=1.0).packed == 0
