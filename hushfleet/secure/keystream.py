"""Uniform values below a prime from a key, the same on both of its sides."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

_SLACK = 64


class Keystream:
    """Values uniform below `prime`, by ChaCha20 under `key` (32 bytes, used for nothing else).

    Words of as many bits as the prime has, without those that are not below it: exact, and with primes just below a
    power of two hardly any is left out. In which pieces the values are taken changes none of them.
    """

    def __init__(self, key: bytes, prime: int) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
        self._prime = prime
        self._word = np.dtype("<u4" if prime.bit_length() > 16 else "<u2")
        self._mask = self._word.type((1 << prime.bit_length()) - 1)
        self._left = np.zeros(0, self._word)

    def take(self, count: int) -> np.ndarray:
        """The next `count` values, uint32."""
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
    """The first `count` values, uint32."""
    return Keystream(key, prime).take(count)
