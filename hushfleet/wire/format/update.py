"""Encodes the update blob, which a device sends once per round, whole and signed.

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

from hushfleet.array_api import np
from hushfleet.errors import Malformed
from hushfleet.schema import Checked, Finite, NotNegative, PositiveOrInf, later, pack, require, unpack
from hushfleet.wire.format.codec import MAX_VALUES, Coding, LayerStep, check_finite
from hushfleet.wire.format.codecs import codec_of, max_bytes
from hushfleet.wire.format.fields import StateDigest
from hushfleet.wire.format.headed import HEAD_BYTES, MAX_HEADER_BYTES, MAX_LAYERS, cut, cut_header, headed
from hushfleet.wire.format.identity import SIGNATURE_BYTES, Identity, verify
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
        return hashlib.sha256(f"{self.task}|{self.round}|{self.device}".encode()).digest()[:16]

    def coding(self, counts: Sequence[int]) -> Coding:
        """Returns the codec's parameters for an update.

        :param counts: the number of values in each layer.
        """
        return Coding(counts, self.steps, self.dither_key)


class EncodedUpdate(NamedTuple):
    """An encoded update: the aggregator decodes exactly `sent`, float32 `[k]`, from `data`."""

    data: bytes
    sent: np.ndarray


class DecodedUpdate(NamedTuple):
    """A decoded update: `values` float32 `[k]` are finite; `public` is the attached public state, if any."""

    header: UpdateHeader
    values: np.ndarray
    public: bytes | None


class _Sections(NamedTuple):
    header: memoryview
    values: memoryview
    public: memoryview
    signed: memoryview
    signature: memoryview


def encode_update(
    header: UpdateHeader,
    values: np.ndarray,
    *,
    counts: Sequence[int],
    identity: Identity | None,
    public: bytes | None = None,
) -> EncodedUpdate:
    """Returns the signed blob for `values` float32 `[k]`.

    :param counts: how many of the k values belong to each layer, in order.
    :param identity: None leaves zeros in place of the signature, for `signed`.
    :param public: the device's public state, if the aggregator does not hold it.

    Raises `Malformed` for values that are not finite or do not fit the header, and `TooLarge`.
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    _check_counts(header, counts)
    if values.shape != (header.value_count,):
        raise Malformed(f"values of shape {values.shape} came with value_count = {header.value_count}")
    sent = np.empty(values.size, np.float32)
    coded = codec_of(header.codec).encode(values, header.coding(counts), sent)
    return EncodedUpdate(_assembled(pack(header), coded, public or b"", identity), sent)


class UpdateFormat:
    """The format of an update for a plain sum on its way to the aggregator: encoded and signed, as on real devices."""

    def encode(
        self, header: UpdateHeader, values: np.ndarray, *, counts: Sequence[int], identity: Identity | None
    ) -> EncodedUpdate:
        """Encodes an update as `encode_update` does."""
        return encode_update(header, values, counts=counts, identity=identity)

    def authenticate(self, data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, bytes]:
        """Returns the header, and `payload_digest`, if the owner of the key sent the update.

        Raises `BadSignature`, `Malformed` or `TooLarge`.
        """
        sections = _sections(data)
        header, payload = _header(sections.header), payload_digest(data)
        verify(public_key, sections.signed, sections.signature)
        return header, payload

    def values(self, header: UpdateHeader, data: bytes, *, counts: Sequence[int]) -> np.ndarray:
        """Returns the values of an authenticated update, float32 `[k]`, NaN included. Raises `Malformed`."""
        return _values(header, _sections(data), counts, None)

    def sent_bytes(self, data: bytes) -> int:
        """Returns the number of bytes that an update takes on the wire; 0: not known."""
        return len(data)


SIGNED = UpdateFormat()


def unsigned(header: UpdateHeader, values: bytes) -> bytes:
    """Assembles a blob of encoded values, with zeros as the signature. FOR SIMULATION ONLY."""
    return _assembled(pack(header), values, b"", None)


def read_coded(data: bytes) -> memoryview:
    """Reads the encoded values alone; the signature is NOT checked. Raises `Malformed` or `TooLarge`."""
    return _sections(data).values


def signed(data: bytes, *, identity: Identity) -> bytes:
    """Returns a blob that was encoded without an identity, with the signature. Raises `Malformed` or `TooLarge`."""
    unsigned_part = bytes(_sections(data).signed)
    return unsigned_part + identity.sign(unsigned_part)


def encode_masked(header: UpdateHeader, values: bytes, *, identity: Identity | None) -> bytes:
    """Returns the signed blob of an update for a secure sum.

    :param values: masked values and then corrections, each in the format of
        `hushfleet.secure.prime_field.to_bytes`.
    """
    return _assembled(pack(header), values, b"", identity)


def decode_masked(data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, memoryview]:
    """Decodes the blob of `encode_masked`. Raises `BadSignature`, `Malformed` or `TooLarge`."""
    sections = _sections(data)
    verify(public_key, sections.signed, sections.signature)
    return _header(sections.header), sections.values


def attach_public(data: bytes, public: bytes | None, *, identity: Identity) -> bytes:
    """Replaces the public section (None: without one), keeps header and values, and signs the blob again."""
    sections = _sections(data)
    return _assembled(sections.header, sections.values, public or b"", identity)


def payload_digest(data: bytes) -> bytes:
    """Returns the SHA-256 of header and values, for the ledger: the same with and without the public section."""
    sections = _sections(data)
    return hashlib.sha256(sections.signed[: -_LENGTH.size - len(sections.public)]).digest()


def read_header(data: bytes) -> UpdateHeader:
    """Reads the header alone; the signature is NOT checked. Raises `Malformed` or `TooLarge`."""
    return _header(_sections(data).header)


def read_public(data: bytes) -> bytes | None:
    """Reads the attached public state alone; the signature is NOT checked. Raises `Malformed` or `TooLarge`."""
    return bytes(_sections(data).public) or None


def decode_update(
    data: bytes, *, public_key: bytes, counts: Sequence[int], out: np.ndarray | None = None
) -> DecodedUpdate:
    """Decodes the update if the owner of `public_key` signed it.

    :param counts: how many values of each layer the aggregator expects, from the device's mask.
    :param out: float32 `[k]`, memory for the values; after an error its content is undefined.

    Raises `BadSignature`, `Malformed` or `TooLarge`, and nothing else.
    """
    sections = _sections(data)
    verify(public_key, sections.signed, sections.signature)
    header = _header(sections.header)
    values = _values(header, sections, counts, out)
    check_finite(values)
    return DecodedUpdate(header, values, bytes(sections.public) or None)


def _values(header: UpdateHeader, sections: _Sections, counts: Sequence[int], out: np.ndarray | None) -> np.ndarray:
    _check_counts(header, counts)
    return codec_of(header.codec).decode(sections.values, header.coding(counts), out)


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


def _assembled(
    header: bytes | memoryview, values: bytes | memoryview, public: bytes, identity: Identity | None
) -> bytes:
    sections = (_LENGTH.pack(len(values)), values, _LENGTH.pack(len(public)), public)
    signed = b"".join((headed(MAGIC, VERSION, header), *sections))
    return signed + (bytes(SIGNATURE_BYTES) if identity is None else identity.sign(signed))


def _sections(data: bytes | memoryview) -> _Sections:
    view = memoryview(data)
    if len(view) < HEAD_BYTES + 2 * _LENGTH.size + SIGNATURE_BYTES:
        raise Malformed(f"an update of {len(view)} bytes is too short")
    signed, signature = view[:-SIGNATURE_BYTES], view[-SIGNATURE_BYTES:]
    header, rest = cut_header(signed, MAGIC, VERSION)
    values, rest = _cut_counted(rest)
    public, rest = _cut_counted(rest)
    if rest:
        raise Malformed(f"the update has {len(rest)} extra bytes")
    return _Sections(header, values, public, signed, signature)


def _cut_counted(view: memoryview) -> tuple[memoryview, memoryview]:
    length, rest = cut(view, _LENGTH.size)
    return cut(rest, _LENGTH.unpack(length)[0])


def _header(packed: memoryview) -> UpdateHeader:
    return unpack(UpdateHeader, packed, what="the update's header")


def _check_counts(header: UpdateHeader, counts: Sequence[int]) -> None:
    if len(counts) != len(header.noise_stds) or sum(counts) != header.value_count:
        raise Malformed(
            f"the update has {header.value_count} values in {len(header.noise_stds)} layers, expected {sum(counts)} "
            f"in {len(counts)}"
        )
