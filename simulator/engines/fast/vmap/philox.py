"""Draws dither and noise of many updates on tensors, with the bits of NumPy's code: each row has its own key.

The source of both is Philox4x64-10 (Salmon et al., SC 2011), whose words depend only on the key and their place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hushfleet.privacy.noise import LOGARITHM, PAIRS, ROOT_HALF, SHORT_SINE, SeededNoise

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF = 0xFFFFFFFF
_WORDS = 4  # of a counter
_PARTS = 16  # of 16 bits in them


def dither(keys: Sequence[bytes], size: int, device: torch.device) -> Tensor:
    """Returns `hushfleet.wire.format.quantized.dither` of each key, float32 `[r, size]`, with the same bits."""
    halves = [[int.from_bytes(key[place : place + 8], "little") for place in (0, 8)] for key in keys]
    words = _words(halves, -(-size // _PARTS), device)
    parts = (words.view(torch.int16)[:, :size].int() & 0xFFFF).float()
    parts *= 2.0**-16
    parts -= 65535 * 2.0**-17  # exact, like the two lines above
    return parts


def normals(sources: Sequence[SeededNoise], size: int, device: torch.device) -> Tensor:
    """Returns the first values of new sources, float32 `[r, size]`: those of `SeededNoise.normal`, to the bit."""
    keys = [[int(word) for word in source.key] for source in sources]
    groups = -(-size // (2 * PAIRS))
    halves = _words(keys, groups * PAIRS // _WORDS, device).view(torch.int32).view(len(keys), groups, 2, PAIRS)
    radii, turns = halves[:, :, 0], halves[:, :, 1]
    radius = (radii >> 1 & 0x7FFFFFFF).float()
    radius += 0.5
    radius *= 2.0**-31
    radius = _root(_minus_log(radius))
    angle = (turns >> 2).float()
    angle *= math.pi / 4 * 2.0**-29
    square = angle * angle
    sine = _polynomial(square, SHORT_SINE)
    sine *= angle
    cosine = _root(1 - sine * sine)
    out = torch.empty(len(keys), groups, 2, PAIRS, device=device)
    for place, coordinate, sign in ((0, cosine - sine, turns << 31), (1, cosine + sine, turns >> 1 << 31)):
        coordinate *= radius
        out[:, :, place] = (coordinate.view(torch.int32) ^ sign).view(torch.float32)
    return out.view(len(keys), -1)[:, :size]


def _root(x: Tensor) -> Tensor:
    """Returns the square root of float32, correctly rounded: PyTorch's own on a processor is not."""
    return x.double().sqrt_().float()


def _minus_log(x: Tensor) -> Tensor:
    """Returns -log x of positive normal float32; it overwrites `x`."""
    bits = x.view(torch.int32)
    bits -= int(ROOT_HALF)
    exponent = (bits >> 23).float()
    bits &= 0x7FFFFF
    bits += int(ROOT_HALF)
    x -= 1
    log = _polynomial(x, LOGARITHM)
    log *= x
    exponent *= math.log(2)
    log += exponent
    return log.neg_()


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    value = x * float(coefficients[0])
    for coefficient in coefficients[1:-1]:
        value += float(coefficient)
        value *= x
    value += float(coefficients[-1])
    return value


def _words(keys: Sequence[Sequence[int]], counters: int, device: torch.device) -> Tensor:
    """Returns the words of the counters 1, 2, 3, ..., int64 `[r, 4 counters]` whose bits are the unsigned words.

    :param keys: the two words of each key.
    """
    key = torch.tensor([[_signed(word) for word in each] for each in keys], dtype=torch.int64).to(device)
    first, second = key[:, :1], key[:, 1:]
    c0 = torch.arange(1, counters + 1, dtype=torch.int64, device=device).expand(len(keys), counters)
    c1 = c2 = c3 = torch.zeros_like(c0)
    for done in range(_ROUNDS):
        if done:
            first, second = first + _signed(_INCREMENTS[0]), second + _signed(_INCREMENTS[1])
        high_0, low_0 = _product(_MULTIPLIERS[0], c0)
        high_1, low_1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ first, low_1, high_0 ^ c3 ^ second, low_0
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)


def _product(factor: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper and the lower word of the 128-bit products; PyTorch has only signed words, which wrap."""
    low, high = words & _HALF, _upper(words)
    factor_low, factor_high = factor & _HALF, factor >> 32
    crossed, other = factor_high * low, factor_low * high
    carried = _upper(factor_low * low) + (crossed & _HALF) + (other & _HALF)
    return factor_high * high + _upper(crossed) + _upper(other) + _upper(carried), words * _signed(factor)


def _upper(words: Tensor) -> Tensor:
    return words >> 32 & _HALF


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
