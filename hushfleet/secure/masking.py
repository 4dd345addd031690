"""Computes masks, their shares, and the sum of masks: pure functions of keys and numbers.

A device's mask is divided into L rows. In each column a polynomial of degree below t has the mask's L values at the
points -1..-L and the shares of members 1..m at the points 1..m. The shares of the first t members are pseudorandom and
determine the polynomial. For each other member the device sends the difference between its share and its pseudorandom
value (correction).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hushfleet.errors import BadInput
from hushfleet.secure.committee import CommitteeRule
from hushfleet.secure.prime_field import add_into, interpolation, product, subtract_from, wrong_places

_BLOCK = 8192  # columns
_SLACK = 64  # words


class Keystream:
    """Values uniform below `prime`, by ChaCha20 under `key` (32 bytes, used for nothing else).

    Words have as many bits as the prime; words that are not below it are dropped. So the distribution is exact, and few
    are dropped with primes just below a power of two. The values do not depend on how many are taken per call.
    """

    def __init__(self, key: bytes, prime: int) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._prime = prime
        self._word = np.dtype("<u4" if prime.bit_length() > 16 else "<u2")
        self._mask = self._word.type((1 << prime.bit_length()) - 1)
        self._left = np.zeros(0, self._word)

    def take(self, count: int) -> np.ndarray:
        """Returns the next `count` values, uint32."""
        found = [self._left]
        missing = count - len(self._left)
        while missing > 0:
            words = missing + (missing >> 11) + _SLACK
            drawn = np.frombuffer(self._cipher.update(bytes(words * self._word.itemsize)), self._word) & self._mask
            found.append(drawn[drawn < self._prime])
            missing -= len(found[-1])
        values = np.concatenate(found)
        self._left = values[count:].copy()
        return values[:count].astype(np.uint32)


class Masked(NamedTuple):
    """Masked values and corrections of a device; each alone is uniform for any values.

    :param values: uint32 `[k]`.
    :param corrections: uint32 `[m - t, w]`, w = ceil(k / L).
    """

    values: np.ndarray
    corrections: np.ndarray


class Opened(NamedTuple):
    """An opened sum.

    :param values: uint32 `[k]`.
    :param wrong: the places of members whose answers did not fit. The cause may also be a device of the sum that masked
        with a wrong key for this member, so this proves nothing against the member.
    """

    values: np.ndarray
    wrong: list[int]


def mask(values: np.ndarray, keys: Sequence[bytes], rule: CommitteeRule, prime: int) -> Masked:
    """Masks `values` uint32 `[k]`, each below the prime.

    :param keys: this round's key with each member, in the committee's order, 32 bytes each.
    """
    t, width = rule.threshold, rule.width(len(values))
    targets = [*_secrets(rule), *range(t + 1, rule.members + 1)]
    matrix = interpolation(range(1, t + 1), targets, prime)
    masks = np.empty((rule.packed, width), np.uint32)
    corrections = np.empty((rule.may_miss, width), np.uint32)
    streams = [Keystream(key, prime) for key in keys]
    for start in range(0, width, _BLOCK):  # whole shares of all members would take many times the update's memory
        shares = np.stack([stream.take(min(_BLOCK, width - start)) for stream in streams])
        made = product(matrix, shares[:t], prime)
        subtract_from(made[rule.packed :], shares[t:], prime)
        masks[:, start : start + _BLOCK] = made[: rule.packed]
        corrections[:, start : start + _BLOCK] = made[rule.packed :]
    masked = masks.reshape(-1)[: len(values)]
    add_into(masked, values, prime)
    return Masked(masked, corrections)


def unmask(masked: Masked, answers: Mapping[int, np.ndarray], rule: CommitteeRule, prime: int) -> Opened:
    """Returns the sum of values, and the members whose answers did not fit.

    :param masked: sums over the devices, of values and of corrections.
    :param answers: of members 0..m-1, uint32 `[w]` each. With t + n answers, n // 2 wrong ones are found. With only t
        answers, a wrong one cannot be detected.

    Raises `BadInput` if there are too few answers, or more wrong ones than can be found.
    """
    t = rule.threshold
    shares, wrong = {}, []
    for place in sorted(answers):
        if answers[place].shape != (masked.corrections.shape[1],):
            wrong.append(place)
            continue
        shares[place] = answers[place].astype(np.uint32)
        if place >= t:
            add_into(shares[place], masked.corrections[place - t], prime)
    most = (len(shares) - t) // 2
    while len(shares) >= t:
        points = [place + 1 for place in shares]
        known = np.stack(list(shares.values()))
        made = product(interpolation(points[:t], [*_secrets(rule), *points[t:]], prime), known[:t], prime)
        unlike = np.flatnonzero((made[rule.packed :] != known[t:]).any(axis=0))
        if not unlike.size:
            total = masked.values.copy()
            subtract_from(total, made[: rule.packed].reshape(-1)[: len(total)], prime)
            return Opened(total, sorted(wrong))
        found = wrong_places(points, known[:, unlike[0]], t, prime)
        most -= len(found or ())
        if not found or most < 0:
            raise BadInput(f"the answers of {len(answers)} members contradict each other, and {t} must agree")
        for point in [points[place] for place in found]:
            wrong.append(point - 1)
            del shares[point - 1]
    raise BadInput(f"{len(shares)} members have answered, and {t} are needed")


def _secrets(rule: CommitteeRule) -> list[int]:
    """Returns the points of the mask's values in a polynomial."""
    return [-(row + 1) for row in range(rule.packed)]
