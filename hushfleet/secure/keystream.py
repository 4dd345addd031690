"""Derives uniform values below a prime from a key; both owners of the key get the same values."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

_SLACK = 64


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


def uniform(key: bytes, count: int, prime: int) -> np.ndarray:
    """Returns the first `count` values, uint32.

    >>> uniform(bytes(32), 2, 65_521).tolist()
    [47222, 44512]
    """
    return Keystream(key, prime).take(count)
