"""Defines the update blob, which a device sends once per round, whole and signed; `update_values` encodes its values.

    "HU", version, 0 | u32 header length | header (msgpack) | u32 values length | values
                     | u32 public length | public state (may be empty) | Ed25519 signature over all before it

The values are encoded once, when the noise is added, and stored. Later the section with the device's public
state can be attached or left out without a change of the values, so noise is never added twice.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from hushfleet.errors import Malformed
from hushfleet.schema import Checked, Finite, NotNegative, PositiveOrInf, later, require, unpack
from hushfleet.wire.format.codec import MAX_VALUES, Coding, LayerStep
from hushfleet.wire.format.codecs import codec_of, max_bytes
from hushfleet.wire.format.fields import StateDigest
from hushfleet.wire.format.headed import HEAD_BYTES, MAX_HEADER_BYTES, MAX_LAYERS, cut, cut_header, headed
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity
from hushfleet.wire.format.spec import Form, RoundNumber, TaskId
from hushfleet.wire.format.topics import Name

MAGIC = b"HU"
VERSION = 2

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class UpdateHeader(Checked):
    """Header of an update: everything that the aggregator must know before it reads the values.

    :param value_count: k, the number of values: the shared parameters only, in the flat vector's order.
    :param steps: each layer's quantisation step, or its magnitude with `one-bit`; empty for plain floats.
    :param noise_stds: each layer's standard deviation of the noise per coordinate; 0 is no noise.
    :param clip_norms: the clip norm that each layer's noise was scaled to; inf is no bound.
    :param public_digest: 16 bytes, digest of the device's `PublicState` before this update.
    :param rounds_charged: rounds in the device's privacy ledger for this task, this one included.
    :param epsilon_server: the epsilon that the device has spent against the aggregator; inf without noise.
    :param multiplier_server: noise multiplier of this round from the aggregator's view; 0 without noise.
    :param noise_split: the number of devices that shared the round's noise.
    :param report: a few numbers for the method's server half; the same charge covers them.
    """

    task: TaskId
    round: RoundNumber
    device: Name
    codec: Form
    value_count: Annotated[int, Meta(ge=0, le=MAX_VALUES)]
    steps: Annotated[tuple[LayerStep, ...], Meta(max_length=MAX_LAYERS)]
    noise_stds: Annotated[tuple[NotNegative, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    clip_norms: Annotated[tuple[PositiveOrInf, ...], Meta(max_length=MAX_LAYERS)]
    public_digest: StateDigest
    rounds_charged: Annotated[int, Meta(ge=0, le=1 << 40)]
    epsilon_server: Annotated[float, Meta(ge=0)]
    multiplier_server: NotNegative
    noise_split: Annotated[int, Meta(ge=1, le=1 << 40)]
    report: Annotated[tuple[Finite, ...], Meta(max_length=16)] = later(())

    def __post_init__(self) -> None:
        # lists and NumPy scalars of the caller become the wire's types, so that equal headers compare equal
        for name in ("steps", "noise_stds", "clip_norms", "report"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        super().__post_init__()
        layers = len(self.noise_stds)
        require(len(self.clip_norms) == layers, "clip_norms", len(self.clip_norms), f"of {layers} layers")
        expected = 0 if codec_of(self.codec).step_of is None else layers
        require(len(self.steps) == expected, "steps", len(self.steps), f"{expected} with codec {self.codec}")

    @property
    def dither_key(self) -> bytes:
        """16 bytes, different for each update."""
        return dither_key_of(self.task, self.round, self.device)

    def coding(self, counts: Sequence[int]) -> Coding:
        """Returns the codec's parameters for an update.

        :param counts: the number of values in each layer.
        """
        return Coding(counts, self.steps, self.dither_key)


def dither_key_of(task: str, round: int, device: str) -> bytes:
    """Returns 16 bytes, different for each update."""
    return hashlib.sha256(f"{task}|{round}|{device}".encode()).digest()[:16]


class Sections(NamedTuple):
    """The parts of a blob, as views of its bytes."""

    header: memoryview
    values: memoryview
    public: memoryview
    signed: memoryview
    signature: memoryview

    @property
    def payload_digest(self) -> bytes:
        """The SHA-256 of header and values."""
        return hashlib.sha256(self.signed[: -_LENGTH.size - len(self.public)]).digest()


def signed(data: bytes, *, identity: Identity) -> bytes:
    """Returns a blob that was encoded without an identity, with the signature. Raises `Malformed` or `TooLarge`."""
    unsigned_part = bytes(sections_of(data).signed)
    return unsigned_part + identity.sign(unsigned_part)


def attach_public(data: bytes, public: bytes | None, *, identity: Identity) -> bytes:
    """Replaces the public section (None: without one), keeps header and values, and signs the blob again."""
    sections = sections_of(data)
    return assembled(sections.header, sections.values, public or b"", identity)


def payload_digest(data: bytes) -> bytes:
    """Returns the SHA-256 of header and values, for the ledger: the same with and without the public section."""
    return sections_of(data).payload_digest


def read_header(data: bytes) -> UpdateHeader:
    """Reads the header alone; the signature is NOT checked. Raises `Malformed` or `TooLarge`."""
    return header_of(sections_of(data).header)


def read_public(data: bytes) -> bytes | None:
    """Reads the attached public state alone; the signature is NOT checked. Raises `Malformed` or `TooLarge`."""
    return bytes(sections_of(data).public) or None


def max_public_bytes(size: int) -> int:
    """Returns the maximum size in bytes of a public state for `size` parameters: one bit each, and a margin."""
    return size // 8 + size // 1024 + 256


def max_update_bytes(size: int) -> int:
    """Returns the maximum size in bytes of an update for `size` parameters, for every codec and all sections.

    >>> max_update_bytes(1_199_882)
    5088166
    """
    fixed = HEAD_BYTES + 2 * _LENGTH.size + SIGNATURE_BYTES
    return fixed + MAX_HEADER_BYTES + max_bytes(size) + max_public_bytes(size)


def assembled(
    header: bytes | memoryview, values: bytes | memoryview, public: bytes, identity: Identity | None
) -> bytes:
    """Returns the blob; without an identity, with zeros as the signature."""
    sections = (_LENGTH.pack(len(values)), values, _LENGTH.pack(len(public)), public)
    signed = b"".join((headed(MAGIC, VERSION, header), *sections))
    return signed + (bytes(SIGNATURE_BYTES) if identity is None else identity.sign(signed))


def sections_of(data: bytes | memoryview) -> Sections:
    """Returns the parts of a blob; nothing is verified. Raises `Malformed` or `TooLarge`."""
    view = memoryview(data)
    if len(view) < HEAD_BYTES + 2 * _LENGTH.size + SIGNATURE_BYTES:
        raise Malformed(f"an update of {len(view)} bytes is too short")
    signed, signature = view[:-SIGNATURE_BYTES], view[-SIGNATURE_BYTES:]
    header, rest = cut_header(signed, MAGIC, VERSION)
    values, rest = _cut_counted(rest)
    public, rest = _cut_counted(rest)
    if rest:
        raise Malformed(f"the update has {len(rest)} extra bytes")
    return Sections(header, values, public, signed, signature)


def _cut_counted(view: memoryview) -> tuple[memoryview, memoryview]:
    length, rest = cut(view, _LENGTH.size)
    return cut(rest, _LENGTH.unpack(length)[0])


def header_of(packed: memoryview) -> UpdateHeader:
    """Unpacks a header. Raises `Malformed`."""
    return unpack(UpdateHeader, packed, what="the update's header")
