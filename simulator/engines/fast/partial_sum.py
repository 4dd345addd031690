"""Adds the updates of a chunk of devices to one exact sum where they were trained. FOR SIMULATION ONLY.

The values are those that an aggregator would decode, to the last bit. The aggregator checks what was measured, and adds
the partial sums. Of some consecutive devices (`like_in`) whose updates have the same layers, noise and steps, the size
of one update on the wire is determined, from a fixed sample of its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.aggregator.payloads.decoding import MAX_MAGNITUDE, measure, spread
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.simulator.engines.fast.coded_size import coded_bytes, sample_stride, sampled_levels
from hushfleet.simulator.engines.fast.runtimes import compiled_addition
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.update import UpdateHeader, payload_digest
from hushfleet.wire.format.update_values import (
    EncodedUpdate,
    LayerMagnitudes,
    SentValues,
    Summed,
    UpdateFormat,
    unsigned,
)

if TYPE_CHECKING:
    from hushfleet.methods.state import PublicState
    from hushfleet.simulator.engines.fast.compiled_release import CompiledRelease

LIKE = 4
MOST_SIZED = 64
"""About how many updates of a round of one kind are encoded to know their size."""


def like_in(devices: int) -> int:
    """Returns how many consecutive devices of a round of so many have updates of the same size, if they are alike."""
    return LIKE * math.ceil(max(devices, 1) / (MOST_SIZED * LIKE))


class PartialSum:
    """The sum of a chunk's updates.

    :param size: the number of parameters, d.
    :param weight: returns the weight of an update, float32 `[d]`.
    :param like: `like_in` of the round.
    """

    def __init__(self, size: int, weight: Callable[[np.ndarray], float], *, like: int = LIKE) -> None:
        self.sum = ExactSum(size, add_small=compiled_addition())
        self._weight, self._like = weight, like
        self._last: tuple[UpdateHeader, LayerMagnitudes, int, np.ndarray] | None = None
        self._sizes: dict[tuple[Any, ...], int] = {}

    def begin(self, place: int) -> None:
        """Begins with a device.

        :param place: its number in the chunk. Chunks begin at multiples of `like`, so that sizes do not depend on them.
        """
        if place % self._like == 0:
            self._sizes.clear()

    def encode(
        self,
        header: UpdateHeader,
        values: np.ndarray,
        *,
        counts: Sequence[int],
        identity: Identity | None,
        release: CompiledRelease | None = None,
    ) -> EncodedUpdate:
        """Measures the values as they will be seen; the blob has none. Raises the errors of `UpdateFormat.encode`.

        They are added by `add`, when the device has committed its round.

        :param release: the release of the values, which has then done all of this if it could.
        """
        coding, data, done = header.coding(counts), unsigned(header, b""), None if release is None else release.sent
        if done is None:
            seen = codec_of(header.codec).seen(values, coding)
            done = SentValues(seen, measure(seen, counts), np.empty(0, np.float32))

        def levels() -> np.ndarray:
            sampled = header.codec == "quantized" and not done.levels.size
            return sampled_levels(done.values, coding, sample_stride(done.values.size)) if sampled else done.levels

        self._last = header, done.measured, len(data) + self.coded_size(header, counts, levels), done.values
        return EncodedUpdate(data, done.values)

    def coded_size(self, header: UpdateHeader, counts: Sequence[int], levels: Callable[[], np.ndarray]) -> int:
        """Returns the bytes that the values take on the wire.

        :param levels: returns a sample of the quantised values; it is called if the size is not known.
        """
        kind = header.noise_stds, header.steps, *counts
        if kind not in self._sizes:
            self._sizes[kind] = coded_bytes(header.codec, levels(), sum(counts))
        return self._sizes[kind]

    def add(self, public: PublicState, after: bytes | None) -> Summed:
        """Adds the values that were encoded last; returns what the aggregator checks.

        :param public: the device's state before the round.
        :param after: as in `Summed`.
        """
        assert self._last is not None
        (header, measured, size, sent), self._last = self._last, None
        shared = None if sent.size == public.shared.size else public.shared
        values = sent if shared is None else spread(sent, shared)
        weight, largest = self._weight(values), max(measured.peaks, default=0.0)
        if largest <= MAX_MAGNITUDE:  # else the aggregator refuses the update
            self.sum.add(values, shared, weight=weight, largest=largest)
        return Summed(header, measured, size, weight, after)


class SummedUpdates(UpdateFormat):
    """The format of a round whose updates are in partial sums: headers alone. Other updates are as on real devices.

    `rows` has what was measured of each update without values, by its bytes.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, Summed] = {}

    def authenticate(self, data: bytes, *, public_key: bytes) -> tuple[UpdateHeader, bytes]:
        if data not in self.rows:
            return super().authenticate(data, public_key=public_key)
        return self.rows[data].header, payload_digest(data)

    def summed(self, data: bytes) -> Summed | None:
        return self.rows.get(data)

    def sent_bytes(self, data: bytes) -> int:
        """Returns the bytes of the encoded and signed blob, estimated from a sample of its values."""
        return self.rows[data].size if data in self.rows else len(data)
