"""A whole round of secure aggregation between devices, committee and aggregator, and what each of them refuses."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import BadInput, Malformed
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.spec import SecureSpec
from support.secure_aggregation import SumFleet, plan_of


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 24), st.sampled_from([16, 24, 32]), st.integers(1, 70), st.booleans(), st.integers(0, 2**32 - 1))
def test_the_sum_of_whoever_sent_opens_with_whoever_answers(
    devices: int, bits: int, size: int, padded: bool, seed: int
) -> None:
    fleet = SumFleet(devices, size, SecureSpec(bits, 2, 2, padded=padded))
    rng = np.random.default_rng(seed)
    secure = fleet.round()
    included = [name for name in secure.devices if rng.random() < 0.8] or secure.devices[:1]
    while len(included) < 2:
        included = secure.devices[:2]
    answering = rng.choice(secure.members, secure.rule.threshold, replace=False)
    opened, _ = secure.opened(fleet.sums(secure, included), fleet.answers(secure, included, answering))
    assert opened.tolist() == fleet.plain(included).tolist()


def test_masks_stay_as_they_are() -> None:
    """Golden: a board and its aggregator may be of different releases, and a round may outlast an update."""
    fleet = SumFleet(12, size=20)
    secure = fleet.round(3)
    masked = fleet.masked(secure, "pi-00004")
    answer = fleet.answers(secure, secure.devices, secure.members[:1])[secure.members[0]]
    found = [hashlib.sha256(each.astype("<u4").tobytes()).hexdigest()[:16] for each in (*masked, answer)]
    assert secure.members[:3] == GOLDEN_MEMBERS
    assert found == GOLDEN_MASKS


GOLDEN_MEMBERS = ["pi-00002", "pi-00009", "pi-00003"]
GOLDEN_MASKS = ["e7cf0ab0b35b02a3", "4fac3b6b1a307c9a", "ca1eb25eefcbe63d"]


def test_a_wrong_answer_is_left_out_and_named() -> None:
    fleet = SumFleet(30)
    secure = fleet.round()
    assert secure.rule.may_miss >= 2
    answers = fleet.answers(secure, secure.devices, secure.members)
    liar = secure.members[3]
    answers[liar] = (answers[liar] + np.uint32(1)) % np.uint32(fleet.prime)
    values, wrong = secure.opened(fleet.sums(secure, secure.devices), answers)
    assert (values.tolist(), wrong) == (fleet.plain(secure.devices).tolist(), [liar])


def test_an_answer_of_no_member_is_an_error() -> None:
    fleet = SumFleet(5)
    secure = fleet.round()
    answers = {**fleet.answers(secure, secure.devices, secure.members), "stranger": np.zeros(secure.width, np.uint32)}
    with pytest.raises(BadInput, match="stranger is not a member"):
        secure.opened(fleet.sums(secure, secure.devices), answers)


@pytest.mark.parametrize("change", ["round", "task", "rate", "size", "min_devices", "controls", "roster", "padded"])
def test_another_round_task_or_setting_has_other_masks(change: str) -> None:
    fleet, other = SumFleet(8), SumFleet(9 if change == "roster" else 8, size=60 if change == "size" else 50)
    spec = SecureSpec(16, 3 if change == "min_devices" else 2, 1, padded=change == "padded")
    plan = plan_of(other.membership_list, task="t2" if change == "task" else "sum-1",
                   round=2 if change == "round" else 1, rate=0.9999999 if change == "rate" else 1.0)  # fmt: skip
    if change == "controls":
        object.__setattr__(plan, "controls", {"clip_norm": 2.0})
    one, two = fleet.round(), SecureRound(spec, plan, other.membership_list, size=other.size)
    pair = fleet.agreements["pi-00001"], fleet.membership_list.key(2)
    assert one._info(1, 2) != two._info(1, 2)
    assert pair[0].key(pair[1], one._info(1, 2)) != pair[0].key(pair[1], two._info(1, 2))


@pytest.mark.parametrize("padded", [False, True])
def test_an_update_has_as_many_integers_as_its_round_says(padded: bool) -> None:
    fleet = SumFleet(20, 263, SecureSpec(16, 2, 2, padded=padded))
    secure = fleet.round()
    values, corrections = fleet.masked(secure, "pi-00001")
    assert (len(values), secure.sent) == (270 if padded else 263, len(values) + corrections.size)


def test_the_task_and_the_size_of_a_model_do_not_choose_the_committee() -> None:
    """Else an aggregator would try names until a committee suits it."""
    fleet = SumFleet(150)
    one, other = fleet.round(task="one"), fleet.round(task="other")
    assert one.members == other.members
    assert one.members != fleet.round(2).members


@pytest.mark.parametrize("included", [b"", b"\xff", b"\xff\xff\xff", b"\xff\xc1", b"\x80\x00"])
def test_hostile_bitmaps(included: bytes) -> None:
    secure = SumFleet(10).round()
    with pytest.raises(Malformed, match=r"does not fit|the sum has 1"):
        secure.read_included(included)


def test_a_cohort_below_the_least_sum_is_refused() -> None:
    with pytest.raises(BadInput, match="a sum needs 20 or more"):
        SumFleet(10, spec=SecureSpec(16, 20, 1)).round()
