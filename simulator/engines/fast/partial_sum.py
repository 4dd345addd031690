"""Adds the updates of a chunk of devices to one exact sum where they were trained. FOR SIMULATION ONLY.

The values are those that an aggregator would decode, to the last bit. The aggregator checks what was measured, and adds
the partial sums. A fixed sample of an update's values is encoded to determine its size on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hushfleet.aggregator.payloads.decoding import MAX_MAGNITUDE, measure, spread
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.symbols import BLOCK
from hushfleet.wire.format.update import UpdateHeader, payload_digest, read_header
from hushfleet.wire.format.update_values import EncodedUpdate, Measured, Summed, UpdateFormat, unsigned


class PartialSum:
    """The sum of a chunk's updates.

    :param size: the number of parameters, d.
    :param weight: returns the weight of an update, float32 `[d]`.
    """

    def __init__(self, size: int, weight: Callable[[np.ndarray], float]) -> None:
        self.sum = ExactSum(size)
        self._weight = weight
        self._last: tuple[Measured, int, np.ndarray] | None = None

    def encode(
        self, header: UpdateHeader, values: np.ndarray, *, counts: Sequence[int], identity: Identity | None
    ) -> EncodedUpdate:
        """Measures the values as they will be seen; the blob has none. Raises the errors of `UpdateFormat.encode`.

        They are added by `add`, when the device has committed its round.
        """
        sent = codec_of(header.codec).seen(values, header.coding(counts))
        data = unsigned(header, b"")
        self._last = measure(sent, counts), len(data) + coded_bytes(header, values, counts), sent
        return EncodedUpdate(data, sent)

    def add(self, mask: np.ndarray, after: bytes | None) -> Summed:
        """Adds the values that were encoded last; returns what the aggregator checks.

        :param mask: the device's personal entries in this round, bool `[d]`.
        :param after: as in `Summed`.
        """
        assert self._last is not None
        (measured, size, sent), self._last = self._last, None
        shared = None if sent.size == mask.size else ~mask
        values = sent if shared is None else spread(sent, shared)
        weight, largest = self._weight(values), max(measured.peaks, default=0.0)
        if largest <= MAX_MAGNITUDE:  # else the aggregator refuses the update
            self.sum.add(values, shared, weight=weight, largest=largest)
        return Summed(measured, size, weight, after)


class SummedUpdates(UpdateFormat):
    """The format of a round whose updates are in partial sums: headers alone. Other updates are as on real devices.

    `rows` has what was measured of each update without values, by its bytes.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, Summed] = {}

    def authenticate(self, data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, bytes]:
        if data not in self.rows:
            return super().authenticate(data, public_key=public_key)
        return read_header(data), payload_digest(data)

    def summed(self, data: bytes) -> Summed | None:
        return self.rows.get(data)

    def sent_bytes(self, data: bytes) -> int:
        """Returns the bytes of the encoded and signed blob, estimated from a sample of its values."""
        return self.rows[data].size if data in self.rows else len(data)


def coded_bytes(header: UpdateHeader, values: np.ndarray, counts: Sequence[int]) -> int:
    """Returns how many bytes the codec needs for `values` float32 `[k]`, estimated from one block of values.

    The sample is every n-th value of each layer. Up to 65,536 values are encoded completely, so their size is exact.
    """
    stride = -(-values.size // BLOCK) or 1
    parts = [part[::stride] for part in np.split(values, np.cumsum(counts)[:-1])]
    sample = np.concatenate(parts)
    coding = header.coding([len(part) for part in parts])
    coded = codec_of(header.codec).encode(sample, coding, np.empty_like(sample))
    return round(len(coded) * values.size / max(1, sample.size))
