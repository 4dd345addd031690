"""Masks, answers and sums against polynomials in whole numbers; and what is done with wrong answers."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.errors import BadInput
from hushfleet.secure.committee import CommitteeRule, committee_rule
from hushfleet.secure.masking import Keystream, Masked, mask, unmask
from hushfleet.secure.prime_field import PRIMES, add_into, to_bytes
from hushfleet.secure.unmasking_share import (
    AnswerHeader,
    answer_bytes,
    decode_answer,
    encode_answer,
    unmasking_share,
)
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity

RULES = st.builds(
    lambda secrecy, packed, missing: CommitteeRule(secrecy + packed + missing, 0, secrecy, packed),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 6),
)


def key(device: int, member: int) -> bytes:
    return hashlib.sha256(b"%d-%d" % (device, member)).digest()


def value_at(points: list[int], values: list[int], target: int, prime: int) -> int:
    """Lagrange's formula."""
    total = 0
    for i, (at, value) in enumerate(zip(points, values, strict=True)):
        for j, other in enumerate(points):
            if i != j:
                value = value * (target - other) * pow(at - other, -1, prime) % prime
        total += value
    return total % prime


def summed(rule: CommitteeRule, values: np.ndarray, prime: int) -> tuple[Masked, dict[int, np.ndarray]]:
    """What the aggregator adds, and the answers of all members; `values` `[devices, k]`."""
    devices, width = range(len(values)), rule.width(values.shape[1])
    total = Masked(np.zeros(values.shape[1], np.uint32), np.zeros((rule.may_miss, width), np.uint32))
    for device in devices:
        masked = mask(values[device], [key(device, member) for member in range(rule.members)], rule, prime)
        add_into(total.values, masked.values, prime)
        add_into(total.corrections, masked.corrections, prime)
    answers = {
        m: np.array(unmasking_share([key(d, m) for d in devices], width, prime), np.uint32) for m in range(rule.members)
    }
    return total, answers


@given(st.sampled_from([5, *PRIMES.values()]), st.integers(1, 300), st.lists(st.binary(min_size=32, max_size=32)))
def test_an_answer_is_the_sum_of_the_keystreams_that_mask(prime: int, width: int, keys: list[bytes]) -> None:
    """A board's guardian draws the values without NumPy, and must draw those with which the devices mask."""
    total = sum((Keystream(key, prime).take(width).astype(np.int64) for key in keys), np.zeros(width, np.int64))
    assert unmasking_share(keys, width, prime) == (total % prime).tolist()


@given(st.sampled_from([16, 24, 32]), st.lists(st.integers(0, PRIMES[16] - 1)))
def test_an_answer_is_coded_without_arrays_as_with_them(bits: int, values: list[int]) -> None:
    header, identity = AnswerHeader.of("task", 1, "pi-1", b"", bits), Identity.from_bytes(bytes(32))
    data = encode_answer(header, values, identity=identity)
    assert decode_answer(data, public_key=identity.public_key).values.tolist() == values
    assert data[:-SIGNATURE_BYTES].endswith(to_bytes(np.array(values, np.uint32), bits))
    assert len(data) == answer_bytes(header, len(values))


@settings(max_examples=40)
@given(RULES, st.sampled_from([16, 24, 32]), st.integers(1, 40))
def test_a_mask_is_the_polynomial_through_the_shares(rule: CommitteeRule, bits: int, size: int) -> None:
    prime, width, t = PRIMES[bits], rule.width(size), rule.threshold
    keys = [key(7, member) for member in range(rule.members)]
    masked = mask(np.zeros(size, np.uint32), keys, rule, prime)
    shares = [Keystream(each, prime).take(width).tolist() for each in keys]
    points = list(range(1, t + 1))
    for index in range(size):
        row, column = divmod(index, width)
        of_column = [shares[member][column] for member in range(t)]
        assert masked.values[index] == value_at(points, of_column, -(row + 1), prime)
    for member in range(t, rule.members):
        for column in range(width):
            of_column = [shares[each][column] for each in range(t)]
            expected = value_at(points, of_column, member + 1, prime) - shares[member][column]
            assert masked.corrections[member - t, column] == expected % prime


@settings(max_examples=40)
@given(RULES, st.sampled_from([16, 24, 32]), st.integers(1, 5), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_any_t_answers_open_the_sum(rule: CommitteeRule, bits: int, devices: int, size: int, seed: int) -> None:
    prime, rng = PRIMES[bits], np.random.default_rng(seed)
    values = rng.integers(0, prime, (devices, size)).astype(np.uint32)
    total, answers = summed(rule, values, prime)
    chosen = rng.choice(rule.members, rule.threshold, replace=False)
    opened = unmask(total, {int(member): answers[member] for member in chosen}, rule, prime)
    assert opened.values.tolist() == (values.astype(object).sum(axis=0) % prime).tolist()
    with pytest.raises(BadInput, match="are needed"):
        unmask(total, {int(member): answers[member] for member in chosen[1:]}, rule, prime)


@settings(max_examples=60)
@given(RULES, st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_wrong_answers_are_found_up_to_half_of_what_is_too_many(rule: CommitteeRule, size: int, seed: int) -> None:
    prime, rng = PRIMES[16], np.random.default_rng(seed)
    values = rng.integers(0, prime, (2, size)).astype(np.uint32)
    total, answers = summed(rule, values, prime)
    liars = rng.choice(rule.members, rule.may_miss // 2, replace=False)
    for liar in liars:  # in one column, or in all, or not even of the right length
        lie = rng.integers(1, prime, len(answers[liar])) * (rng.random(len(answers[liar])) < rng.choice([0.3, 1]))
        lie[rng.integers(len(lie))] = 1
        answers[int(liar)] = ((answers[liar] + lie) % prime).astype(np.uint32)
    opened = unmask(total, answers, rule, prime)
    assert opened.values.tolist() == (values.astype(object).sum(axis=0) % prime).tolist()
    assert opened.wrong == sorted(liars)


def test_more_wrong_answers_than_can_be_told_are_an_error() -> None:
    rule, prime = CommitteeRule(10, 0, 4, 2), PRIMES[16]
    total, answers = summed(rule, np.zeros((2, 9), np.uint32), prime)
    for place in (1, 4, 7):
        answers[place] = (answers[place] + np.uint32(place)) % np.uint32(prime)
    with pytest.raises(BadInput, match="contradict each other"):
        unmask(total, answers, rule, prime)


def test_an_answer_of_another_length_is_left_out() -> None:
    rule, prime = CommitteeRule(10, 0, 4, 2), PRIMES[16]
    total, answers = summed(rule, np.full((2, 9), 3, np.uint32), prime)
    answers[0], answers[9] = answers[0][:-1], np.zeros((2, 5), np.uint32)
    opened = unmask(total, answers, rule, prime)
    assert (opened.values.tolist(), opened.wrong) == ([6] * 9, [0, 9])


def test_a_device_that_masks_with_another_key_looks_like_a_member_that_lies() -> None:
    """NOT told apart, and said so in docs/privacy.md: so nobody is put out for it."""
    rule, prime = CommitteeRule(8, 0, 3, 2), PRIMES[16]
    width = rule.width(6)
    keys = [key(0, member) for member in range(8)]
    honest = mask(np.full(6, 9, np.uint32), keys, rule, prime)
    hostile = mask(np.full(6, 1, np.uint32), [*keys[:2], b"x" * 32, *keys[3:]], rule, prime)
    total = Masked(honest.values.copy(), honest.corrections.copy())
    add_into(total.values, hostile.values, prime)
    add_into(total.corrections, hostile.corrections, prime)
    answers = {
        member: np.array(unmasking_share([keys[member], keys[member]], width, prime), np.uint32) for member in range(8)
    }
    opened = unmask(total, answers, rule, prime)
    assert (opened.values.tolist(), opened.wrong) == ([10] * 6, [2])


def test_a_mask_in_blocks_of_columns_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, prime = committee_rule(20, honest_fraction=0.9), PRIMES[16]
    keys = [key(1, member) for member in range(rule.members)]
    values = np.arange(1000, dtype=np.uint32)
    whole = mask(values, keys, rule, prime)
    monkeypatch.setattr("hushfleet.secure.masking._BLOCK", 7)
    pieces = mask(values, keys, rule, prime)
    assert pieces.values.tolist() == whole.values.tolist()
    assert pieces.corrections.tolist() == whole.corrections.tolist()
