"""Uniform values below a prime from a key, the same on both of its sides."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

_SLACK = 64


def uniform(key: bytes, count: int, prime: int) -> np.ndarray:
    """uint32 `[count]`, each uniform below `prime`, by ChaCha20 under `key` (32 bytes, used for nothing else).

    Words of as many bits as the prime has, without those that are not below it: exact, and with primes just below a
    power of two hardly any is left out.
    """
    keystream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    wide, mask = prime.bit_length() > 16, np.uint32((1 << prime.bit_length()) - 1)
    found: list[np.ndarray] = []
    missing = count
    while missing > 0:
        words = missing + (missing >> 11) + _SLACK
        drawn = np.frombuffer(keystream.update(bytes(words * (4 if wide else 2))), "<u4" if wide else "<u2")
        values = drawn & mask if wide else drawn
        kept = values[values < prime][:missing].astype(np.uint32)
        found.append(kept)
        missing -= len(kept)
    return np.concatenate(found) if found else np.zeros(0, np.uint32)
