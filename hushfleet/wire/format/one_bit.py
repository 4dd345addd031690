"""The codec `one-bit`: the sign of each value, for the slowest links.

A value is a small signal in Gaussian noise of standard deviation s. So its sign alone, as +-s sqrt(pi / 2), has the
value's mean (unit gain, to first order in signal over noise) at pi / 2 = 1.571 times the noise's variance; this costs
1.96 dB of signal-to-noise ratio. What a device releases is as private, because the signs are signs of noised values;
other devices' noise may hide nothing in a sum of signs (`Codec.sums_noise_to`). The device adds the error of the signs
to its next update (`Codec.carries_error`), also if the signal is not small compared with the noise: over many rounds
the sums equal the sums of the noised values. Without noise the codec has no meaning and is refused.
"""

from __future__ import annotations

import math

from hushfleet.array_api import np
from hushfleet.errors import Malformed
from hushfleet.wire.format.codec import Codec, Coding, check_finite

VARIANCE_FACTOR = math.pi / 2
_PART = 1 << 16  # values at a time, a multiple of 8


def magnitude(noise_std: float) -> float:
    """Returns the magnitude of each value of a layer: noise_std sqrt(pi / 2).

    >>> round(magnitude(1.0), 4)
    1.2533
    """
    return noise_std * math.sqrt(VARIANCE_FACTOR)


def _encode(values: np.ndarray, coding: Coding, sent: np.ndarray) -> bytes:
    """Encodes one bit per value, set if it is negative, highest bit first, zero-padded. Raises `NotFinite`."""
    check_finite(values)
    coded = np.packbits(values < 0).tobytes()
    _decode(coded, coding, sent)
    return coded


def _decode(data: bytes | memoryview, coding: Coding, out: np.ndarray | None) -> np.ndarray:
    """Fills `out` with plus or minus each layer's magnitude. Raises `Malformed`."""
    size = coding.size
    values = np.empty(size, np.float32) if out is None else out
    packed = np.frombuffer(data, np.uint8)
    if packed.size != -(-size // 8):
        raise Malformed(f"{packed.size} bytes are not {size} signs")
    if size % 8 and packed[-1] & (0xFF >> size % 8):
        raise Malformed("the padding of the signs is not zero")
    signs = np.array([1.0, -1.0], np.float32)
    for start in range(0, size, _PART):
        stop = min(start + _PART, size)
        bits = np.unpackbits(packed[start // 8 : -(-stop // 8)], count=stop - start)
        np.take(signs, bits, out=values[start:stop], mode="clip")
    start = 0
    for count, step in zip(coding.counts, coding.steps, strict=True):
        values[start : start + count] *= np.float32(step)
        start += count
    return values


ONE_BIT = Codec(
    "one-bit",
    _encode,
    _decode,
    max_bytes=lambda size: -(-size // 8),
    step_of=lambda step, noise_std: magnitude(noise_std),
    added_variance=lambda step, noise_std: (VARIANCE_FACTOR - 1) * noise_std**2,
    bits=1.0,
    needs_noise="sends signs of noised values",
    carries_error=True,
    sums_noise_to=0.0,
    keeps_norm=False,
)
