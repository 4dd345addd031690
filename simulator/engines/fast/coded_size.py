"""Estimates the size of an update on the wire from a sample of its quantised values, which alone is encoded."""

from __future__ import annotations

import numpy as np

from hushfleet.array_api import blocks
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


def sampled_levels(seen: np.ndarray, coding: Coding, stride: int) -> np.ndarray:
    """Returns the sample, float32: in each layer, some quantised values of each block.

    :param seen: the values as they will be decoded, float32 `[k]`.
    """
    assert coding.dither_key is not None
    drawn, found, start = dither(coding.dither_key, seen.size), [], 0
    for count, step in zip(coding.counts, coding.steps, strict=True):
        layer, of_layer = seen[start : start + count], drawn[start : start + count]
        for part in blocks(layer):
            found.append(np.rint(layer[part][::stride] / np.float32(step) + of_layer[part][::stride]))
        start += count
    return np.concatenate(found or [seen])


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
