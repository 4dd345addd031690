"""Encodes and decodes the values of an update: on the device that has trained, and on the aggregator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.errors import Malformed
from hushfleet.schema import pack
from hushfleet.wire.format.codec import check_finite
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.identity import Identity, verify
from hushfleet.wire.format.update import Sections, UpdateHeader, assembled, header_of, sections_of


class EncodedUpdate(NamedTuple):
    """An encoded update: the aggregator decodes exactly `sent`, float32 `[k]`, from `data`."""

    data: bytes
    sent: np.ndarray


class DecodedUpdate(NamedTuple):
    """A decoded update: `values` float32 `[k]` are finite; `public` is the attached public state, if any."""

    header: UpdateHeader
    values: np.ndarray
    public: bytes | None


class LayerMagnitudes(NamedTuple):
    """The largest magnitude and the sum of squares of an update's values in each layer."""

    peaks: tuple[float, ...]
    squares: tuple[float, ...]


class SentValues(NamedTuple):
    """An update as the aggregator will see it. FOR SIMULATION ONLY.

    :param values: float32 `[k]`.
    :param levels: a sample of the quantised values, float32; empty if the codec does not quantise by a step.
    """

    values: np.ndarray
    measured: LayerMagnitudes
    levels: np.ndarray


class Summed(NamedTuple):
    """An update whose values are in a partial sum already. FOR SIMULATION ONLY.

    :param size: the bytes that the update would take on the wire.
    :param weight: the weight with which they were added.
    :param after: the device's next public state; None if its mask does not change.
    """

    header: UpdateHeader
    measured: LayerMagnitudes
    size: int
    weight: float = 1.0
    after: bytes | None = None


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
    return EncodedUpdate(assembled(pack(header), coded, public or b"", identity), sent)


EncodeUpdate = Callable[..., EncodedUpdate]
"""`encode_update`, or what a simulation does in its place."""


class UpdateFormat:
    """The format of an update for a plain sum on its way to the aggregator: encoded and signed, as on real devices."""

    encode: EncodeUpdate = staticmethod(encode_update)

    def authenticate(self, data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, bytes]:
        """Returns the header, and `payload_digest`, if the owner of the key sent the update.

        Raises `BadSignature`, `Malformed` or `TooLarge`.
        """
        sections = sections_of(data)
        header, payload = header_of(sections.header), sections.payload_digest
        verify(public_key, sections.signed, sections.signature)
        return header, payload

    def values(self, header: UpdateHeader, data: bytes, *, counts: Sequence[int]) -> np.ndarray:
        """Returns the values of an authenticated update, float32 `[k]`, NaN included. Raises `Malformed`."""
        return _values(header, sections_of(data), counts, None)

    def summed(self, data: bytes) -> Summed | None:
        """Returns what is known of an update whose values are in a partial sum already; None for others."""
        return None

    def sent_bytes(self, data: bytes) -> int:
        """Returns the number of bytes that an update takes on the wire; 0: not known."""
        return len(data)


SIGNED = UpdateFormat()


def unsigned(header: UpdateHeader, values: bytes) -> bytes:
    """Assembles a blob of encoded values, with zeros as the signature. FOR SIMULATION ONLY."""
    return assembled(pack(header), values, b"", None)


def encode_masked(header: UpdateHeader, values: bytes, *, identity: Identity | None) -> bytes:
    """Returns the signed blob of an update for secure aggregation.

    :param values: masked values and then corrections, each in the format of
        `hushfleet.secure.prime_field.to_bytes`.
    """
    return assembled(pack(header), values, b"", identity)


def decode_masked(data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, memoryview]:
    """Decodes the blob of `encode_masked`. Raises `BadSignature`, `Malformed` or `TooLarge`."""
    sections = sections_of(data)
    verify(public_key, sections.signed, sections.signature)
    return header_of(sections.header), sections.values


def decode_update(
    data: bytes, *, public_key: bytes, counts: Sequence[int], out: np.ndarray | None = None
) -> DecodedUpdate:
    """Decodes the update if the owner of `public_key` signed it.

    :param counts: how many values of each layer the aggregator expects, from the device's mask.
    :param out: float32 `[k]`, memory for the values; after an error its content is undefined.

    Raises `BadSignature`, `Malformed` or `TooLarge`, and nothing else.
    """
    sections = sections_of(data)
    verify(public_key, sections.signed, sections.signature)
    header = header_of(sections.header)
    values = _values(header, sections, counts, out)
    check_finite(values)
    return DecodedUpdate(header, values, bytes(sections.public) or None)


def _values(header: UpdateHeader, sections: Sections, counts: Sequence[int], out: np.ndarray | None) -> np.ndarray:
    _check_counts(header, counts)
    return codec_of(header.codec).decode(sections.values, header.coding(counts), out)


def _check_counts(header: UpdateHeader, counts: Sequence[int]) -> None:
    if len(counts) != len(header.noise_stds) or sum(counts) != header.value_count:
        raise Malformed(
            f"the update has {header.value_count} values in {len(header.noise_stds)} layers, expected {sum(counts)} "
            f"in {len(counts)}"
        )
