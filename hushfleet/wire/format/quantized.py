"""The codec `quantized`: dithered quantisation and Huffman coding, so that the number of bits depends on the noise.

Precision below the noise is useless, so each layer is quantised with a step in proportion to the standard deviation
of its noise. With subtractive dither, known to both sides, the error is uniform, of mean zero and independent of
the values (Roberts 1962; Schuchman 1964), and adds step^2/12 to the variance.

    q = rint(x / step + u)        x' = (q - u) * step        u uniform on a grid in (-1/2, 1/2)

All of x' is float32 arithmetic with one rounding per operation, so every machine decodes the same bits. Values are
processed one block at a time: except for the values and the coded bytes, memory does not grow with their number.
The bytes are specified in docs/wire.md; `hushfleet.wire.format.symbols` does the entropy coding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from hushfleet.array_api import np
from hushfleet.errors import Malformed
from hushfleet.wire.format.codec import MAX_STEP, MAX_VALUES, MIN_STEP, Codec, Coding
from hushfleet.wire.format.symbols import BLOCK, MAX_LEVEL, BlockEncoder, decode_block, max_block_bytes

DITHER_KEY_BYTES = 16
Pieces: TypeAlias = "list[tuple[slice, np.float32]]"


def encode_values(values: np.ndarray, coding: Coding, sent: np.ndarray | None = None) -> bytes:
    """Quantises and encodes `values`, float32 `[k]`; steps are used as float32.

    :param sent: float32 `[k]`, filled with the values that the decoder will return.

    Raises `Malformed` for values that are not finite, or too large for their step.
    """
    encoder, coded = BlockEncoder(), []
    for place, pieces, dither, levels in _quantized(values, coding):
        coded.append(encoder.encode(levels))
        if sent is not None:
            _restore(levels, dither, pieces, out=sent[place])
    return b"".join(coded)


def round_trip(values: np.ndarray, coding: Coding, sent: np.ndarray) -> None:
    """Fills `sent` as `encode_values` does, without encoding. Raises the same errors."""
    for place, pieces, dither, levels in _quantized(values, coding):
        _restore(levels, dither, pieces, out=sent[place])


def _quantized(values: np.ndarray, coding: Coding) -> Iterator[tuple[slice, Pieces, np.ndarray | None, np.ndarray]]:
    """Yields the same as `_blocks`, with the levels of each block: float32, valid until the next block."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    _check(values.size, coding)
    level = np.empty(min(BLOCK, values.size), np.float32)
    for place, pieces, dither in _blocks(coding):
        x, q = values[place], level[: place.stop - place.start]
        with np.errstate(over="ignore", invalid="ignore"):
            for piece, step in pieces:
                np.divide(x[piece], step, out=q[piece])
        if dither is not None:
            q += dither
        np.rint(q, out=q)
        if not (q.max() <= MAX_LEVEL and q.min() >= -MAX_LEVEL):  # also for a NaN
            raise Malformed(
                f"a value of {np.abs(x).max():g} cannot be quantised: it must be finite and at most {MAX_LEVEL} "
                f"steps, and the largest step is {max(step for _, step in pieces):g}; send float32 instead"
            )
        yield place, pieces, dither, q


def decode_values(data: bytes | memoryview, coding: Coding, out: np.ndarray | None = None) -> np.ndarray:
    """Returns the values float32 `[k]` of `encode_values`, the same bits on every machine.

    :param out: float32 `[k]`, filled and returned; after an error its content is undefined.

    Raises `Malformed`. Allocates in proportion to k, for any `data`.
    """
    _check(coding.size, coding)
    values = np.empty(coding.size, np.float32) if out is None else out
    rest = memoryview(data)
    for place, pieces, dither in _blocks(coding):
        block = values[place]
        rest = decode_block(rest, block)
        _restore(block, dither, pieces, out=block)
    if len(rest):
        raise Malformed(f"{len(rest)} extra bytes follow the coded values")
    return values


def max_coded_bytes(size: int) -> int:
    """Returns the largest number of bytes of `encode_values` for any `size` values."""
    return size // BLOCK * max_block_bytes(BLOCK) + max_block_bytes(size % BLOCK)


def dither(dither_key: bytes, size: int) -> np.ndarray:
    """Returns the first `size` dither values, float32 in (-1/2, 1/2), exact multiples of 2^-17.

    The source is 64-bit words of the Philox4x64-10 generator with this key and the counters 1, 2, 3, ...; each word
    gives four 16-bit parts, least significant first; a part w becomes (2w + 1 - 65536) / 131072.

    >>> dither(bytes(16), 3).round(3).tolist()
    [0.34599998593330383, -0.4650000035762787, 0.2280000001192093]
    """
    return _to_dither(_generator(dither_key), size)


def _restore(level: np.ndarray, dither: np.ndarray | None, pieces: Pieces, *, out: np.ndarray) -> None:
    """Converts levels into values; in place if `out` is `level`."""
    if dither is not None:
        level = np.subtract(level, dither, out=out)
    for piece, step in pieces:
        np.multiply(level[piece], step, out=out[piece])


def _generator(dither_key: bytes) -> np.random.Philox:
    return np.random.Philox(key=int.from_bytes(dither_key, "little"))


def _to_dither(generator: np.random.Philox, size: int) -> np.ndarray:
    words = generator.random_raw(-(-size // 4)).astype("<u8", copy=False)
    parts = words.view("<u2")[:size].astype(np.float32)
    parts *= 2.0**-16
    parts -= 65535 * 2.0**-17  # exact, like the two lines above
    return parts


def _blocks(coding: Coding) -> Iterator[tuple[slice, Pieces, np.ndarray | None]]:
    """Yields each block's slice of the vector, its pieces with the step of each piece, and the dither of its values."""
    size, layers, key = coding.size, _layers(coding.counts, coding.steps), coding.dither_key
    generator = None if key is None else _generator(key)
    layer = next(layers, None)
    for start in range(0, size, BLOCK):
        stop, pieces = min(start + BLOCK, size), []
        while layer is not None and layer[0] < stop:
            first, last, step = layer
            pieces.append((slice(max(first, start) - start, min(last, stop) - start), step))
            if last > stop:
                break
            layer = next(layers, None)
        yield slice(start, stop), pieces, None if generator is None else _to_dither(generator, stop - start)


def _layers(counts: Sequence[int], steps: Sequence[float]) -> Iterator[tuple[int, int, np.float32]]:
    """Yields start, stop and step of each layer that has values."""
    start = 0
    for count, step in zip(counts, steps, strict=True):
        if count:
            yield start, start + count, np.float32(step)
        start += count


def _check(size: int, coding: Coding) -> None:
    counts, steps, dither_key = coding
    if dither_key is not None and len(dither_key) != DITHER_KEY_BYTES:
        raise Malformed(f"a dither key has {DITHER_KEY_BYTES} bytes, not {len(dither_key)}")
    if len(counts) != len(steps) or min(counts, default=0) < 0 or sum(counts) != size or size > MAX_VALUES:
        raise Malformed(f"{size} values in {len(counts)} layers of {sum(counts)} with {len(steps)} steps")
    for step in steps:
        if not MIN_STEP <= step <= MAX_STEP:
            raise Malformed(f"a quantisation step of {step!r} is outside {MIN_STEP:g} to {MAX_STEP:g}")


QUANTIZED = Codec(
    "quantized",
    encode_values,
    decode_values,
    max_bytes=max_coded_bytes,
    round_trip=round_trip,
    step_of=lambda step, noise_std: step * noise_std,
    added_variance=lambda step, noise_std: step**2 / 12,
    uses_wire_step=True,
    sums_noise_to=1.0,
)
