"""Splits large blobs into content-addressed chunks, and reassembles them in any order.

Hosted brokers cap a message at 128 kB, and every broker buffers a whole message several times, so a large
blob is never sent as one PUBLISH. Each frame describes itself (digest of the blob, sizes, CRC). So chunks may
be lost, doubled or reordered, may come from several senders, and a transfer resumes with the missing chunks.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hushfleet.errors import Malformed, TooLarge

MAGIC = b"HC"
VERSION = 1
MAX_CHUNK_BYTES = 1 << 20
MAX_BLOB_BYTES = 5 << 28  # the largest model (2^28 float32), and a quarter more for other data
MAX_CHUNKS = 1 << 20
MAX_RANGES = 2048
DEFAULT_CHUNK_BYTES = 60 * 1024

_HEAD = struct.Struct("<2sBB32sIIII")
_CRC = struct.Struct("<I")
FRAME_OVERHEAD = _HEAD.size + _CRC.size

Ranges = Annotated[tuple[tuple[int, int], ...], Meta(max_length=MAX_RANGES)]
BlobSize = Annotated[int, Meta(ge=1, le=MAX_BLOB_BYTES)]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One parsed frame. `payload` is a view into the received bytes."""

    digest: bytes
    size: int
    chunk_bytes: int
    index: int
    count: int
    payload: memoryview


def chunk_count(size: int, chunk_bytes: int) -> int:
    """Returns the number of chunks of `size` bytes.

    >>> chunk_count(4_799_528, 60 * 1024)
    79
    """
    return -(-size // chunk_bytes)


def check_ranges(ranges: Ranges) -> None:
    """Raises ValueError unless the ranges are in rising order and do not touch."""
    last = -1
    for start, stop in ranges:
        if not last < start < stop <= MAX_CHUNKS:
            raise ValueError(f"the range of chunks {start}:{stop} is empty, out of order or too high")
        last = stop


def expand(ranges: Ranges, count: int) -> Iterator[int]:
    """Yields the chunk indices in `ranges`; empty ranges mean all `count`. Raises `Malformed` beyond `count`.

    >>> list(expand(((0, 2), (5, 6)), 8))
    [0, 1, 5]
    """
    if ranges and ranges[-1][1] > count:
        raise Malformed(f"chunk {ranges[-1][1] - 1} was asked for, but the blob has {count}")
    for start, stop in ranges or ((0, count),):
        yield from range(start, stop)


def split(
    blob: bytes | memoryview,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    indices: Iterable[int] | None = None,
    *,
    digest: bytes | None = None,
) -> Iterator[bytes]:
    """Yields the frames of `blob`: all, or only those with the given indices.

    :param digest: SHA-256 of the blob if it is already known, to save computing it.

    Raises `TooLarge` for a blob or a chunk size above its cap.

    >>> print(*(len(frame) for frame in split(bytes(100), 60)))
    116 96
    """
    count = _check_geometry(len(blob), chunk_bytes)
    digest = digest or hashlib.sha256(blob).digest()
    view = memoryview(blob)
    for index in range(count) if indices is None else indices:
        if not 0 <= index < count:
            raise Malformed(f"chunk {index} was asked for, but the blob has {count}")
        payload = view[index * chunk_bytes : (index + 1) * chunk_bytes]
        head = _HEAD.pack(MAGIC, VERSION, 0, digest, len(blob), chunk_bytes, index, count)
        yield b"".join((head, _CRC.pack(zlib.crc32(payload, zlib.crc32(head))), payload))


def parse_frame(data: bytes, *, max_blob_bytes: int = MAX_BLOB_BYTES) -> Chunk:
    """Reads and checks one frame, without a copy. Raises `Malformed` or `TooLarge`.

    >>> parse_frame(next(split(b"model"))).index
    0
    """
    if len(data) > FRAME_OVERHEAD + MAX_CHUNK_BYTES:
        raise TooLarge(f"a chunk frame of {len(data)} bytes is above the cap")
    if len(data) < FRAME_OVERHEAD:
        raise Malformed(f"a chunk frame of {len(data)} bytes is too short")
    magic, version, reserved, digest, size, chunk_bytes, index, count = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION or reserved != 0:
        raise Malformed(f"not a chunk frame of version {VERSION}: it begins with {bytes(data[:4]).hex()}")
    if size > max_blob_bytes:
        raise TooLarge(f"the chunk belongs to {size} bytes, above the cap of {max_blob_bytes}")
    if count != _check_geometry(size, chunk_bytes) or index >= count:
        raise Malformed(f"chunk {index} of {count} does not fit {size} bytes in chunks of {chunk_bytes}")
    payload = memoryview(data)[FRAME_OVERHEAD:]
    expected = min(chunk_bytes, size - index * chunk_bytes)
    if len(payload) != expected:
        raise Malformed(f"chunk {index} has {len(payload)} bytes, not {expected}")
    crc = zlib.crc32(payload, zlib.crc32(memoryview(data)[: _HEAD.size]))
    if crc != _CRC.unpack_from(data, _HEAD.size)[0]:
        raise Malformed(f"the checksum of chunk {index} is wrong")
    return Chunk(digest, size, chunk_bytes, index, count, payload)


class Assembler:
    """Puts one blob together from its chunks, in any order and with repetitions.

    :param digest: SHA-256 of the whole, from a signed message.
    :param size: its size, from the same message.
    :param chunk_bytes: the chunk size; None takes it from the first chunk that arrives.
    :param max_blob_bytes: for a larger blob `TooLarge` is raised, before anything is allocated.
    """

    def __init__(
        self,
        digest: bytes,
        size: int,
        chunk_bytes: int | None = None,
        *,
        max_blob_bytes: int = MAX_BLOB_BYTES,
    ) -> None:
        if size > max_blob_bytes:
            raise TooLarge(f"a blob of {size} bytes is above the cap of {max_blob_bytes}")
        if len(digest) != 32 or size < 1:
            raise Malformed(f"a blob cannot have {size} bytes and a digest of {len(digest)} bytes")
        if chunk_bytes is not None:
            _check_geometry(size, chunk_bytes)
        self.digest = digest
        self.size = size
        self._fixed_chunk_bytes = chunk_bytes
        self._start()

    def add(self, frame: bytes | Chunk) -> bool:
        """Adds one chunk; returns False if it was already there. Raises `Malformed` or `TooLarge`.

        If chunks name two different chunk sizes, all chunks are discarded, as in `blob`.
        """
        chunk = frame if isinstance(frame, Chunk) else parse_frame(frame)
        if chunk.digest != self.digest or chunk.size != self.size:
            raise Malformed(f"the chunk is of another blob than {self.digest.hex()[:16]}...")
        if not self._have:
            self._begin(chunk.chunk_bytes)
        if chunk.chunk_bytes != self.chunk_bytes:
            words = f"a chunk says that chunks have {chunk.chunk_bytes} bytes, and those before it {self.chunk_bytes}"
            if self._fixed_chunk_bytes is None:  # either may be forged: the first must not block all others
                self._start()
            raise Malformed(words)
        if self._have[chunk.index]:
            return False
        start = chunk.index * chunk.chunk_bytes
        self._data[start : start + len(chunk.payload)] = chunk.payload
        self._have[chunk.index] = 1
        self.received += 1
        return True

    def missing(self, *, limit: int = MAX_RANGES) -> Ranges:
        """Returns the first `limit` ranges of missing chunks.

        Empty in two cases: no chunk has arrived yet (an empty request asks for all), or none is missing (`complete`).
        """
        ranges: list[tuple[int, int]] = []
        start = self._have.find(0)
        while start >= 0 and len(ranges) < limit:
            stop = self._have.find(1, start)
            stop = len(self._have) if stop < 0 else stop
            ranges.append((start, stop))
            start = self._have.find(0, stop)
        return tuple(ranges)

    @property
    def complete(self) -> bool:
        """True if all chunks have arrived; `blob` checks whether they are the right ones."""
        return bool(self._have) and self.received == len(self._have)

    def blob(self) -> bytes:
        """Returns the whole blob. Raises `Malformed` if it is incomplete, or if the digest does not match.

        If the digest does not match, all chunks are discarded, so that the transfer can start again: without
        the broker's access list, anyone may have sent a false chunk.
        """
        name = f"{self.digest.hex()[:16]}..."
        if not self.complete:
            raise Malformed(f"the blob {name} is incomplete: {self.received} chunks are here")
        if hashlib.sha256(self._data).digest() != self.digest:
            self._start()
            raise Malformed(f"the chunks of {name} are not what was announced; ask for all of them again")
        return bytes(self._data)

    def _start(self) -> None:
        self.received = 0
        self.chunk_bytes: int | None = None
        self._have = bytearray()  # one byte per chunk, 1 if it is there; empty before the first
        self._data = bytearray()
        if self._fixed_chunk_bytes is not None:
            self._begin(self._fixed_chunk_bytes)

    def _begin(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._have = bytearray(chunk_count(self.size, chunk_bytes))
        self._data = bytearray(self.size)


def _check_geometry(size: int, chunk_bytes: int) -> int:
    """Returns the number of chunks. Raises `TooLarge`."""
    if not 1 <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise TooLarge(f"chunks of {chunk_bytes} bytes: 1 to {MAX_CHUNK_BYTES} are accepted")
    if not 1 <= size <= MAX_BLOB_BYTES:
        raise TooLarge(f"a blob of {size} bytes: 1 to {MAX_BLOB_BYTES} are accepted")
    count = chunk_count(size, chunk_bytes)
    if count > MAX_CHUNKS:
        raise TooLarge(f"{size} bytes in chunks of {chunk_bytes} make {count} chunks, above {MAX_CHUNKS}")
    return count
