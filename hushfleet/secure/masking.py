"""Masks, their shares, and the sum of masks: pure functions of keys and numbers.

A device's mask is cut into L rows. In each column a polynomial of degree below t has the mask's L values at the points
-1..-L and the shares of members 1..m at the points 1..m. The shares of the first t members are pseudorandom and make
the polynomial; to the others the device sends what their pseudorandom values lack (corrections).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.errors import BadInput
from hushfleet.secure.committee import CommitteeRule
from hushfleet.secure.field import add_into, interpolation, product
from hushfleet.secure.keystream import uniform


class Masked(NamedTuple):
    """What a device sends; each alone is uniform whatever the values are.

    :param values: uint32 `[k]`.
    :param corrections: uint32 `[m - t, w]`, w = ceil(k / L).
    """

    values: np.ndarray
    corrections: np.ndarray


def mask(values: np.ndarray, keys: Sequence[bytes], rule: CommitteeRule, prime: int) -> Masked:
    """Masks `values` uint32 `[k]`, each below the prime.

    :param keys: this round's key with each member, in the committee's order, 32 bytes each.
    """
    t, width = rule.threshold, rule.width(len(values))
    shares = np.stack([uniform(key, width, prime) for key in keys])
    made = product(interpolation(range(1, t + 1), _targets(rule), prime), shares[:t], prime)
    masked = made[: rule.packed].reshape(-1)[: len(values)].copy()
    add_into(masked, values, prime)
    corrections = made[rule.packed :].copy()
    add_into(corrections, (prime - shares[t:]) % prime, prime)
    return Masked(masked, corrections)


def member_answer(keys: Sequence[bytes], width: int, prime: int) -> np.ndarray:
    """What a member answers: the sum of its pseudorandom values, uint32 `[w]`.

    :param keys: its key with each device of the sum.
    """
    total = np.zeros(width, np.uint32)
    for key in keys:
        add_into(total, uniform(key, width, prime), prime)
    return total


def unmask(masked: Masked, answers: Mapping[int, np.ndarray], rule: CommitteeRule, prime: int) -> np.ndarray:
    """The sum of values, uint32 `[k]`.

    :param masked: sums over the devices, of values and of corrections.
    :param answers: of members 0..m-1, at least t.

    Raises `BadInput` where there are too few, or where they contradict each other.
    """
    t = rule.threshold
    if len(answers) < t:
        raise BadInput(f"{len(answers)} members have answered, and {t} are needed")
    places = sorted(answers)
    shares = np.stack([answers[place] for place in places])
    for row, place in enumerate(places):
        if place >= t:
            add_into(shares[row], masked.corrections[place - t], prime)
    points, others = [place + 1 for place in places[:t]], [place + 1 for place in places[t:]]
    secrets = [-(row + 1) for row in range(rule.packed)]
    made = product(interpolation(points, [*secrets, *others], prime), shares[:t], prime)
    if not np.array_equal(made[rule.packed :], shares[t:]):
        raise BadInput("the members' answers contradict each other")
    total = masked.values.copy()
    mask_sum = made[: rule.packed].reshape(-1)[: len(total)]
    add_into(total, (prime - mask_sum) % prime, prime)
    return total


def _targets(rule: CommitteeRule) -> list[int]:
    return [*(-(row + 1) for row in range(rule.packed)), *range(rule.threshold + 1, rule.members + 1)]
