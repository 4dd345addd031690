from __future__ import annotations

import hashlib
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import Malformed, TooLarge
from hushfleet.wire.format.chunks import (
    FRAME_OVERHEAD,
    MAX_BLOB_BYTES,
    Assembler,
    check_ranges,
    chunk_count,
    expand,
    parse_frame,
    split,
)

BLOB = random.Random(1).randbytes(1003)
DIGEST = hashlib.sha256(BLOB).digest()


def frame(
    payload: bytes = BLOB[:100],
    *,
    digest: bytes = DIGEST,
    size: int = 1003,
    chunk_bytes: int = 100,
    index: int = 0,
    count: int = 11,
    head: bytes = b"HC\x01\x00",
) -> bytes:
    """A frame with a right checksum, written without the module under test."""
    start = head + digest + struct.pack("<IIII", size, chunk_bytes, index, count)
    return start + struct.pack("<I", zlib.crc32(start + payload)) + payload


@given(st.binary(min_size=1, max_size=2000), st.integers(1, 700), st.randoms(use_true_random=False))
def test_any_order_with_repetitions_gives_the_blob(blob: bytes, chunk_bytes: int, rng: random.Random) -> None:
    frames = list(split(blob, chunk_bytes))
    assert len(frames) == chunk_count(len(blob), chunk_bytes)
    deck = frames + rng.choices(frames, k=3)
    rng.shuffle(deck)
    assembler = Assembler(hashlib.sha256(blob).digest(), len(blob))
    new = [assembler.add(item) for item in deck]
    assert sum(new) == len(frames)
    assert assembler.complete
    assert assembler.missing() == ()
    assert assembler.blob() == blob


@given(st.sets(st.integers(0, 10), max_size=10))
def test_what_is_missing_is_named_and_fills_the_gaps(there: set[int]) -> None:
    assembler = Assembler(DIGEST, 1003, 100)
    for item in split(BLOB, 100, sorted(there)):
        assembler.add(item)
    asked = list(expand(assembler.missing(), 11))
    assert asked == [index for index in range(11) if index not in there]
    for item in split(BLOB, 100, asked):
        assert assembler.add(item)
    assert assembler.blob() == BLOB


def test_a_frame_written_by_hand_is_read() -> None:
    chunk = parse_frame(frame())
    assert (chunk.digest, chunk.size, chunk.chunk_bytes, chunk.index, chunk.count) == (DIGEST, 1003, 100, 0, 11)
    assert bytes(chunk.payload) == BLOB[:100]
    assert next(split(BLOB, 100)) == frame()
    assert len(frame()) == 100 + FRAME_OVERHEAD == 156


def test_any_changed_bit_is_noticed() -> None:
    data = frame(BLOB[1000:], index=10)
    for position in range(8 * len(data)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises((Malformed, TooLarge)):
            parse_frame(bytes(changed))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        frame()[:FRAME_OVERHEAD],
        frame()[:-1],
        frame() + b"\0",
        frame(head=b"HC\x02\x00"),
        frame(head=b"HC\x01\x01"),
        frame(index=11),
        frame(count=10),
        frame(count=12),
        frame(size=1050, index=10),
        frame(size=0, count=0),
        frame(chunk_bytes=0),
        frame(chunk_bytes=(1 << 20) + 1, count=1),
        frame(size=MAX_BLOB_BYTES + 1),
        frame(size=MAX_BLOB_BYTES, chunk_bytes=100, count=13421773),
        frame(bytes((1 << 20) + 1)),
    ],
)
def test_what_breaks_a_rule_is_refused(data: bytes) -> None:
    with pytest.raises((Malformed, TooLarge)):
        parse_frame(data)


def test_caps_hold_before_allocation() -> None:
    with pytest.raises(TooLarge):
        Assembler(DIGEST, 1003, max_blob_bytes=1002)
    with pytest.raises(TooLarge):
        parse_frame(frame(), max_blob_bytes=1002)
    with pytest.raises(TooLarge):
        Assembler(DIGEST, MAX_BLOB_BYTES, 1)
    with pytest.raises(TooLarge):
        next(split(BLOB, (1 << 20) + 1))


def test_chunks_of_another_blob_or_size_are_refused() -> None:
    assembler = Assembler(DIGEST, 1003)
    assert assembler.add(frame())
    with pytest.raises(Malformed, match="another blob"):
        assembler.add(frame(digest=bytes(32)))
    with pytest.raises(Malformed, match="another blob"):
        assembler.add(frame(size=1004))
    with pytest.raises(Malformed, match="chunks have 50"):
        assembler.add(frame(BLOB[:50], chunk_bytes=50, count=21))


def test_a_forged_chunk_of_another_size_does_not_shut_out_the_others() -> None:
    assembler = Assembler(DIGEST, 1003)
    assembler.add(frame(BLOB[:50], chunk_bytes=50, count=21))
    first, *others = split(BLOB, 100)
    with pytest.raises(Malformed, match="chunks have 100 bytes, and those before it 50"):
        assembler.add(first)
    assert assembler.missing() == (), "everything is asked for"
    for item in (*others, first):
        assembler.add(item)
    assert assembler.blob() == BLOB
    known = Assembler(DIGEST, 1003, 100)
    known.add(first)
    with pytest.raises(Malformed):
        known.add(frame(BLOB[:50], chunk_bytes=50, count=21))
    assert known.received == 1, "where the size is known, nothing is forgotten"


def test_a_forged_chunk_makes_the_transfer_begin_anew() -> None:
    assembler = Assembler(DIGEST, 1003)
    assembler.add(frame(bytes(100), index=1))
    for item in split(BLOB, 100):
        assembler.add(item)
    assert assembler.complete
    with pytest.raises(Malformed, match="not what was announced"):
        assembler.blob()
    assert not assembler.complete
    assert assembler.missing() == ()
    for item in split(BLOB, 70):
        assembler.add(item)
    assert assembler.blob() == BLOB


def test_an_incomplete_blob_is_not_given_out() -> None:
    assembler = Assembler(DIGEST, 1003)
    with pytest.raises(Malformed, match="incomplete"):
        assembler.blob()
    assembler.add(frame())
    with pytest.raises(Malformed, match="incomplete: 1 chunks"):
        assembler.blob()


def test_only_so_many_ranges_are_named_at_once() -> None:
    blob = bytes(6000)
    assembler = Assembler(hashlib.sha256(blob).digest(), 6000, 1)
    for item in split(blob, 1, range(0, 6000, 2)):
        assembler.add(item)
    assert assembler.missing() == tuple((2 * i + 1, 2 * i + 2) for i in range(2048))
    assert assembler.missing(limit=2) == ((1, 2), (3, 4))
    check_ranges(assembler.missing())


def test_asking_beyond_the_end_is_malformed() -> None:
    with pytest.raises(Malformed):
        list(expand(((9, 12),), 11))
    with pytest.raises(Malformed):
        list(split(BLOB, 100, [11]))
    assert list(expand((), 3)) == [0, 1, 2]
    assert list(expand(((0, 1), (2, 3)), 3)) == [0, 2]
