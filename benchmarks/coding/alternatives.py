"""Other ways to send the same values, and the entropy of quantised ones."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

try:
    import zstandard
except ImportError:
    zstandard: ModuleType | None = None

QSGD_LEVELS = 127
QSGD_BUCKET = 512
ZLIB_LEVEL = 6
ZSTD_LEVEL = 3


class Way(NamedTuple):
    """:param encode: float32 `[k]` to bytes; None where what it takes is not installed.
    :param decode: back to float32 `[k]`, given those bytes.
    """

    encode: Callable[[np.ndarray], bytes] | None
    decode: Callable[[bytes], np.ndarray] | None


def lossless_ways() -> dict[str, Way]:
    """What gives back every bit of float32 values."""
    ways = {
        f"zlib {ZLIB_LEVEL} on float32": Way(
            lambda values: zlib.compress(values.tobytes(), ZLIB_LEVEL),
            lambda data: np.frombuffer(zlib.decompress(data), np.float32),
        ),
        f"zstd {ZSTD_LEVEL} on float32": Way(None, None),
        "JSON": Way(to_json, lambda data: np.array(json.loads(data), np.float32)),
    }
    if zstandard is not None:
        ways[f"zstd {ZSTD_LEVEL} on float32"] = Way(
            lambda values: zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(values.tobytes()),
            lambda data: np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.float32),
        )
    return ways


def to_json(values: np.ndarray) -> bytes:
    """A list of the shortest decimals that give back the same float32 values."""
    return json.dumps([float(text) for text in values.astype("U16")], separators=(",", ":")).encode()


class Qsgd(NamedTuple):
    """QSGD (Alistarh et al., NeurIPS 2017) with 127 levels and a sign, buckets of 512 values, each with its L2 norm.

    :param fixed_bytes: with 8 bits a value and a float32 norm a bucket.
    :param elias_bytes: with the paper's code: of each value that is not zero the gap before it and its level by
        Elias' recursive code, and a sign bit; and the norms.
    :param values: float32 `[k]`, what the receiver has.
    """

    fixed_bytes: int
    elias_bytes: int
    values: np.ndarray


def qsgd(values: np.ndarray, rng: np.random.Generator) -> Qsgd:
    """Unbiased: each value is rounded up or down at random, to a level of its bucket's norm."""
    buckets = -(-values.size // QSGD_BUCKET)
    padded = np.zeros((buckets, QSGD_BUCKET))
    padded.reshape(-1)[: values.size] = values
    unit = np.linalg.norm(padded, axis=1, keepdims=True) / QSGD_LEVELS
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.where(unit > 0, np.abs(padded) / unit, 0.0)
    levels = np.floor(scaled + rng.random(scaled.shape)).astype(np.int64)
    restored = (np.sign(padded) * levels * unit).reshape(-1)[: values.size].astype(np.float32)
    bits = 32 * buckets
    for bucket in levels:
        places = np.flatnonzero(bucket)
        gaps = np.diff(places, prepend=-1)
        bits += _ELIAS_BITS[gaps].sum() + _ELIAS_BITS[bucket[places]].sum() + places.size
    return Qsgd(values.size + 4 * buckets, -(-int(bits) // 8), restored)


def elias_bits(number: int) -> int:
    """Length of Elias' recursive (omega) code of a positive number."""
    bits = 1
    while number > 1:
        bits += number.bit_length()
        number = number.bit_length() - 1
    return bits


_ELIAS_BITS = np.array([0, *(elias_bits(number) for number in range(1, QSGD_BUCKET + QSGD_LEVELS + 2))])


def entropy_bytes(levels: np.ndarray, counts: Sequence[int]) -> float:
    """Empirical entropy of whole numbers `[k]`, layer by layer: what no code of single values can go below that is
    made for each layer's own frequencies, which would have to be sent as well."""
    bits = 0.0
    for layer in np.split(levels, np.cumsum(counts)[:-1]):
        _, often = np.unique(layer, return_counts=True)
        bits -= float((often * np.log2(often / max(layer.size, 1))).sum())
    return bits / 8
