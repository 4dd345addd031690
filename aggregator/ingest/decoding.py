"""From an update's bytes to its values and their squares: the long part of its way in, a pure function of the bytes.

It runs in the main process or in a worker (`decoding_pool`), so nothing here imports PyTorch or a store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.ingest.sum_kernels import Addition, BlockAddition
from hushfleet.errors import WireError
from hushfleet.wire.format.update import decode_signed

MAX_MAGNITUDE = 2.0**20
"""No value may be larger: the exact sums rest on it."""


FAULTS = frozenset({"malformed", "wrong-shape", "non-finite", "out-of-bounds", "below-noise"})
"""Codes of refusals for which a device is to blame, where they are final: no honest one sends such an update."""


class Refusal(Exception):
    """An update that is not taken: a code of docs/wire.md and the reason in words.

    :param final: the device did sign it for this round, and sending it again would not help.
    """

    def __init__(self, code: str, reason: str, *, final: bool = True) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.final = final

    @property
    def is_fault(self) -> bool:
        """Whether the device that signed the update, and nobody else, is to blame."""
        return self.final and self.code in FAULTS


class Decoded(NamedTuple):
    """`values` float32 `[k]`, finite and at most 2^20 in magnitude.

    :param peaks: the largest magnitude in each layer; :param squares: the sum of the squares of each.
    """

    values: np.ndarray
    peaks: tuple[float, ...]
    squares: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.peaks)


def decode(
    data: bytes | memoryview, *, counts: Sequence[int], out: np.ndarray | None = None, walk: Addition | None = None
) -> Decoded | Refusal:
    """The values of an update whose signature was verified, or why it is refused.

    :param counts: how many values of each layer are expected.
    :param out: float32 `[k]`, memory for the values; after a refusal its content means nothing. Without it they may
        be read-only and lie in `data`.
    :param walk: what measures the values; by default NumPy, which gives the same bits.
    """
    try:
        return _decoded(data, counts, out, walk or BlockAddition())
    except Refusal as refusal:
        return refusal


def _decoded(data: bytes | memoryview, counts: Sequence[int], out: np.ndarray | None, walk: Addition) -> Decoded:
    try:
        values = decode_signed(data, counts=counts, out=out).values
    except WireError as error:
        raise Refusal("malformed", str(error)) from error
    ends = np.cumsum(counts).tolist()
    measured = [walk.measure(values[end - k : end]) for k, end in zip(counts, ends, strict=True)]
    largest = float(np.max([magnitude for magnitude, _ in measured]))  # keeps a NaN
    if not math.isfinite(largest):
        raise Refusal("non-finite", "some of the update's values are not finite")
    if largest > MAX_MAGNITUDE:
        raise Refusal("out-of-bounds", f"a value of {largest:g} is above the limit of {MAX_MAGNITUDE:g}")
    peaks, squares = zip(*measured, strict=True)
    return Decoded(values, peaks, squares)
