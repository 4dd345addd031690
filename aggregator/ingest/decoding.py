"""From an update's bytes to its values and their squares: the long part of accepting it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hushfleet.blocks import blocks
from hushfleet.errors import WireError
from hushfleet.wire.format.update import SIGNED, UpdateFormat, UpdateHeader

MAX_MAGNITUDE = 2.0**20
"""No value may be larger: the exact sums rest on it."""

FAULTS = frozenset({"malformed", "wrong-shape", "non-finite", "out-of-bounds", "below-noise"})
"""Codes of refusals for which a device is to blame, where they are final: no honest one sends such an update."""


class Refusal(Exception):
    """An update that is not taken: a code of docs/wire.md and the reason in words.

    :param final: the device did sign it for this round, and sending it again would not help.
    """

    def __init__(self, code: str, reason: str, final: bool = True) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.final = final

    @property
    def is_fault(self) -> bool:
        """Whether the device that signed the update, and nobody else, is to blame."""
        return self.final and self.code in FAULTS


class Decoded(NamedTuple):
    """`values` float32 `[k]`, finite and at most 2^20 in magnitude; read-only, perhaps.

    :param peaks: the largest magnitude in each layer.
    :param squares: the sum of the squares of each.
    """

    values: np.ndarray
    peaks: tuple[float, ...]
    squares: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.peaks)


def decode(
    header: UpdateHeader, data: bytes, counts: Sequence[int], *, update_format: UpdateFormat = SIGNED
) -> Decoded:
    """The values of an update whose signature was verified. Raises `Refusal`.

    :param counts: how many values of each layer are expected.
    """
    try:
        values = update_format.values(header, data, counts=counts)
    except WireError as error:
        raise Refusal("malformed", str(error)) from error
    ends = np.cumsum(counts).tolist()
    layers = [values[end - k : end] for k, end in zip(counts, ends, strict=True)]
    # NaN is the minimum and the maximum of whatever it is among
    peaks = tuple(float(np.maximum(-layer.min(initial=0.0), layer.max(initial=0.0))) for layer in layers)
    if not all(map(math.isfinite, peaks)):
        raise Refusal("non-finite", "some of the update's values are not finite")
    if max(peaks) > MAX_MAGNITUDE:
        raise Refusal("out-of-bounds", f"a value of {max(peaks):g} is above the limit of {MAX_MAGNITUDE:g}")
    return Decoded(values, peaks, tuple(map(_square, layers)))


def _square(values: np.ndarray) -> float:
    return math.fsum(float(np.square(values[part], dtype=np.float64).sum()) for part in blocks(values))
