"""The registry of codecs: the formats in which an update's values may be sent.

| codec | bits per value | error |
|---|---|---|
| `quantized` | near the entropy; 2.2 at a step of the noise | uniform, step^2 / 12 more variance |
| `one-bit` | 1 | 1.57 times the noise's variance |
| `float16` | 16 | 2^-11 relative |
| `float32` | 32 | none |
| `masked` | 16, 24 or 32, and corrections | below 1 % of the noise; for secure aggregation, encoded in
`hushfleet.secure` |

A new codec is a `Codec` in its own file, and an entry in `_PLACES`. The file is imported when the codec is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from hushfleet.errors import Malformed, PrivacyError
from hushfleet.wire.format.codec import MIN_STEP, Codec, Coding

if TYPE_CHECKING:
    import numpy as np

_PLACES = {
    "quantized": ("quantized", "QUANTIZED"),
    "one-bit": ("one_bit", "ONE_BIT"),
    "float16": ("floats", "FLOAT16"),
    "float32": ("floats", "FLOAT32"),
}
"""The file and the name of each codec of plain sums, in the order of the documentation."""
NAMES = (*_PLACES, "masked")
"""The names that `wire.codec` may have."""


def _refuse(data: object, coding: Coding, out: np.ndarray | None) -> bytes:
    raise Malformed("the codec masked is for secure aggregation, which hushfleet.secure reads and writes")


MASKED = Codec("masked", _refuse, _refuse, max_bytes=lambda size: 0)  # type: ignore[arg-type]  # it never returns


@cache
def codec_of(name: str) -> Codec:
    """Returns the codec with this name, one of `NAMES`.

    >>> codec_of("one-bit").name
    'one-bit'
    """
    if name == MASKED.name:
        return MASKED
    file, value = _PLACES[name]
    codec: Codec = getattr(importlib.import_module(f"hushfleet.wire.format.{file}"), value)
    return codec


def codecs() -> tuple[Codec, ...]:
    """Returns the codecs of plain sums, in the order of the documentation."""
    return tuple(map(codec_of, _PLACES))


class _Wire(Protocol):
    """A `WireSpec`, which has a codec's name among its types."""

    @property
    def codec(self) -> str: ...
    @property
    def step(self) -> float: ...
    @property
    def relative_step(self) -> float: ...


def steps_for(wire: _Wire, *, noise_stds: Sequence[float], layer_rms: Sequence[float]) -> tuple[float, ...]:
    """Returns the `steps` of a header: from each layer's noise, or from its values if the update has no noise.

    :param noise_stds: standard deviation of the noise in each layer; all 0 or all positive.
    :param layer_rms: root mean square of the values of each layer.

    Raises `PrivacyError` without noise if the codec needs it.
    """
    codec, noisy = codec_of(wire.codec), any(std > 0 for std in noise_stds)
    if codec.needs_noise and not noisy:
        raise PrivacyError(
            f'wire.codec = "{codec.name}" {codec.needs_noise}, and this update has no noise; use "quantized"'
        )
    if codec.step_of is None:
        return ()
    if noisy:
        return tuple(codec.step_of(wire.step, std) for std in noise_stds)
    return tuple(wire.relative_step * rms or MIN_STEP for rms in layer_rms)


def max_bytes(size: int) -> int:
    """Returns the largest number of bytes of `size` values in any codec."""
    return max(codec.max_bytes(size) for codec in codecs())
