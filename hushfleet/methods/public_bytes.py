"""Reads the bytes of a public state without arrays: a board's guardian compares digests and computes nothing."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

from hushfleet.errors import Malformed

COUNT_BYTES = 4


def unpacked_mask(data: bytes, *, size: int) -> bytes:
    """Returns the packed bits of the mask. Raises `Malformed`; never allocates more than the mask needs."""
    packed_bytes = (size + 7) // 8
    if len(data) < COUNT_BYTES:
        raise Malformed(f"a public state of {len(data)} bytes is too short")
    try:
        unpacker = zlib.decompressobj()
        packed = unpacker.decompress(data[COUNT_BYTES:], packed_bytes + 1)
    except zlib.error as error:
        raise Malformed(f"the public state's mask does not unpack: {error}") from error
    if len(packed) != packed_bytes or not unpacker.eof or unpacker.unused_data:
        raise Malformed(f"the public state's mask is not one of {size} parameters")
    if size % 8 and packed[-1] & (0xFF >> size % 8):
        raise Malformed("the public state's mask has bits set beyond the last parameter")
    return packed


def newcomer_digest(size: int, kept: Iterable[slice]) -> bytes:
    """Returns the digest of the state of a device that has sent nothing.

    :param kept: its personal entries, as spans of the vector with `size` entries.
    """
    width = -(-size // 8)
    bits = sum(((1 << span.stop - span.start) - 1) << 8 * width - span.stop for span in kept)
    return digest_of(bytes(COUNT_BYTES), bits.to_bytes(width, "big"))


def digest_of(count: bytes, packed: bytes) -> bytes:
    """Returns 16 bytes: two sides with the same digest hold the same public state."""
    return hashlib.sha256(count + packed).digest()[:16]


def public_digest(data: bytes, *, size: int) -> bytes:
    """Returns the digest of a public state in the form of `PublicState.to_bytes`. Raises `Malformed`."""
    return digest_of(data[:COUNT_BYTES], unpacked_mask(data, size=size))
