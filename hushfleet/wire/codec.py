"""The update codec: dithered quantisation and Huffman coding, so that bits follow the noise.

Precision below the noise is waste: each layer is quantised with a step tied to the standard deviation of the
noise that it carries. With subtractive dither, known to both sides, the error is uniform, of mean zero and
independent of the values (Roberts 1962; Schuchman 1964), and adds step^2/12 to the variance.

    q = rint(x / step + u)        x' = (q - u) * step        u uniform on a grid in (-1/2, 1/2)

All of x' is float32 arithmetic with one rounding an operation, so every machine decodes the same bits.
The bytes are specified in docs/wire.md. Measured figures: facts in docs/wire.md, "Size and speed".
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from hushfleet.errors import Malformed

DITHER_KEY_BYTES = 16
MAX_VALUES = 1 << 28
MIN_STEP = 2.0**-100  # every decoded value is then a normal float32, which no machine flushes to zero
MAX_STEP = 2.0**40
MAX_LEVEL = (1 << 23) - 1  # exact in float32, and an escape fits three bytes

_BYTES, _NIBBLES = 1, 2
_ESCAPE = {_BYTES: 255, _NIBBLES: 15}
_HEAD = struct.Struct("<BI")
_BLOCK = 1 << 16  # values at a time: in the caches, and little memory beside the values themselves


def encode_values(
    values: np.ndarray,
    *,
    counts: Sequence[int],
    steps: Sequence[float],
    dither_key: bytes,
    sent: np.ndarray | None = None,
) -> bytes:
    """`values` float32 `[k]`, quantised and coded.

    :param counts: how many of the values belong to each layer, in order; their sum is k.
    :param steps: the quantisation step of each layer, used as float32.
    :param dither_key: 16 bytes that the decoder has as well; never the same for two updates.
    :param sent: float32 `[k]`, filled with what the decoder will give.

    Raises `Malformed` for values that are not finite, or too large for their step.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    _check(values.size, counts, steps, dither_key)
    zigzag = np.empty(values.size, np.uint32)
    for place, step, dither in _blocks(counts, steps, dither_key):
        with np.errstate(over="ignore", invalid="ignore"):
            level = values[place] / step
        level += dither
        np.rint(level, out=level)
        if not (np.abs(level) <= MAX_LEVEL).all():
            raise Malformed(
                f"a value of {np.abs(values[place]).max():g} cannot be quantised: finite values of at most "
                f"{MAX_LEVEL} steps are, and the largest step there is {step.max():g}; send float32 instead"
            )
        signed = level.astype(np.int32)
        zigzag[place] = ((signed << 1) ^ (signed >> 31)).view(np.uint32)
        if sent is not None:
            _restore(level, dither, step, out=sent[place])
    return _coded(zigzag, _better_mode(zigzag))


def decode_values(
    data: bytes | memoryview, *, counts: Sequence[int], steps: Sequence[float], dither_key: bytes
) -> np.ndarray:
    """The values float32 `[k]` of `encode_values`, the same bits on every machine.

    Raises `Malformed`. Allocates in proportion to k, whatever `data` says.
    """
    size = sum(counts)
    _check(size, counts, steps, dither_key)
    zigzag = _decoded(data, size)
    values = np.empty(size, np.float32)
    for place, step, dither in _blocks(counts, steps, dither_key):
        folded = zigzag[place]
        signed = (folded >> 1).astype(np.int32) ^ -(folded & 1).astype(np.int32)
        _restore(signed.astype(np.float32), dither, step, out=values[place])
    return values


def _restore(level: np.ndarray, dither: np.ndarray, step: np.ndarray, *, out: np.ndarray) -> None:
    np.subtract(level, dither, out=out)
    out *= step


def max_coded_bytes(size: int) -> int:
    """The most bytes that `encode_values` gives for `size` values, whatever they are."""
    return _HEAD.size + _deflate_bound(4 * size)


def dither(dither_key: bytes, size: int) -> np.ndarray:
    """The first `size` dither values, float32 in (-1/2, 1/2), exact multiples of 2^-17.

    64-bit words of the Philox4x64-10 generator with this key and the counters 1, 2, 3, ..., four 16-bit parts
    a word, least significant first; a part w stands for (2w + 1 - 65536) / 131072.
    """
    return _to_dither(_generator(dither_key), size)


def _generator(dither_key: bytes) -> np.random.Philox:
    return np.random.Philox(key=int.from_bytes(dither_key, "little"))


def _to_dither(generator: np.random.Philox, size: int) -> np.ndarray:
    words = generator.random_raw(-(-size // 4)).astype("<u8", copy=False)
    numerator = words.view("<u2")[:size].astype(np.float32)
    numerator *= 2.0
    numerator -= 65535.0
    numerator *= 2.0**-17
    return numerator


def _blocks(
    counts: Sequence[int], steps: Sequence[float], dither_key: bytes
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """Places in the vector with the step and the dither of each value there."""
    size = sum(counts)
    generator = _generator(dither_key)
    ends = np.cumsum(np.asarray(counts, np.int64))
    steps32 = np.asarray(steps, np.float32)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        shares = np.diff(np.clip(ends, start, stop), prepend=start)
        yield slice(start, stop), np.repeat(steps32, shares), _to_dither(generator, stop - start)


def _check(size: int, counts: Sequence[int], steps: Sequence[float], dither_key: bytes) -> None:
    if len(dither_key) != DITHER_KEY_BYTES:
        raise Malformed(f"a dither key has {DITHER_KEY_BYTES} bytes, not {len(dither_key)}")
    if len(counts) != len(steps) or min(counts, default=0) < 0 or sum(counts) != size or size > MAX_VALUES:
        raise Malformed(f"{size} values in {len(counts)} layers of {sum(counts)} with {len(steps)} steps")
    for step in steps:
        if not MIN_STEP <= step <= MAX_STEP:
            raise Malformed(f"a quantisation step of {step!r} is outside {MIN_STEP:g} to {MAX_STEP:g}")


def _better_mode(zigzag: np.ndarray) -> int:
    """The mode that comes out smaller; tried on every n-th value of a long vector, since coding is the slow part."""
    trial = zigzag[:: max(1, zigzag.size // _BLOCK)]
    return min((_BYTES, _NIBBLES), key=lambda mode: len(_coded(trial, mode)))


def _coded(zigzag: np.ndarray, mode: int) -> bytes:
    escape = _ESCAPE[mode]
    symbols = np.minimum(zigzag, escape).astype(np.uint8)
    escaped = zigzag[zigzag >= escape]
    if mode == _NIBBLES:
        symbols = np.append(symbols, np.zeros(symbols.size % 2, np.uint8))
        symbols = symbols[0::2] | (symbols[1::2] << 4)
    planes = escaped.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].T.tobytes()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    packed = packer.compress(symbols) + packer.compress(planes) + packer.flush()
    return _HEAD.pack(mode, escaped.size) + packed


def _decoded(data: bytes | memoryview, size: int) -> np.ndarray:
    """The zigzag levels, uint32 `[size]`."""
    if len(data) < _HEAD.size:
        raise Malformed(f"coded values of {len(data)} bytes are too short")
    mode, escapes = _HEAD.unpack_from(data)
    if mode not in _ESCAPE or escapes > size:
        raise Malformed(f"coded values in mode {mode} with {escapes} escapes among {size} values")
    symbol_bytes = size if mode == _BYTES else (size + 1) // 2
    expected = symbol_bytes + 3 * escapes
    unpacker = zlib.decompressobj(-15)
    try:
        # one byte more than expected, so that a stream that goes on is seen and the end marker is read
        plain = unpacker.decompress(memoryview(data)[_HEAD.size :], expected + 1)
    except zlib.error as error:
        raise Malformed(f"the coded values do not unpack: {error}") from error
    if len(plain) != expected or not unpacker.eof or unpacker.unused_data:
        raise Malformed(f"the coded values unpack to {len(plain)} bytes, not to exactly {expected}")
    raw = np.frombuffer(plain, np.uint8)
    symbols = raw[:symbol_bytes]
    if mode == _NIBBLES:
        both = np.empty(2 * symbol_bytes, np.uint8)
        both[0::2], both[1::2] = symbols & 15, symbols >> 4
        if both[size:].any():
            raise Malformed("the padding of the coded values is not zero")
        symbols = both[:size]
    zigzag = symbols.astype(np.uint32)
    places = np.flatnonzero(symbols == _ESCAPE[mode])
    if places.size != escapes:
        raise Malformed(f"{places.size} of the coded values are escaped, but {escapes} escapes came")
    if escapes:
        low, middle, high = raw[symbol_bytes:].reshape(3, escapes).astype(np.uint32)
        escaped = low | middle << 8 | high << 16
        if escaped.min() < _ESCAPE[mode] or escaped.max() > 2 * MAX_LEVEL:
            raise Malformed("an escaped value is below the escape or above the highest level")
        zigzag[places] = escaped
    return zigzag


def _deflate_bound(plain_bytes: int) -> int:
    """Deflate falls back to stored blocks of at least 16 KiB with 5 bytes each; this is generous."""
    return plain_bytes + plain_bytes // 1024 + 64
