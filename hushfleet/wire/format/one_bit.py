"""The one-bit form: the sign of each value, for the weakest links.

A value is a small signal in Gaussian noise of standard deviation s, so its sign alone, as +-s sqrt(pi / 2), has the
value's mean (unit gain, to first order in signal over noise) at pi / 2 = 1.571 times the noise's variance: 1.96 dB of
the signal-to-noise ratio. Privacy is untouched, since signs are taken of what was noised. What a sign leaves out, that
of a signal which is not small against the noise included, the device adds to its next update (`forms.CARRIED`): over
many rounds the sums are those of the noised values. Without noise the form means nothing, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hushfleet.errors import Malformed, NotFinite

VARIANCE_FACTOR = math.pi / 2
_PART = 1 << 16  # values at a time, a multiple of 8
_SIGNS = np.array([1.0, -1.0], np.float32)


def magnitude(noise_std: float) -> float:
    """What each value of a layer is in size: noise_std sqrt(pi / 2)."""
    return noise_std * math.sqrt(VARIANCE_FACTOR)


def encode_signs(values: np.ndarray) -> bytes:
    """A bit a value of float32 `[k]`, set for negative ones, highest bit first, the last byte filled up with zeros.

    Raises `NotFinite`.
    """
    if not np.isfinite(values).all():
        raise NotFinite(f"{np.count_nonzero(~np.isfinite(values))} of the update's values are not finite")
    return np.packbits(values < 0).tobytes()


def decode_signs(
    data: bytes | memoryview, *, counts: Sequence[int], magnitudes: Sequence[float], out: np.ndarray
) -> None:
    """Fills `out`, float32 `[k]`, with plus or minus its layer's magnitude. Raises `Malformed`."""
    size = sum(counts)
    packed = np.frombuffer(data, np.uint8)
    if packed.size != -(-size // 8):
        raise Malformed(f"{packed.size} bytes are not {size} signs")
    if size % 8 and packed[-1] & (0xFF >> size % 8):
        raise Malformed("the padding of the signs is not zero")
    for start in range(0, size, _PART):
        stop = min(start + _PART, size)
        bits = np.unpackbits(packed[start // 8 : -(-stop // 8)], count=stop - start)
        np.take(_SIGNS, bits, out=out[start:stop], mode="clip")
    start = 0
    for count, size_of in zip(counts, magnitudes, strict=True):
        out[start : start + count] *= np.float32(size_of)
        start += count
