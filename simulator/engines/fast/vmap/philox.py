"""Philox4x64-10 (Salmon et al., SC 2011) on tensors: each row has its own key, and each word depends on its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_INCREMENTS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF = 0xFFFFFFFF
_PARTS = 16  # of 16 bits, in the four words of a counter


def dither(keys: Sequence[bytes], size: int, device: torch.device) -> Tensor:
    """Returns `hushfleet.wire.format.quantized.dither` of each key, float32 `[r, size]`, with the same bits."""
    words = _words(keys, -(-size // _PARTS), device)
    parts = (words.view(torch.int16)[:, :size].int() & 0xFFFF).float()
    parts *= 2.0**-16
    parts -= 65535 * 2.0**-17  # exact, like the two lines above
    return parts


def _words(keys: Sequence[bytes], counters: int, device: torch.device) -> Tensor:
    """Returns the words of the counters 1, 2, 3, ..., int64 `[r, 4 counters]` whose bits are the unsigned words."""
    halves = [[int.from_bytes(key[place : place + 8], "little", signed=True) for place in (0, 8)] for key in keys]
    key = torch.tensor(halves, dtype=torch.int64).to(device)
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
