"""Estimates the size of an update on the wire from a sample of its quantised values, which alone is encoded."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hushfleet.array_api import BLOCK as PART
from hushfleet.wire.format.codec import Coding
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.quantized import dither
from hushfleet.wire.format.symbols import BLOCK, BlockEncoder

_SAMPLE = 1 << 14
_CODE_BYTES = 60
"""About what the description of its code takes in a coded block: the sample has one, for fewer values."""


def sample_stride(size: int) -> int:
    """Returns n, if every n-th of `size` values is in the sample. Up to 65,536 values all are, so the size is exact."""
    return 1 if size <= BLOCK else -(-size // _SAMPLE)


def sample_places(counts: Sequence[int], stride: int) -> np.ndarray:
    """Returns the places of the sample, int64: in each layer of so many values, some of each block."""
    start, found = 0, []
    for count in counts:
        found += [
            np.arange(first, min(first + PART, start + count), stride) for first in range(start, start + count, PART)
        ]
        start += count
    return np.concatenate(found) if found else np.empty(0, np.int64)


def sampled_levels(seen: np.ndarray, coding: Coding, stride: int) -> np.ndarray:
    """Returns the quantised values of the sample, float32.

    :param seen: the values as they will be decoded, float32 `[k]`.
    """
    assert coding.dither_key is not None
    places, steps = sample_places(coding.counts, stride), np.repeat(np.array(coding.steps, np.float32), coding.counts)
    levels: np.ndarray = np.rint(seen[places] / steps[places] + dither(coding.dither_key, seen.size)[places])
    return levels


def coded_bytes(codec: str, levels: np.ndarray, size: int) -> int:
    """Returns how many bytes the codec needs for `size` values.

    :param levels: the sample, if the number of bits depends on the values.
    """
    bits = codec_of(codec).bits
    if bits is not None:
        return -(-round(bits * size) // 8)
    if not size:
        return 0
    coded = len(BlockEncoder().encode(levels)) - _CODE_BYTES
    return round(coded * size / levels.size) + _CODE_BYTES * -(-size // BLOCK)
