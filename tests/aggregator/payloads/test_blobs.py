"""The chunk server: what is asked for by many is sent once, and nobody can have it sent without end."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.aggregator.payloads.blobs import COALESCE_S, LONGEST_COALESCE_S, PER_MINUTE, ChunkServer
from hushfleet.errors import Malformed
from hushfleet.wire.format.chunks import Assembler, parse_frame, split
from hushfleet.wire.format.messages import Want

BLOB = bytes(range(250)) * 41
COUNT = 11  # of 1024 bytes
DIGEST = hashlib.sha256(BLOB).digest()


def server() -> ChunkServer:
    return ChunkServer({DIGEST: BLOB}.get, chunk_bytes=1024)


def sent(chunks: ChunkServer, now: float, limit: int = 1000) -> list[int]:
    return [parse_frame(frame.data).index for frame in chunks.frames(now=now, limit=limit)]


def want(*ranges: tuple[int, int], size: int = len(BLOB), digest: bytes = DIGEST) -> Want:
    return Want(digest, size, ranges)


def test_devices_that_ask_together_are_served_once() -> None:
    chunks = server()
    assert chunks.due_at == math.inf
    for index in range(50):
        assert chunks.want(f"dev-{index}", want(), now=10 + index / 1000)
    assert chunks.due_at == 10 + COALESCE_S
    assert sent(chunks, now=10.049) == []
    assert sent(chunks, now=10.05) == list(range(COUNT))
    assert sent(chunks, now=11) == []
    assert chunks.due_at == math.inf


def test_the_frames_make_the_blob() -> None:
    chunks, assembler = server(), Assembler(DIGEST, len(BLOB))
    chunks.want("dev", want(), now=0)
    for frame in chunks.frames(now=1, limit=100):
        assert frame.digest == DIGEST
        assembler.add(frame.data)
    assert assembler.blob() == BLOB


def test_only_what_is_missing_is_sent() -> None:
    chunks = server()
    chunks.want("a", want((2, 4), (9, 11)), now=0)
    chunks.want("b", want((3, 5)), now=0.01)
    assert sent(chunks, now=0.05) == [2, 3, 4, 9, 10]


def test_a_pass_goes_on_where_it_stopped_and_takes_in_what_is_ahead() -> None:
    chunks = server()
    chunks.want("a", want((0, 6)), now=0)
    assert sent(chunks, now=1, limit=3) == [0, 1, 2]
    chunks.want("b", want((1, 2), (4, 8)), now=1)
    assert sent(chunks, now=1) == [3, 4, 5, 6, 7], "chunk 1 is behind the pass and waits for the next"
    assert sent(chunks, now=1.09) == [], "the second pass waits longer than the first"
    assert sent(chunks, now=1.10) == [1]


def test_the_longer_a_blob_is_asked_for_the_rarer_its_passes() -> None:
    """One device after the other asks, a hundred a second: each pass would go to all that are still subscribed."""
    blob = bytes(1_000_000)
    chunks, passes = ChunkServer({DIGEST: blob}.get, chunk_bytes=1024), []
    for number in range(1000):
        now = number / 100
        chunks.want(f"dev-{number}", want((0, 1), size=len(blob)), now=now)
        passes += [now] * sent(chunks, now=now).count(0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(passes)]
    assert passes[0] == pytest.approx(COALESCE_S)
    assert 8 <= len(passes) <= 12, "not two hundred"
    assert all(later > earlier - 0.03 for earlier, later in itertools.pairwise(gaps))
    assert max(gaps) < LONGEST_COALESCE_S + 0.03, "nobody waits longer than that"


def test_a_small_blob_never_waits_long() -> None:
    """Cohorts ask for it in round after round: its bytes are with a slow device before others ask."""
    chunks, waits = ChunkServer({DIGEST: bytes(2500)}.get, chunk_bytes=4096), []
    for round in range(20):
        chunks.want(f"dev-{round}", want(size=2500), now=round / 10)
        waits.append(chunks.due_at - round / 10)
        assert sent(chunks, now=chunks.due_at) == [0]
    assert max(waits) == pytest.approx(COALESCE_S + 0.01)


def test_each_blob_has_its_own_pace_and_a_pause_forgets_it() -> None:
    blobs = {bytes([number]) * 32: bytes(1_000_000) for number in (1, 2)}
    chunks = ChunkServer(blobs.get, chunk_bytes=1_000_000)
    one, other = (Want(digest, 1_000_000, ()) for digest in blobs)
    chunks.want("dev", one, now=0)
    assert sent(chunks, now=0.05) == [0]
    chunks.want("dev", other, now=0.06)
    assert chunks.due_at == 0.06 + COALESCE_S
    assert sent(chunks, now=0.2) == [0]
    chunks.want("dev", one, now=0.3)
    assert chunks.due_at == 0.3 + 2 * COALESCE_S
    assert sent(chunks, now=0.5) == [0]
    later = 0.6 + LONGEST_COALESCE_S
    chunks.want("dev", one, now=later)
    assert chunks.due_at == later + COALESCE_S


def test_one_device_cannot_have_a_chunk_sent_without_end() -> None:
    chunks, total = server(), []
    for second in range(59):
        chunks.want("greedy", want((0, 2)), now=second)
        total += sent(chunks, now=second + 0.5)
    assert total == [0, 1] * PER_MINUTE
    chunks.want("modest", want((0, 1)), now=59)
    assert sent(chunks, now=59.5) == [0], "others are still served"
    chunks.want("greedy", want((1, 2)), now=60)
    assert sent(chunks, now=60.5) == [1], "a new minute"


@given(moments=st.lists(st.floats(0, 59.9), min_size=1, max_size=200))
def test_the_bound_holds_however_the_wants_are_timed(moments: list[float]) -> None:
    chunks, total = server(), 0
    chunks.want("first", want((5, 6)), now=0)
    sent(chunks, now=0.05)
    for now in sorted(moments):
        chunks.want("greedy", want((0, 1)), now=now)
        total += sent(chunks, now=now).count(0)
    total += sent(chunks, now=61).count(0) + sent(chunks, now=62).count(0)
    assert 1 <= total <= PER_MINUTE


def test_what_is_not_here_or_does_not_fit() -> None:
    chunks = server()
    assert not chunks.want("dev", want(digest=bytes(32)), now=0)
    with pytest.raises(Malformed, match="asked for, which has"):
        chunks.want("dev", want(size=5), now=0)
    assert sent(chunks, now=1) == []


def test_a_device_that_took_a_forged_chunk_first_gets_the_blob_all_the_same() -> None:
    chunks, assembler = server(), Assembler(DIGEST, len(BLOB))
    assembler.add(next(split(BLOB, 512, digest=DIGEST)))
    for now in range(3):
        if not assembler.complete:
            assert chunks.want("dev", want(*assembler.missing()), now=now)
        for frame in chunks.frames(now=now + 0.5, limit=100):
            with contextlib.suppress(Malformed):
                assembler.add(frame.data)
    assert assembler.blob() == BLOB


def test_an_obsolete_blob_and_a_lost_link_end_a_pass() -> None:
    chunks = server()
    chunks.want("dev", want(), now=0)
    assert sent(chunks, now=1, limit=2) == [0, 1]
    chunks.forget(DIGEST)
    assert sent(chunks, now=2) == []
    chunks.want("dev", want((3, 4)), now=3)
    chunks.clear()
    assert sent(chunks, now=4) == []


SPANS = st.lists(st.tuples(st.integers(0, COUNT), st.integers(1, 3)), max_size=3)


@given(spans=st.lists(SPANS, max_size=12), sends=st.lists(st.integers(0, 4), min_size=12, max_size=12))
def test_a_want_of_what_is_marked_changes_nothing(spans: list[list[tuple[int, int]]], sends: list[int]) -> None:
    chunks = server()
    for now, (each, limit) in enumerate(zip(spans, sends, strict=False)):
        places = sorted({place for start, length in each for place in range(start, start + length)})
        asked = want(*((place, place + 1) for place in places[::2]))
        marked, before = chunks.is_marked(asked), repr(chunks._passes)
        chunks.want("dev", asked, now=now)
        assert not marked or repr(chunks._passes) == before
        sent(chunks, now=now + 0.5, limit=limit)
    assert not chunks.is_marked(want(size=7))


def test_a_want_that_changes_nothing_is_found() -> None:
    chunks = server()
    assert not chunks.is_marked(want())
    chunks.want("a", want((2, 5)), now=0)
    assert chunks.is_marked(want((2, 3), (4, 5)))
    assert not chunks.is_marked(want((4, 6)))
    assert not chunks.is_marked(want())
    chunks.want("a", want(), now=0)
    assert chunks.is_marked(want())
    assert not chunks.is_marked(want((COUNT, COUNT + 1)))
    assert sent(chunks, now=1, limit=1) == [0]
    assert not chunks.is_marked(want())
    assert chunks.is_marked(want((1, COUNT)))
