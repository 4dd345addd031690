"""Defines `Codec`, one way to encode the values of an update. `hushfleet.wire.format.codecs` lists all codecs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from hushfleet.array_api import np
from hushfleet.errors import NotFinite

MAX_VALUES = 1 << 28
MIN_STEP = 2.0**-100  # every decoded value is then a normal float32, which no machine flushes to zero
MAX_STEP = 2.0**40
LayerStep = Annotated[float, Meta(ge=MIN_STEP, le=MAX_STEP, description="2^-100 to 2^40")]


class Coding(NamedTuple):
    """Facts that both sides know before the values are read.

    :param counts: number of values in each layer, in order; their sum is k.
    :param steps: the header's number for each layer; empty for a codec without steps.
    :param dither_key: 16 bytes, different for every update; None: no dither, so that zeros stay zero.
    """

    counts: Sequence[int]
    steps: Sequence[float]
    dither_key: bytes | None

    @property
    def size(self) -> int:
        """k, the number of values."""
        return sum(self.counts)


@dataclass(frozen=True)
class Codec:
    """One way to encode the values of an update.

    :param name: as in `wire.codec` of a task and in the header.
    :param encode: `(values float32 [k], coding, sent) -> bytes`; fills `sent`, float32 `[k]`, with the result of
        `decode`. Raises `Malformed` for values that do not fit, and `NotFinite`.
    :param decode: `(data, coding, out) -> float32 [k]`; fills and returns `out` if it is given. Raises `Malformed`
        and allocates in proportion to k, for any `data`.
    :param max_bytes: `(k) -> bytes`, the largest size of k values.
    :param round_trip: like `encode`, without the bytes, if this takes less time; None: there is no faster way.
    :param step_of: `(wire.step, noise_std) -> step`: the header's number for a layer with noise; None: no steps.
    :param added_variance: `(step, noise_std) -> variance` that the codec adds to a value.
    :param bits: bits per value; None if they depend on the values.
    :param uses_wire_step: whether the codec uses `wire.step` of the task.
    :param needs_noise: why an update without noise is refused; empty: it is accepted.
    :param carries_error: whether a device keeps the codec's error and adds it to its next update (error feedback: Seide
        et al., Interspeech 2014), so that errors do not add up over rounds. They are errors of noised values, so this
        is post-processing of the device's own noise.
    :param sums_noise_to: the largest `wire.step` at which the noise of all devices in a sum hides each of them; inf: at
        any, 0: at none. A coarser code of each device's values can remove the others' noise.
    :param keeps_norm: whether the norm of the decoded values carries information about the norm of the values.
    :param float_error: the relative and the absolute rounding error of a value, for floats; None for other codecs.
    """

    name: str
    encode: Callable[[np.ndarray, Coding, np.ndarray], bytes]
    decode: Callable[[bytes | memoryview, Coding, np.ndarray | None], np.ndarray]
    max_bytes: Callable[[int], int]
    round_trip: Callable[[np.ndarray, Coding, np.ndarray], None] | None = None
    step_of: Callable[[float, float], float] | None = None
    added_variance: Callable[[float, float], float] = lambda step, noise_std: 0.0
    bits: float | None = None
    uses_wire_step: bool = False
    needs_noise: str = ""
    carries_error: bool = False
    sums_noise_to: float = math.inf
    keeps_norm: bool = True
    float_error: tuple[float, float] | None = None

    def seen(self, values: np.ndarray, coding: Coding) -> np.ndarray:
        """Returns `decode` of `encode`, float32 `[k]`; for a simulation, which does not need the bytes."""
        sent = np.empty(values.size, np.float32)
        (self.round_trip or self.encode)(values, coding, sent)
        return sent


def check_finite(values: np.ndarray) -> None:
    """Raises `NotFinite` for values that are not finite."""
    # with a NaN, both max and min are NaN; these two passes take a fraction of the time of a test of each value
    if not (np.isfinite(values.max(initial=0)) and np.isfinite(values.min(initial=0))):
        raise NotFinite(f"{np.count_nonzero(~np.isfinite(values))} of the update's values are not finite")
