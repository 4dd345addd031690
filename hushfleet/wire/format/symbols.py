"""Entropy coding of integers, one block at a time: several small integers per byte, then Huffman coding by zlib.

A block is one mode byte. Unless all its levels are zero, the number of escapes, the number of packed bytes and the
packed bytes follow: raw deflate of the symbols and of the escapes. Level q has the symbol z = 2 q for q >= 0, else
-2 q - 1. Mode m packs m symbols of an alphabet of b into a byte, first one least significant; symbol b - 1 is an
escape, and its z comes after the symbols. For fewer levels a larger m is better: Huffman codes then use a fraction of a
bit per value. docs/wire.md specifies the bytes.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache

from hushfleet.array_api import np
from hushfleet.errors import Malformed

BLOCK = 1 << 16
MAX_LEVEL = (1 << 23) - 1  # exact in float32, and an escape fits three bytes

_ZEROS = 0
_ALPHABETS = {1: 255, 2: 16, 3: 6, 4: 4, 5: 3}  # mode m -> b, the largest alphabet with m symbols per byte
_HEAD = struct.Struct("<BII")
_MANY_ESCAPES = 8  # a mode with more than one escape in this many values is not tried
_CHANGED = 0.05  # if a block's size differs by more from the previous one, all modes are tried again


class BlockEncoder:
    """Encodes one block after the other; remembers the mode with the smallest result, because trying all is slow."""

    def __init__(self) -> None:
        self._mode: int | None = None
        self._bytes_a_value = 0.0

    def encode(self, levels: np.ndarray) -> bytes:
        """:param levels: float32 `[n]`, 1 to `BLOCK` whole numbers of at most `MAX_LEVEL` in magnitude."""
        symbols = _small_symbols(levels)
        if not symbols.any():
            return bytes([_ZEROS])
        data = None if self._mode is None else _coded(levels, symbols, self._mode)
        if data is None or abs(len(data) / levels.size - self._bytes_a_value) > _CHANGED * self._bytes_a_value:
            tried = {mode: _coded(levels, symbols, mode) for mode in _worth_trying(symbols)}
            self._mode = min(tried, key=lambda mode: len(tried[mode]))
            data = tried[self._mode]
            self._bytes_a_value = len(data) / levels.size
        return data


def decode_block(data: memoryview, levels: np.ndarray) -> memoryview:
    """Fills `levels`, float32 `[n]`, from the block at the start of `data`; returns the rest. Raises `Malformed`."""
    if not len(data):
        raise Malformed("the coded values end before their last block")
    if data[0] == _ZEROS:
        levels[:] = 0
        return data[1:]
    if len(data) < _HEAD.size:
        raise Malformed(f"a block of coded values of {len(data)} bytes is too short")
    mode, escapes, packed_bytes = _HEAD.unpack_from(data)
    size = levels.size
    if mode not in _ALPHABETS or escapes > size or packed_bytes > len(data) - _HEAD.size:
        raise Malformed(f"a block in mode {mode} with {escapes} escapes among {size} values, of {packed_bytes} bytes")
    end = _HEAD.size + packed_bytes
    plain = _inflated(data[_HEAD.size : end], -(-size // mode) + 3 * escapes)
    _unpack(plain, mode, escapes, levels)
    return data[end:]


def max_block_bytes(size: int) -> int:
    """Returns the largest number of bytes of a block of any `size` levels."""
    plain_bytes = 4 * size
    # deflate falls back to stored blocks of at least 16 KiB with 5 bytes each; this is more than enough
    return _HEAD.size + plain_bytes + plain_bytes // 1024 + 64


def _small_symbols(levels: np.ndarray) -> np.ndarray:
    """Returns z of each level as uint8; 254 and 255 stand for all levels that are too large."""
    small = np.clip(levels, -128, 127).astype(np.int8)
    symbols: np.ndarray = ((small << 1) ^ (small >> 7)).view(np.uint8)
    return symbols


def _large_symbols(levels: np.ndarray) -> np.ndarray:
    """Returns z of each level, uint32."""
    whole = levels.astype(np.int32)
    return ((whole << 1) ^ (whole >> 31)).view(np.uint32)


def _worth_trying(symbols: np.ndarray) -> list[int]:
    most = symbols.size // _MANY_ESCAPES
    found = [mode for mode, alphabet in _ALPHABETS.items() if np.count_nonzero(symbols >= alphabet - 1) <= most]
    return found or [1]


def _coded(levels: np.ndarray, symbols: np.ndarray, mode: int) -> bytes:
    escape = _ALPHABETS[mode] - 1
    places = np.flatnonzero(symbols >= escape)
    packed = _packed(np.minimum(symbols, escape) if places.size else symbols, mode)
    planes = _large_symbols(levels[places]).astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3].T.tobytes()
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    data = packer.compress(packed.data) + packer.compress(planes) + packer.flush()
    return _HEAD.pack(mode, places.size, len(data)) + data


def _packed(symbols: np.ndarray, mode: int) -> np.ndarray:
    if mode == 1:
        return symbols
    rest = -symbols.size % mode
    if rest:
        symbols = np.append(symbols, np.zeros(rest, np.uint8))
    packed = symbols[mode - 1 :: mode].copy()
    for place in range(mode - 2, -1, -1):
        packed *= np.uint8(_ALPHABETS[mode])
        packed += symbols[place::mode]
    return packed


def _inflated(packed: memoryview, expected: int) -> np.ndarray:
    unpacker = zlib.decompressobj(-15)
    try:
        # one byte more than expected, to detect a stream that is too long and to read the end marker
        plain = unpacker.decompress(packed, expected + 1)
    except zlib.error as error:
        raise Malformed(f"the coded values do not unpack: {error}") from error
    if len(plain) != expected or not unpacker.eof or unpacker.unused_data:
        raise Malformed(f"the coded values unpack to {len(plain)} bytes, not to exactly {expected}")
    return np.frombuffer(plain, np.uint8)


def _unpack(plain: np.ndarray, mode: int, escapes: int, levels: np.ndarray) -> None:
    size, whole = levels.size, levels.size // mode
    table = _levels_of_bytes(mode)
    np.take(table, plain[:whole], axis=0, out=levels[: whole * mode].reshape(whole, mode), mode="clip")
    if whole * mode < size:
        last = table[plain[whole]]
        levels[whole * mode :] = last[: size - whole * mode]
        if last[size - whole * mode :].any():
            raise Malformed("the padding of the coded values is not zero")
    found = 0
    if not np.isfinite(levels.sum()):  # one quick pass finds whether any symbol was special
        if np.isinf(levels).any():
            raise Malformed(f"the coded values have a byte that mode {mode} does not know")
        places = np.flatnonzero(np.isnan(levels))
        found = places.size
    if found != escapes:
        raise Malformed(f"{found} of the coded values are escaped, but {escapes} escapes came")
    if escapes:
        low, middle, high = plain[-3 * escapes :].reshape(3, escapes).astype(np.int32)
        folded = low | middle << 8 | high << 16
        if folded.min() < _ALPHABETS[mode] - 1 or folded.max() > 2 * MAX_LEVEL:
            raise Malformed("an escaped value is below the escape or above the highest level")
        levels[places] = (folded >> 1) ^ -(folded & 1)


@cache
def _levels_of_bytes(mode: int) -> np.ndarray:
    """Returns float32 `[256, mode]`: the levels of each byte; NaN for an escape, inf for a byte that is not valid."""
    alphabet = _ALPHABETS[mode]
    symbols = np.arange(256)[:, None] // alphabet ** np.arange(mode) % alphabet
    levels = ((symbols >> 1) ^ -(symbols & 1)).astype(np.float32)
    levels[symbols == alphabet - 1] = np.nan
    levels[alphabet**mode :] = np.inf
    levels.setflags(write=False)
    return levels
