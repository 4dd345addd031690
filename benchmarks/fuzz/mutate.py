"""Edits of real inputs, for where no coverage-guided fuzzer is installed, and for the tests."""

from __future__ import annotations

import random
import struct

INTERESTING = [0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xC4, 0xC6, 0xCA, 0xCB, 0xCF, 0xD9, 0xDB, 0xDC, 0xDD, 0xDF, 0xFF]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: bits, bytes, cuts, insertions, repetitions, lengths."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        where = rng.randrange(len(result) + 1)
        match rng.randrange(7):
            case 0 if where < len(result):
                result[where] ^= 1 << rng.randrange(8)
            case 1 if where < len(result):
                result[where] = rng.choice(INTERESTING)
            case 2:
                del result[where : where + rng.randint(1, 20)]
            case 3:
                result[where:where] = rng.randbytes(rng.randint(1, 20))
            case 4:
                result[where:where] = result[where : where + rng.randint(1, 60)]
            case 5:
                result[where : where + 4] = struct.pack("<I", rng.choice([0, 1, 255, 1 << 16, (1 << 32) - 1]))
            case _:
                result = result[:where] if rng.random() < 0.1 else result
    return bytes(result)
