"""Whatever bytes come, decoders raise what hushfleet.errors has under WireError, and nothing else.

A part of the mutated inputs is signed again with the right key, so that the parsers behind the signature are
reached; the counters at the end of each test prove that they were.
"""

from __future__ import annotations

import hashlib
import random
import struct
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
import pytest

from benchmarks.fuzz.mutate import mutated
from hushfleet.errors import Malformed, WireError
from hushfleet.wire import messages
from hushfleet.wire.chunks import Assembler, parse_frame, split
from hushfleet.wire.codec import decode_values, encode_values
from hushfleet.wire.forms import Form
from hushfleet.wire.identity import SIGNATURE_BYTES, Identity
from hushfleet.wire.messages import (
    Ack,
    Ask,
    Birth,
    Decline,
    DifferenceRef,
    Known,
    Message,
    Missing,
    NotEnrolled,
    Offer,
    Refused,
    RoundPlan,
    ServerState,
    TaskNotice,
    Want,
    peek_kind,
)
from hushfleet.wire.update import UpdateHeader, decode_update, encode_update, payload_digest, read_header

encode_message = partial(messages.encode_message, federation="demo")
decode_message = partial(messages.decode_message, federation="demo")
DEVICE = Identity.from_bytes(bytes(range(32)))
DIGEST = bytes(range(32))
MESSAGES: list[Message] = [
    ServerState(3, "ready", DEVICE.public_key),
    TaskNotice("demo-1f", DIGEST, 5000, 3),
    RoundPlan("demo-1f", 2, 20, "open", DIGEST, 400, {"pi-1": DIGEST[:16], "pi-2": DIGEST[16:]}, 2, 600.0),
    RoundPlan(
        "demo-1f", 2, 20, "open", DIGEST, 400, {}, 2, 600.0, {"clip_norm": 0.5},
        (DifferenceRef(DIGEST[:8], DIGEST, 90),),
    ),
    Birth("pi-1", 7, "training", "pi-4", "0.1.0", DEVICE.public_key, 900),
    Want(DIGEST, 5000, ((0, 1), (4, 7))),
    Offer("demo-1f", 2, DIGEST, 5000),
    Decline("demo-1f", 2, "budget", "epsilon would be 9.1"),
    Ack("demo-1f", 2, DIGEST),
    Missing("demo-1f", 2, DIGEST, ((3, 9),)),
    Refused("demo-1f", 2, DIGEST, "late", "round 3 is open"),
    NotEnrolled("pi-1", DEVICE.public_key, "ask the operator"),
    Ask(7, DIGEST[:16]),
    Known(3, DIGEST[:16], 7, True, "demo-1f", 2, "open", 1, DIGEST),
]


def signed_again(data: bytes, *, context: bytes = b"") -> bytes:
    return data[:-SIGNATURE_BYTES] + DEVICE.sign(context + data[:-SIGNATURE_BYTES])


def outcome(decode: Callable[[], object]) -> str:
    try:
        decode()
    except WireError as error:
        return type(error).__name__ if str(error) else "an error without a text"
    return "accepted"


def test_messages() -> None:
    rng = random.Random(1)
    outcomes: Counter[str] = Counter()
    for turn in range(12_000):
        original = encode_message(MESSAGES[turn % len(MESSAGES)], DEVICE)
        data = mutated(original, rng)
        if turn % 4:
            # the frame's length is made right, so that it is the body that is wrong
            body = data[8:-SIGNATURE_BYTES]
            framed = original[:4] + struct.pack("<I", len(body)) + body + bytes(SIGNATURE_BYTES)
            data = signed_again(framed, context=b"hushfleet demo\0")
        outcome(lambda: peek_kind(data))  # noqa: B023
        key = DEVICE.public_key if turn % 3 else None
        outcomes[outcome(lambda: decode_message(data, public_key=key))] += 1  # noqa: B023
    assert outcomes["Malformed"] > 4000
    assert outcomes["BadSignature"] > 500
    assert outcomes["accepted"] > 100  # another digest, round or text, rightly signed


def test_frames_and_assembler() -> None:
    rng = random.Random(2)
    blob = rng.randbytes(5000)
    frames = list(split(blob, 400))
    digest = hashlib.sha256(blob).digest()
    outcomes: Counter[str] = Counter()
    assembler = Assembler(digest, len(blob))
    for turn in range(12_000):
        data = mutated(rng.choice(frames), rng)
        if turn % 3 and len(data) >= 56:
            data = data[:52] + struct.pack("<I", zlib.crc32(data[56:], zlib.crc32(data[:52]))) + data[56:]
        outcomes[outcome(lambda: parse_frame(data))] += 1  # noqa: B023
        outcomes["added " + outcome(lambda: assembler.add(data))] += 1  # noqa: B023
        if assembler.complete:
            outcomes["whole " + outcome(assembler.blob)] += 1
    assert outcomes["Malformed"] > 5000
    assert outcomes["accepted"] > 500
    assert outcomes["added accepted"] > 100
    fresh = Assembler(digest, len(blob), 400)
    for frame in frames:
        fresh.add(frame)
    assert fresh.blob() == blob


def an_update(codec: str) -> bytes:
    values = np.random.default_rng(1).standard_normal(200).astype(np.float32)
    header = UpdateHeader(
        "demo-1f", 2, "pi-1", codec, 200, () if "float" in codec else (0.5, 0.25), (1.0, 0.5), (1.0, 1.0),
        bytes(16), 3, 1.5, 1.25, 2,
    )  # fmt: skip
    return encode_update(header, values, counts=[150, 50], identity=DEVICE, public=b"mask").data


def test_updates() -> None:
    rng = random.Random(3)
    originals = [an_update(codec) for codec in get_args(Form)]
    outcomes: Counter[str] = Counter()
    for turn in range(12_000):
        data = mutated(originals[turn // 4 % 4], rng)
        if turn % 4:
            data = signed_again(data) if len(data) > SIGNATURE_BYTES else data
        outcome(lambda: read_header(data))  # noqa: B023
        outcome(lambda: payload_digest(data))  # noqa: B023
        outcomes[
            outcome(lambda: decode_update(data, public_key=DEVICE.public_key, counts=[150, 50]))  # noqa: B023
        ] += 1
    assert outcomes["Malformed"] > 4000
    assert outcomes["BadSignature"] > 500
    assert outcomes["accepted"] > 500  # other values in the same form, rightly signed


def test_coded_values() -> None:
    rng = random.Random(4)
    x = np.random.default_rng(2).standard_normal(300).astype(np.float32)
    coded = [encode_values(x, counts=[300], steps=[s], dither_key=bytes(16)) for s in (0.1, 1e-4, 4.0, 30.0, 1e3)]
    assert {data[0] for data in coded} == {0, 1, 2, 4}
    outcomes: Counter[str] = Counter()
    for turn in range(6000):
        data = mutated(coded[turn % 5], rng)
        decode = lambda: decode_values(data, counts=[300], steps=[1.0], dither_key=bytes(16))  # noqa: B023, E731
        outcomes[outcome(decode)] += 1
    assert outcomes["Malformed"] > 2000
    assert outcomes["accepted"] > 20


def test_random_bytes() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        data = rng.choice([b"", b"HF\x02\x06", b"HC\x01\x00", b"HU\x01\x00"]) + rng.randbytes(rng.randint(0, 300))
        decoders: list[Callable[[], object]] = [
            lambda: decode_message(data),  # noqa: B023
            lambda: parse_frame(data),  # noqa: B023
            lambda: read_header(data),  # noqa: B023
            lambda: decode_update(data, public_key=DEVICE.public_key, counts=[1]),  # noqa: B023
        ]
        for decode in decoders:
            assert outcome(decode) in {"Malformed", "OtherVersion", "TooLarge", "BadSignature"}


def test_a_small_input_never_makes_a_large_allocation() -> None:
    bomb = struct.pack("<BI", 1, 0) + _deflated_zeros(200 << 20)
    counts = b"\x81\xa4task" + b"\xdd\x7f\xff\xff\xff"
    frame = struct.pack("<2sBBI", b"HF", 2, 6, len(counts)) + counts
    frame += DEVICE.sign(b"hushfleet demo\0" + frame)
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decode_values(bomb, counts=[100], steps=[1.0], dither_key=bytes(16))
        with pytest.raises(Malformed):
            decode_message(frame, public_key=DEVICE.public_key)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def _deflated_zeros(count: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = bytes(1 << 20)
    return b"".join(packer.compress(block) for _ in range(count >> 20)) + packer.flush()
