"""Draws integers with the probabilities of a Gaussian exactly: no floating point between random bits and sample.

The discrete Gaussian of parameter s^2 takes each integer x with a probability proportional to g(x) = exp(-x^2 / 2 s^2)
(Canonne, Kamath, Steinke 2020). A uniform 256-bit number U gives the integer whose interval of the cumulative
distribution contains U. The thresholds are computed as 256-bit integers. U's leading 64 bits nearly always decide; if
they equal a threshold's leading bits, U's other bits are drawn and compared. Where no threshold has U's first 15 bits,
a table gives the integer.

The samples' distribution is within 2^-140 of the discrete Gaussian (statistical distance, each sample):

- Cut tails. The mass beyond K = ceil(14 s), relative to the sum of all g (at least s sqrt(2 pi)), is less than
  2 (s^2 / K) exp(-K^2 / 2 s^2) / (s sqrt(2 pi)) < exp(-98) / 17 < 2^-145.
- Rounding. g(k + 1) = g(k) r(k) and r(k + 1) = r(k) q with q = exp(-1 / s^2), r(0) = exp(-1 / 2 s^2), each rounded
  down to 2^-256. The error of q and r(0) is below 2^-249 (64 terms of a series), of r(k) k 2^-248, of g(k) k^2 2^-248,
  and with K < 2^18 of all g together below K^3 2^-247 < 2^-193; each threshold is rounded once more, by 2^-256.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hushfleet.errors import PrivacyError
from hushfleet.privacy.noise import NoiseSource

LARGEST_STD = float(1 << 14)
"""The table for it takes 3.7 MB, and 30 MB for a short time during its construction."""
_BITS = 256
_WORD_BITS = 64
_REACH = 14  # standard deviations
_GUIDE_BITS = 15
_UNDECIDED = 1 << 62
_BLOCK = 1 << 14


class DiscreteGaussian:
    """Samples of one parameter.

    :param variance: s^2, in [1, 2^28]; the sample's variance is smaller by a share of 8 pi^2 s^2 exp(-2 pi^2 s^2).
    """

    def __init__(self, variance: float) -> None:
        if not 1 <= variance <= LARGEST_STD**2:
            raise PrivacyError(
                f"discrete noise has a standard deviation of 1 to {LARGEST_STD:g} steps, not {math.sqrt(variance):g}"
            )
        self.variance = float(variance)
        self._leading, self._guide = _leading(self.variance), _guide(self.variance)

    def sample(self, size: int, noise: NoiseSource) -> np.ndarray:
        """Returns samples, int64 `[size]`."""
        samples = np.empty(size, np.int64)
        for start in range(0, size, _BLOCK):
            block = samples[start : start + _BLOCK]
            words = noise.words(len(block))
            self._guide.take(words >> np.uint64(_WORD_BITS - _GUIDE_BITS), out=block)
            places = np.flatnonzero(block == _UNDECIDED)
            block[places] = self._searched(words[places], noise)
        return samples

    def _searched(self, words: np.ndarray, noise: NoiseSource) -> np.ndarray:
        """Returns the samples of words, int64."""
        decided = np.searchsorted(self._leading, words, side="right")
        for place in np.flatnonzero(self._leading[decided - 1] == words):  # for 0 it is the last, above each word
            more = noise.words(_BITS // _WORD_BITS - 1)
            drawn = int.from_bytes(np.concatenate([words[place : place + 1], more]).astype(">u8").tobytes(), "big")
            decided[place] = sum(threshold <= drawn for threshold in _thresholds(self.variance))
        return decided.astype(np.int64) - len(self._leading) // 2


@lru_cache(maxsize=4)
def _guide(variance: float) -> np.ndarray:
    """Returns the sample for each value of a word's first bits, int64, or that these bits do not decide it."""
    leading = _leading(variance)
    first = np.arange(1 << _GUIDE_BITS, dtype=np.uint64) << np.uint64(_WORD_BITS - _GUIDE_BITS)
    below = np.searchsorted(leading, first, side="left")
    decided = below == np.append(below[1:], len(leading))
    guide = np.where(decided, below - len(leading) // 2, _UNDECIDED)
    guide.setflags(write=False)
    return guide


@lru_cache(maxsize=4)
def _leading(variance: float) -> np.ndarray:
    """Returns the first 64 bits of each threshold, uint64 `[2 K]`, in rising order."""
    shift = _BITS - _WORD_BITS
    leading = np.array([threshold >> shift for threshold in _thresholds(variance)], np.uint64)
    leading.setflags(write=False)
    return leading


def _thresholds(variance: float) -> list[int]:
    """Returns 2^256 P(X <= x) for x = -K .. K - 1."""
    top, bottom = variance.as_integer_ratio()
    ratio, change = _exp_of_minus(bottom, 2 * top), _exp_of_minus(bottom, top)
    weight = 1 << _BITS
    weights = [weight]
    for _ in range(math.ceil(_REACH * math.sqrt(variance))):
        weight = weight * ratio >> _BITS
        ratio = ratio * change >> _BITS
        weights.append(weight)
    total, up_to, found = 2 * sum(weights) - weights[0], 0, []
    for weight in [*weights[:0:-1], *weights[:-1]]:
        up_to += weight
        found.append((up_to << _BITS) // total)
    return found


def _exp_of_minus(top: int, bottom: int) -> int:
    """Returns 2^256 exp(-top / bottom) for top / bottom in (0, 1]."""
    total, term, count = 0, 1 << _BITS, 0
    while term:
        total += term if count % 2 == 0 else -term
        count += 1
        term = term * top // (bottom * count)
    return total
