"""Makes, encodes and decodes a committee member's answer: its pseudorandom values, summed over the devices of a sum,
and signed. A board's guardian makes it, so it needs no arrays; `masking.Keystream` draws the same values.

"HM", version, 0 | u32 header length | header (msgpack) | values | Ed25519 signature over everything before it
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import TYPE_CHECKING, Literal, NamedTuple

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hushfleet.errors import BadInput, Malformed
from hushfleet.schema import Checked, pack, unpack
from hushfleet.wire.format.headed import HEAD_BYTES, cut_header, headed
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity, verify
from hushfleet.wire.format.spec import Digest, RoundNumber, TaskId
from hushfleet.wire.format.topics import Name

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"HM"
VERSION = 1


@dataclass(frozen=True)
class AnswerHeader(Checked):
    """:param included: SHA-256 of the bitmap of the devices in the sum."""

    task: TaskId
    round: RoundNumber
    device: Name
    included: Digest
    bits: Literal[16, 24, 32]

    @classmethod
    def of(cls, task: str, round: int, device: str, included: bytes, bits: Literal[16, 24, 32]) -> AnswerHeader:
        """Returns the header for a set of devices, given as a bitmap of the cohort; the header holds its SHA-256."""
        return cls(task, round, device, hashlib.sha256(included).digest(), bits)


class UnmaskingShare(NamedTuple):
    """A decoded answer; `values` uint32 `[w]`."""

    header: AnswerHeader
    values: np.ndarray


def is_answer(data: bytes | memoryview) -> bool:
    """Returns whether a blob claims to be a member's answer."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def unmasking_share(keys: Sequence[bytes], width: int, prime: int) -> list[int]:
    """Returns a member's answer: the sum of its pseudorandom values, `[w]`.

    :param keys: the member's key with each device of the sum.
    """
    total = [0] * width
    for key in keys:
        total = list(map(add, total, _drawn(key, width, prime)))
    return [value % prime for value in total]


def _drawn(key: bytes, count: int, prime: int) -> list[int]:
    """Returns the first `count` words of ChaCha20 under `key` that are below the prime, with as many bits as it has."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    kind, mask = "I" if prime.bit_length() > 16 else "H", (1 << prime.bit_length()) - 1
    values: list[int] = []
    while len(values) < count:
        words = array(kind, cipher.update(bytes(array(kind).itemsize * (count - len(values)))))
        if sys.byteorder == "big":
            words.byteswap()
        values += [value for word in words if (value := word & mask) < prime]
    return values


def encode_answer(header: AnswerHeader, values: Sequence[int], *, identity: Identity) -> bytes:
    """Returns the signed blob of an answer, `[w]` values below the prime."""
    signed = headed(MAGIC, VERSION, pack(header)) + _coded(values, header.bits // 8)
    return signed + identity.sign(signed)


def answer_bytes(header: AnswerHeader, width: int) -> int:
    """Returns the size of an answer's blob with `width` values."""
    return len(headed(MAGIC, VERSION, pack(header))) + width * (header.bits // 8) + SIGNATURE_BYTES


def _coded(values: Sequence[int], size: int) -> bytes:
    """Returns the values as little-endian integers of `size` bytes, without a call for each value.

    >>> _coded([1, 258], 3).hex()
    '010000020100'
    """
    words = array("I", values)
    if sys.byteorder == "big":
        words.byteswap()
    wide, coded = words.tobytes(), bytearray(len(words) * size)
    for place in range(size):
        coded[place::size] = wide[place :: words.itemsize]
    return bytes(coded)


def read_answer_header(data: bytes) -> AnswerHeader:
    """Returns the header alone; the signature is NOT checked. Raises `Malformed` or `TooLarge`."""
    header, _ = cut_header(memoryview(data)[:-SIGNATURE_BYTES], MAGIC, VERSION)
    return unpack(AnswerHeader, header, what="the header of a member's answer")


def decode_answer(data: bytes, *, public_key: bytes) -> UnmaskingShare:
    """Returns the answer after checking its signature. Raises only `BadSignature`, `Malformed` or `TooLarge`."""
    if len(data) < HEAD_BYTES + SIGNATURE_BYTES:
        raise Malformed(f"a member's answer of {len(data)} bytes is too short")
    signed, signature = memoryview(data)[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    verify(public_key, signed, signature)
    packed, rest = cut_header(signed, MAGIC, VERSION)
    header: AnswerHeader = unpack(AnswerHeader, packed, what="the header of a member's answer")
    from hushfleet.secure import prime_field

    try:
        return UnmaskingShare(header, prime_field.from_bytes(rest, header.bits))
    except BadInput as error:
        raise Malformed(str(error)) from error
