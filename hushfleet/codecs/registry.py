"""The registry of codecs: the formats in which an update's values may be sent.

| codec | bits per value | error |
|---|---|---|
| `quantized` | near the entropy; 2.2 at a step of the noise | uniform, step^2 / 12 more variance |
| `one-bit` | 1 | 1.57 times the noise's variance |
| `float16` | 16 | 2^-11 relative |
| `float32` | 32 | none |
| `masked` | 16, 24 or 32, and corrections | below 1 % of the noise; for secure sums, encoded in `hushfleet.secure` |

A new codec is a `Codec` in its own file, and an entry in `CODECS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.codecs.codec import Codec, Coding
from hushfleet.codecs.floats import FLOAT16, FLOAT32
from hushfleet.codecs.one_bit import ONE_BIT
from hushfleet.codecs.quantized import MIN_STEP, QUANTIZED
from hushfleet.errors import Malformed, PrivacyError

if TYPE_CHECKING:
    from hushfleet.config.spec import WireSpec

CODECS = (QUANTIZED, ONE_BIT, FLOAT16, FLOAT32)
"""The codecs of plain sums, in the order of the documentation."""


def _refuse(data: object, coding: Coding, out: np.ndarray | None) -> bytes:
    raise Malformed("the codec masked is for secure sums, which hushfleet.secure reads and writes")


MASKED = Codec("masked", _refuse, _refuse, max_bytes=lambda size: 0)  # type: ignore[arg-type]  # it never returns
NAMES = tuple(codec.name for codec in (*CODECS, MASKED))
"""The names that `wire.codec` may have."""


def codec_of(name: str) -> Codec:
    """Returns the codec with this name, one of `NAMES`.

    >>> codec_of("one-bit").name
    'one-bit'
    """
    return next(codec for codec in (*CODECS, MASKED) if codec.name == name)


def steps_for(wire: WireSpec, *, noise_stds: Sequence[float], layer_rms: Sequence[float]) -> tuple[float, ...]:
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
    return max(codec.max_bytes(size) for codec in CODECS)
