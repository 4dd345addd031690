"""What the aggregator can learn, exactly: every way to ask small committees for sets of devices, by linear algebra.

All that a device sends and a member answers is linear in the pseudorandom values. So what can be learned of the masks
is the intersection of two row spaces: of all that the aggregator sees, and of the masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hushfleet.secure import masking
from hushfleet.secure.committee import CommitteeRule, committee_rule
from hushfleet.secure.masking import mask

PRIME = 31


class _Unit:
    """Stands for the pseudorandom values of one member: in column c one for member c, else zero."""

    def __init__(self, key: bytes, prime: int) -> None:
        self._member, self._members = key

    def take(self, count: int) -> np.ndarray:
        return np.eye(self._members, dtype=np.uint32)[self._member]


@pytest.fixture(autouse=True)
def _units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "Keystream", _Unit)


def linear_maps(rule: CommitteeRule) -> tuple[np.ndarray, np.ndarray]:
    """A device's mask [L, m] and corrections [m - t, m], as functions of its values with the members."""
    m = rule.members
    masked = mask(np.zeros(rule.packed * m, np.uint32), [bytes((member, m)) for member in range(m)], rule, PRIME)
    return masked.values.reshape(rule.packed, m).astype(np.int64), masked.corrections.astype(np.int64)


def echelon(matrix: np.ndarray) -> np.ndarray:
    """The nonzero rows of the reduced echelon form."""
    rows, rank = matrix % PRIME, 0
    for column in range(rows.shape[1]):
        nonzero = np.flatnonzero(rows[rank:, column])
        if nonzero.size:
            rows[[rank, rank + nonzero[0]]] = rows[[rank + nonzero[0], rank]]
            rows[rank] = rows[rank] * pow(int(rows[rank, column]), -1, PRIME) % PRIME
            others = np.arange(len(rows)) != rank
            rows[others] = (rows[others] - np.outer(rows[others, column], rows[rank])) % PRIME
            rank += 1
    return rows[:rank]


def learned(rule: CommitteeRule, corrupt: Sequence[int], asked: dict[int, tuple[int, ...]], devices: int) -> np.ndarray:
    """What is learned of the masks: rows `[n, devices, L]`, a basis of the combinations of mask values.

    :param asked: honest member -> the devices for which it answers; devices are honest ones.
    """
    m, packed = rule.members, rule.packed
    of_mask, corrections = linear_maps(rule)
    seen = [np.kron(np.eye(devices, dtype=np.int64), corrections)]
    known = np.zeros((len(corrupt), m), np.int64)
    known[range(len(corrupt)), list(corrupt)] = 1
    seen.append(np.kron(np.eye(devices, dtype=np.int64), known))
    for member, included in asked.items():
        answer = np.zeros((1, devices, m), np.int64)
        answer[0, list(included), member] = 1
        seen.append(answer.reshape(1, -1))
    masks = np.kron(np.eye(devices, dtype=np.int64), of_mask)
    # [views | 0] and [masks | 1]: rows that are zero on the left say which combination of masks the views give
    view = echelon(np.vstack(seen)) if sum(map(len, seen)) else np.zeros((0, devices * m), np.int64)
    left = np.vstack([view, masks])
    right = np.vstack([np.zeros((len(view), devices * packed), np.int64), np.eye(devices * packed, dtype=np.int64)])
    whole = echelon(np.hstack([left, right]))
    return whole[~whole[:, : devices * m].any(axis=1), devices * m :].reshape(-1, devices, packed)


def is_of_one_set(found: np.ndarray, sets: list[tuple[int, ...]]) -> bool:
    """Whether all that was learned is of the sum of masks over one of the sets."""
    for included in sets:
        inside = np.zeros(found.shape[1], bool)
        inside[list(included)] = True
        if not found[:, ~inside].any() and (found[:, inside] == found[:, inside][:, :1]).all():
            return True
    return not len(found)


def ways_to_ask(members: Sequence[int], sets: list[tuple[int, ...]]) -> Iterator[dict[int, tuple[int, ...]]]:
    for choice in itertools.product([(), *sets], repeat=len(members)):
        yield {member: included for member, included in zip(members, choice, strict=True) if included}


@pytest.mark.parametrize(("cohort", "corrupt"), [(2, 0), *itertools.product([3, 4, 5, 6], [0, 1])])
def test_no_way_to_ask_gives_more_than_one_sum(cohort: int, corrupt: int) -> None:
    """Two groups of devices: each may be asked for, and both together, of each honest member."""
    rule = committee_rule(cohort, honest_fraction=1 - corrupt / cohort)
    assert rule.packed >= 1
    assert rule.corrupt == corrupt
    sets = [(0,), (1,), (0, 1)]
    for asked in ways_to_ask(range(corrupt, rule.members), sets):
        assert is_of_one_set(learned(rule, range(corrupt), asked, 2), sets)


def test_three_devices_and_every_set_of_them() -> None:
    rule = committee_rule(5, honest_fraction=1.0)
    sets = [included for size in (1, 2, 3) for included in itertools.combinations(range(3), size)]
    rng = np.random.default_rng(0)
    for _ in range(3000):
        asked = {member: sets[rng.integers(len(sets))] for member in range(rule.members)}
        assert is_of_one_set(learned(rule, [], asked, 3), sets)


def test_all_answers_for_one_set_open_that_sum_alone() -> None:
    rule = committee_rule(9, honest_fraction=0.9)
    found = learned(rule, [], dict.fromkeys(range(rule.members), (0, 2)), 3)
    assert len(found) == rule.packed
    assert is_of_one_set(found, [(0, 2)])


def test_shares_up_to_the_threshold_of_secrecy_say_nothing_and_one_more_does() -> None:
    rule = CommitteeRule(members=7, corrupt=0, secrecy=4, packed=2)
    for members in itertools.combinations(range(7), 4):
        assert not len(learned(rule, members, {}, 1))
    assert len(learned(rule, range(5), {}, 1)) == 1


def test_with_half_of_the_members_as_threshold_two_sums_can_be_mixed() -> None:
    """Why 2 T >= m + c is not enough. (z-1)(z-6), (z-2)(z-5) and (z-3)(z-4) differ by constants only, so each is a
    combination of the others: of the answers for A, for B and for both, the unknown shares cancel."""
    half = CommitteeRule(members=6, corrupt=0, secrecy=3, packed=1)
    asked = {0: (1,), 5: (1,), 1: (0,), 4: (0,), 2: (0, 1), 3: (0, 1)}
    found = learned(half, [], asked, 2)
    assert len(found) == 1
    assert not is_of_one_set(found, [(0,), (1,), (0, 1)])
    rule = committee_rule(6, honest_fraction=1.0)
    assert not len(learned(rule, [], asked, 2))
