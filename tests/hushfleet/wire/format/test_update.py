from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushfleet.errors import BadSignature, Malformed, TooLarge
from hushfleet.schema import to_plain
from hushfleet.wire.format.codecs import codecs
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.one_bit import magnitude
from hushfleet.wire.format.update import (
    MAX_HEADER_BYTES,
    UpdateHeader,
    attach_public,
    max_update_bytes,
    payload_digest,
    read_header,
)
from hushfleet.wire.format.update_values import decode_update, encode_update

FORMS = [codec.name for codec in codecs()]
DEVICE = Identity.from_bytes(bytes(range(32)))
STRANGER = Identity.from_bytes(bytes(range(1, 33)))
COUNTS = [700, 0, 300]
VALUES = np.random.default_rng(1).standard_normal(1000).astype(np.float32)


def header(**changes: Any) -> UpdateHeader:
    fields: dict[str, Any] = {
        "task": "demo-1f", "round": 3, "device": "pi-1", "codec": "quantized", "value_count": 1000,
        "steps": (0.5, 0.25, 1.0), "noise_stds": (1.0, 0.5, 2.0), "clip_norms": (0.5, math.inf, 1.5),
        "public_digest": bytes(range(16)), "rounds_charged": 4, "epsilon_server": math.inf,
        "multiplier_server": 1.25, "noise_split": 10,
    }  # fmt: skip
    if changes.get("codec") == "one-bit":
        fields["steps"] = tuple(magnitude(std) for std in fields["noise_stds"])
    elif "float" in changes.get("codec", ""):
        fields["steps"] = ()
    return UpdateHeader(**{**fields, **changes})


def blob(packed_header: bytes, values: bytes, public: bytes = b"", identity: Identity = DEVICE) -> bytes:
    """An update written without the module under test."""
    signed = b"HU\x02\x00" + struct.pack("<I", len(packed_header)) + packed_header
    signed += struct.pack("<I", len(values)) + values + struct.pack("<I", len(public)) + public
    return signed + identity.sign(signed)


def packed(plain: UpdateHeader, **changes: Any) -> bytes:
    return msgpack.packb({**to_plain(plain), **changes})


@pytest.mark.parametrize("codec", FORMS)
@pytest.mark.parametrize("public", [None, b"mask"])
def test_what_was_sent_is_what_is_decoded_bit_for_bit(codec: str, public: bytes | None) -> None:
    sent_header = header(codec=codec)
    encoded = encode_update(sent_header, VALUES, counts=COUNTS, identity=DEVICE, public=public)
    decoded = decode_update(encoded.data, public_key=DEVICE.public_key, counts=COUNTS)
    assert decoded.values.dtype == encoded.sent.dtype == np.float32
    assert decoded.values.tobytes() == encoded.sent.tobytes()
    assert decoded.header == read_header(encoded.data) == sent_header
    assert decoded.public == public
    expected = {
        "quantized": lambda: np.abs(decoded.values - VALUES) <= 0.51 * np.repeat((0.5, 0.25, 1.0), COUNTS),
        "one-bit": lambda: decoded.values == np.copysign(np.repeat(np.float32(sent_header.steps), COUNTS), VALUES),
        "float16": lambda: decoded.values == VALUES.astype(np.float16),
        "float32": lambda: decoded.values == VALUES,
    }
    assert expected.get(codec, lambda: np.isfinite(decoded.values))().all()
    memory = np.full(1000, np.nan, np.float32)
    into = decode_update(encoded.data, public_key=DEVICE.public_key, counts=COUNTS, out=memory)
    assert into.values is memory
    assert memory.tobytes() == decoded.values.tobytes()


def test_what_float16_cannot_hold_is_not_sent() -> None:
    plain = header(codec="float16", value_count=2, noise_stds=[0], clip_norms=[1])
    with pytest.raises(Malformed, match="65520 is too large for float16"):
        encode_update(plain, np.array([1.0, 65520.0], np.float32), counts=[2], identity=DEVICE)
    sent = encode_update(plain, np.array([1e-9, 65519.0], np.float32), counts=[2], identity=DEVICE).sent
    assert sent.tolist() == [0.0, 65504.0]


def test_the_result_does_not_alias_the_input() -> None:
    values = VALUES.copy()
    encoded = encode_update(header(codec="float32"), values, counts=COUNTS, identity=DEVICE)
    values[:] = 0
    assert encoded.sent.tobytes() == VALUES.tobytes()


def test_an_update_written_by_hand_is_read() -> None:
    plain = header(codec="float32", value_count=2, noise_stds=[0], clip_norms=[1])
    data = blob(packed(plain), struct.pack("<ff", 1.5, -0.25), b"state")
    decoded = decode_update(data, public_key=DEVICE.public_key, counts=[2])
    assert decoded.values.tolist() == [1.5, -0.25]
    assert decoded.public == b"state"
    values = np.array([1.5, -0.25], np.float32)
    assert encode_update(plain, values, counts=[2], identity=DEVICE, public=b"state").data == data


def test_the_public_section_comes_and_goes_without_touching_the_values() -> None:
    without = encode_update(header(), VALUES, counts=COUNTS, identity=DEVICE).data
    with_it = attach_public(without, b"the mask", identity=DEVICE)
    decoded = decode_update(with_it, public_key=DEVICE.public_key, counts=COUNTS)
    assert decoded.public == b"the mask"
    assert (
        decoded.values.tobytes() == decode_update(without, public_key=DEVICE.public_key, counts=COUNTS).values.tobytes()
    )
    assert payload_digest(with_it) == payload_digest(without) == hashlib.sha256(without[: -64 - 4]).digest()
    assert attach_public(with_it, b"another", identity=DEVICE) == attach_public(without, b"another", identity=DEVICE)
    assert attach_public(with_it, None, identity=DEVICE) == without


def test_the_dither_differs_between_updates() -> None:
    keys = {
        header(**change).dither_key
        for change in ({}, {"round": 4}, {"device": "pi-2"}, {"task": "demo-20"}, {"round": 33})
    }
    assert len(keys) == 5
    assert header().dither_key == hashlib.sha256(b"demo-1f|3|pi-1").digest()[:16]


def test_any_changed_bit_is_noticed() -> None:
    plain = header(value_count=3, steps=[1], noise_stds=[1], clip_norms=[1])
    data = encode_update(plain, VALUES[:3], counts=[3], identity=DEVICE, public=b"ab").data
    for position in range(8 * len(data)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises((Malformed, TooLarge, BadSignature)):
            decode_update(bytes(changed), public_key=DEVICE.public_key, counts=[3])


def test_only_the_device_itself_is_believed() -> None:
    data = encode_update(header(), VALUES, counts=COUNTS, identity=DEVICE).data
    with pytest.raises(BadSignature):
        decode_update(data, public_key=STRANGER.public_key, counts=COUNTS)
    resigned = attach_public(data, None, identity=STRANGER)
    with pytest.raises(BadSignature):
        decode_update(resigned, public_key=DEVICE.public_key, counts=COUNTS)


@pytest.mark.parametrize("counts", [[1000], [700, 300, 0, 0], [700, 0, 301], []])
def test_values_that_do_not_fit_the_mask_are_malformed(counts: list[int]) -> None:
    data = encode_update(header(), VALUES, counts=COUNTS, identity=DEVICE).data
    with pytest.raises(Malformed):
        decode_update(data, public_key=DEVICE.public_key, counts=counts)
    with pytest.raises(Malformed):
        encode_update(header(), VALUES, counts=counts, identity=DEVICE)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", FORMS)
def test_values_that_are_not_finite_are_neither_sent_nor_taken(codec: str, bad: float) -> None:
    values = VALUES.copy()
    values[5] = bad
    with pytest.raises(Malformed):
        encode_update(header(codec=codec), values, counts=COUNTS, identity=DEVICE)
    if "float" in codec:
        data = blob(packed(header(codec=codec)), values.astype(codec).tobytes())
        with pytest.raises(Malformed, match="not finite"):
            decode_update(data, public_key=DEVICE.public_key, counts=COUNTS)


BROKEN_HEADERS: list[dict[str, Any]] = [
    {"task": ".."}, {"round": -1}, {"round": 1.0}, {"device": "Pi"}, {"codec": "zip"}, {"value_count": -1},
    {"value_count": (1 << 28) + 1}, {"steps": [1.0, 1.0]}, {"steps": [1.0, 1.0, 0.0]}, {"steps": 3},
    {"steps": [1.0, 1.0, math.nan]}, {"noise_stds": [1.0, -1.0, 1.0]}, {"noise_stds": [1.0, math.inf, 1.0]},
    {"noise_stds": []}, {"clip_norms": [1.0, 1.0, 0.0]}, {"clip_norms": [1.0, 1.0]}, {"clip_norms": [1, 1, 1]},
    {"public_digest": bytes(15)}, {"public_digest": "x" * 16}, {"rounds_charged": -1}, {"rounds_charged": True},
    {"epsilon_server": math.nan}, {"epsilon_server": -1.0}, {"multiplier_server": math.inf},
    {"noise_split": 0}, {"unknown": 1}, {"noise_stds": [1.0] * 5000},
]  # fmt: skip


@pytest.mark.parametrize("changes", BROKEN_HEADERS, ids=str)
def test_headers_that_break_a_rule_are_malformed_though_signed(changes: dict[str, Any]) -> None:
    good = encode_update(header(), VALUES, counts=COUNTS, identity=DEVICE).data
    (header_bytes,) = struct.unpack_from("<I", good, 4)
    (values_bytes,) = struct.unpack_from("<I", good, 8 + header_bytes)
    values = good[12 + header_bytes : 12 + header_bytes + values_bytes]
    assert blob(packed(header()), values) == good
    data = blob(packed(header(), **changes), values)
    with pytest.raises(Malformed):
        read_header(data)
    with pytest.raises(Malformed):
        decode_update(data, public_key=DEVICE.public_key, counts=COUNTS)


def test_sections_that_do_not_fit_the_blob_are_refused() -> None:
    good = encode_update(header(), VALUES, counts=COUNTS, identity=DEVICE).data
    for data in (b"", good[:79], good[:-1], good + b"\0", b"HX" + good[2:], b"HU\x01" + good[3:]):
        with pytest.raises(Malformed):
            read_header(data)
    with pytest.raises(TooLarge):
        read_header(b"HU\x02\x00" + struct.pack("<I", MAX_HEADER_BYTES + 1) + bytes(200))
    with pytest.raises(Malformed, match="section of 4294967295 bytes"):
        read_header(b"HU\x02\x00" + struct.pack("<I", 4) + bytes(4) + b"\xff" * 4 + bytes(80))


@given(st.integers(1, 20_000), st.integers(0, 3))
def test_no_update_is_larger_than_its_cap(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.uniform(-8e6, 8e6, size).astype(np.float32)
    public = rng.bytes(4 + size // 8 + 20)
    for codec, steps in (("quantized", [1.0]), ("one-bit", [1.0]), ("float32", [])):
        plain = header(codec=codec, value_count=size, steps=steps, noise_stds=[1], clip_norms=[1])
        encoded = encode_update(plain, values, counts=[size], identity=DEVICE, public=public)
        assert len(encoded.data) <= max_update_bytes(size)


def test_the_largest_header_fits_its_cap() -> None:
    layers = 4096
    plain = header(
        task="t" * 96, device="d" * 63, value_count=0, steps=[0.1] * layers, noise_stds=[0.1] * layers,
        clip_norms=[0.1] * layers, rounds_charged=1 << 40, noise_split=1 << 40,
    )  # fmt: skip
    data = encode_update(plain, VALUES[:0], counts=[0] * layers, identity=DEVICE).data
    assert read_header(data) == plain
    assert len(data) <= max_update_bytes(0)


def test_a_report_is_left_out_where_there_is_none_and_comes_back_where_there_is() -> None:
    values, counts = VALUES, COUNTS
    plain = encode_update(header(), values, counts=counts, identity=DEVICE)
    assert b"report" not in plain.data
    told = header(report=[0.5, np.float32(-1)])
    made = encode_update(told, values, counts=counts, identity=DEVICE)
    assert read_header(made.data).report == (0.5, -1.0)
    for report in ((math.nan,), (math.inf,), (0.0,) * 17):
        with pytest.raises(ValueError, match="report"):
            header(report=report)
