"""A second reader of the wire, written from docs/wire.md alone: it imports nothing of the kit.

It holds the page to the code: what the page does not say, this file cannot read. It reads honest bytes, and
refuses only what the page says of their form. Signatures are left to the caller, who gets what was signed.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

BLOCK = 65_536
ALPHABETS = {1: 255, 2: 16, 3: 6, 4: 4, 5: 3}
FLOATS = {"float16": "<f2", "float32": "<f4"}
FIELDS = {
    1: "epoch state public_key",
    2: "task digest size epoch",
    3: "task round rounds phase global_digest global_bytes cohort noise_split deadline_s controls? differences? epoch?"
    " secure?",
    4: "device session state board version public_key memory_mib",
    5: "digest size missing",
    6: "task round digest size",
    7: "task round code reason",
    8: "task round digest",
    9: "task round digest missing",
    10: "task round digest code reason",
    11: "device public_key reason",
    12: "session nonce",
    13: "epoch nonce session yours task round phase last_round last_digest seen?",
    14: "device csr public_key proof nonce board version after?",
    15: "device nonce verdict certificate reason retry_s carried? up_to?",
    16: "device session version uptime_s disk_percent memory_percent temperature_c throttled last_decline last_error"
    " certificate_end slot platform? tried? attempt? accelerator? freeze? volatile?",
    17: "device version manifest digest size attempt?",
    18: "keys newest",
}
OF_FLEET = {5, 14, 15, 16, 17}  # whose version is 2, so that boards of an earlier release can be updated
UPDATE = (
    "task round device codec value_count steps noise_stds clip_norms public_digest rounds_charged epsilon_server"
    " multiplier_server noise_split report?"
)
DIFFERENCE = "task round base result steps"
ANSWER = "task round device included bits"
MEMBERSHIP_LIST = "devices keys federation honest_fraction min_devices number date nonce signature"


@dataclass
class Signed:
    """What a blob says, the bytes that its signature covers, and the signature."""

    fields: dict[str, Any]
    signed: bytes
    signature: bytes
    values: bytes = b""
    public_state: bytes = b""


def need(true: bool, what: str) -> None:
    if not true:
        raise ValueError(what)


def _map(data: bytes, names: str) -> dict[str, Any]:
    """A msgpack map in the one form, with these fields in this order; those with a question mark may be left out."""
    fields: dict[str, Any] = msgpack.unpackb(data)
    need(msgpack.packb(fields) == data, "not the one form")
    order = [name.rstrip("?") for name in names.split()]
    need(list(fields) == [name for name in order if name in fields], "another order, or unknown fields")
    need(all(name in fields for name in names.split() if not name.endswith("?")), "a field is missing")
    return fields


def _headed(data: bytes, magic: bytes, version: int, names: str) -> tuple[dict[str, Any], bytes]:
    """The header of an update, a difference or an answer, and what follows it."""
    start, number, zero, length = struct.unpack_from("<2sBBI", data)
    need((start, number, zero) == (magic, version, 0), "another magic or version")
    return _map(data[8 : 8 + length], names), data[8 + length :]


def message(data: bytes, federation: str) -> tuple[int, Signed]:
    """The kind of a message, and what it says."""
    magic, version, kind, length = struct.unpack_from("<2sBBI", data)
    wanted = 2 if kind in OF_FLEET else 3
    need((magic, version) == (b"HF", wanted) and len(data) == 8 + length + 64, "no message")
    prefix = b"hushfleet " + federation.encode() + b"\0"
    return kind, Signed(_map(data[8:-64], FIELDS[kind]), prefix + data[:-64], data[-64:])


def chunk(data: bytes) -> tuple[bytes, int, int, bytes]:
    """Digest of the blob, its size, where this payload begins in it, and the payload."""
    magic, version, zero, digest, size, chunk_size, index, count, crc = struct.unpack_from("<2sBB32s5I", data)
    payload = data[56:]
    need((magic, version, zero) == (b"HC", 1, 0), "no chunk")
    need(crc == zlib.crc32(data[:52] + payload), "damaged")
    need(count == -(-size // chunk_size) and index < count, "another count")
    need(len(payload) == min(chunk_size, size - index * chunk_size), "another length")
    return digest, size, index * chunk_size, payload


def update(data: bytes) -> Signed:
    """An update: header, values as they were coded, public state."""
    fields, rest = _headed(data, b"HU", 2, UPDATE)
    parts = []
    for _ in range(2):
        (length,) = struct.unpack_from("<I", rest)
        parts.append(rest[4 : 4 + length])
        rest = rest[4 + length :]
    need(len(rest) == 64, "no signature at the end")
    return Signed(fields, data[:-64], rest, *parts)


def answer(data: bytes) -> Signed:
    """A committee member's answer, with its integers as they were coded."""
    fields, rest = _headed(data, b"HM", 1, ANSWER)
    return Signed(fields, data[:-64], rest[-64:], rest[:-64])


def difference(data: bytes, old: np.ndarray, counts: list[int]) -> np.ndarray:
    """The new model: `old` and the difference. `counts`: the parameters of each layer."""
    fields, rest = _headed(data, b"HD", 1, DIFFERENCE)
    need(hashlib.sha256(old.astype("<f4").tobytes()).digest() == fields["base"], "another base")
    steps = np.repeat(np.array(fields["steps"], np.float32), counts)
    new = old.copy()
    new[steps > 0] += integers(rest, int((steps > 0).sum())).astype(np.float32) * steps[steps > 0]
    need(hashlib.sha256(new.astype("<f4").tobytes()).digest() == fields["result"], "another result")
    return new


def values(of: Signed, counts: list[int]) -> np.ndarray:
    """The float32 values of an update. `counts`: the values of each layer."""
    header, k = of.fields, of.fields["value_count"]
    if header["codec"] in FLOATS:
        return np.frombuffer(of.values, FLOATS[header["codec"]]).astype(np.float32)
    steps = np.repeat(np.array(header["steps"], np.float32), counts)
    if header["codec"] == "one-bit":
        bits = np.unpackbits(np.frombuffer(of.values, np.uint8))
        need(len(bits) == -(-k // 8) * 8 and not bits[k:].any(), "padding")
        return np.where(bits[:k], -steps, steps)
    q = integers(of.values, k).astype(np.float32)
    return (q - dither(header["task"], header["round"], header["device"], k)) * steps


def public_state(data: bytes, d: int) -> tuple[int, np.ndarray, bytes]:
    """Participations, which of the d parameters are personal, and the digest of both."""
    packed = zlib.decompress(data[4:])
    bits = np.unpackbits(np.frombuffer(packed, np.uint8))
    need(len(packed) == -(-d // 8) and not bits[d:].any(), "padding")
    digest = hashlib.sha256(data[:4] + packed).digest()[:16]
    return int.from_bytes(data[:4], "little"), bits[:d].astype(bool), digest


def membership_list(data: bytes) -> tuple[dict[str, bytes], bytes, bytes]:
    """The key of each device, the bytes that the operator's signature covers, and the signature, perhaps empty."""
    fields = _map(data, MEMBERSHIP_LIST)
    keys = {device: fields["keys"][32 * i : 32 * i + 32] for i, device in enumerate(fields["devices"])}
    unsigned = msgpack.packb({**fields, "signature": b""})
    return keys, b"hushfleet roster\0" + unsigned, fields["signature"]


def field_elements(data: bytes, bits: int) -> np.ndarray:
    """The integers of a masked update, or of a member's answer."""
    size = bits // 8
    rows = np.frombuffer(data, np.uint8).reshape(-1, size).astype(np.int64)
    return rows @ (256 ** np.arange(size))


def dither(task: str, round_number: int, device: str, k: int) -> np.ndarray:
    """The k numbers u."""
    key = hashlib.sha256(f"{task}|{round_number}|{device}".encode()).digest()[:16]
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(-(-k // 4))
    w = words.astype("<u8").view("<u2").astype(np.int64)[:k]
    return ((2 * w + 1 - 65536) / 131072).astype(np.float32)


def integers(data: bytes, k: int) -> np.ndarray:
    """The k integers q of coded values."""
    blocks = []
    for first in range(0, k, BLOCK):
        size = min(BLOCK, k - first)
        mode, data = data[0], data[1:]
        if mode == 0:
            blocks.append(np.zeros(size, np.int64))
            continue
        escapes, length = struct.unpack_from("<II", data)
        inflater = zlib.decompressobj(-15)
        raw = np.frombuffer(inflater.decompress(data[8 : 8 + length]), np.uint8)
        need(inflater.eof and not inflater.unused_data, "the stream does not end where it must")
        data = data[8 + length :]
        blocks.append(_block(raw.astype(np.int64), mode, escapes, size))
    need(not data, "more bytes than blocks")
    return np.concatenate(blocks) if blocks else np.zeros(0, np.int64)


def _block(raw: np.ndarray, mode: int, escapes: int, size: int) -> np.ndarray:
    b, packed = ALPHABETS[mode], -(-size // mode)
    need(len(raw) == packed + 3 * escapes, "another length")
    symbols = (raw[:packed, None] // b ** np.arange(mode) % b).ravel()
    need(bool((raw[:packed] < b**mode).all()) and not symbols[size:].any(), "padding")
    z = symbols[:size]
    need(int((z == b - 1).sum()) == escapes, "escapes do not match")
    z[z == b - 1] = (256 ** np.arange(3)) @ raw[packed:].reshape(3, escapes)
    return np.where(z % 2 == 0, z // 2, -(z + 1) // 2)
