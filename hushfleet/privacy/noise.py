"""Sources of noise: a cryptographic generator on devices, a seeded one in simulations.

Differential privacy against the server is void if the server can predict the noise, so a device never
uses a seed. A Gaussian sample computed in floating point can take only certain values, so that one
Box-Muller sample can be distinguished from its neighbours (Mironov 2012; Jin et al. 2022). Holohan and
Braghin 2021 ("Secure random sampling in differential privacy", section 4) prevent this: they add up
several independent samples. Here they are four, divided by two.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

_PAIRS_PER_BLOCK = 1 << 12
_SUMMANDS = 4
_WORD_BYTES = 8
_SIMULATION_STREAM = 0x4E4F4953
# 1.5 * 2^42: times a standard deviation, it is a float64 whose neighbours are 2^-10 to 2^-9 of that deviation away.
_SHIFT = 1.5 * 2.0**42

# sin x / x on [-pi/4, pi/4] as a polynomial in x^2, highest power first; its error is less than 2^-58 (the coefficients
# are from FreeBSD's k_sin.c).
_SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
    1.0,
)
# The same in float32, and log(1 + x) / x for sqrt 1/2 <= 1 + x < sqrt 2: errors near 2^-24 (Cephes' sinf.c, logf.c).
SHORT_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1, 1.0)
LOGARITHM: tuple[float, ...] = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
LOGARITHM += (-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1, -0.5, 1.0)
ROOT_HALF = 0x3F3504F3  # the bits of float32 sqrt 1/2
PAIRS = 64
_GROUPS_PER_BLOCK = 1 << 8


class NoiseSource(Protocol):
    """A source of independent standard normal values, and of uniform words for discrete noise."""

    def normal(self, size: int) -> np.ndarray:
        """Returns standard normal values, float64 `[size]`; each call continues the stream."""
        ...

    def words(self, count: int) -> np.ndarray:
        """Returns uniform words, uint64 `[count]`; each call continues the stream."""
        ...


class SecureNoise:
    """Standard normal values from ChaCha20, with a new key from the operating system for each call.

    There is no state to copy: a forked process, a pickled object or a snapshot of memory between two
    calls cannot repeat or predict what another call returns. Temporary memory is less than 2 MiB for
    any size.
    """

    def normal(self, size: int) -> np.ndarray:
        """Returns standard normal values, float64 `[size]`, never the same twice."""
        out = np.empty(size, dtype=np.float64)
        keystream = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
        pairs = max(1, min(_PAIRS_PER_BLOCK, (size + 1) // 2))
        zeros = bytes(_WORD_BYTES * 2 * _SUMMANDS * pairs)
        drawn = bytearray(len(zeros))
        for start in range(0, size, 2 * pairs):
            block = out[start : start + 2 * pairs]
            keystream.update_into(zeros, drawn)
            first, second = _sums_of_box_muller(np.frombuffer(drawn, dtype="<u8").reshape(2, _SUMMANDS, pairs))
            block[:pairs] = first[: len(block)]
            block[pairs:] = second[: max(0, len(block) - pairs)]
        return out

    def words(self, count: int) -> np.ndarray:
        """Returns uniform words, uint64 `[count]`, never the same twice."""
        keystream = Cipher(algorithms.ChaCha20(os.urandom(32), bytes(16)), mode=None).encryptor()
        return np.frombuffer(keystream.update(bytes(_WORD_BYTES * count)), "<u8").astype(np.uint64)


def _sums_of_box_muller(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two independent normals per column of uniform words uint64 `[2, summands, pairs]`; it overwrites them.

    The cosine and the sine of one Box-Muller pair go into different sums: within one sum they would
    collapse into a single sample (cos a + sin a is a shifted cosine), without any benefit.

    53 bits of a word give the angle within a quarter turn, two of the other bits give the quadrant. NumPy's own sine
    and cosine, which accept any angle, would take three times as long on a board.
    """
    signs = words[1] << np.uint64(64 - 11)
    words >>= np.uint64(11)
    radius, angle = words.view("<i8").astype(np.float64)
    # (0, 1]: the logarithm never gets zero, and the radius reaches 8.5 standard deviations
    radius += 1
    radius *= 2.0**-53
    np.log(radius, out=radius)
    np.negative(radius, out=radius)
    np.sqrt(radius, out=radius)  # divided by sqrt 2, which the rotation by pi/4 below needs
    angle *= math.pi / 2 * 2.0**-53
    angle -= math.pi / 4
    square = angle * angle
    sine = _polynomial(square, _SINE)
    sine *= angle
    cosine = np.multiply(sine, sine, out=square)
    np.subtract(1, cosine, out=cosine)
    np.sqrt(cosine, out=cosine)
    # The point at angle + pi/4 is in the first quadrant; the signs of both coordinates move it to any quadrant.
    first = np.subtract(cosine, sine, out=angle)
    second = np.add(cosine, sine, out=cosine)
    first *= np.copysign(radius, signs.view(np.float64), out=sine)
    signs <<= np.uint64(1)
    second *= np.copysign(radius, signs.view(np.float64), out=sine)
    scale = 1 / math.sqrt(_SUMMANDS)
    return first.sum(axis=0) * scale, second.sum(axis=0) * scale


def stream_seed(seed: int, device_index: int, round: int) -> np.random.SeedSequence:
    """Returns the seed of a device's noise in a round."""
    return np.random.SeedSequence(seed, spawn_key=(_SIMULATION_STREAM, device_index, round))


class SeededNoise:
    """Repeatable standard normal values. FOR SIMULATION ONLY: anyone who knows the seed can subtract the noise.

    The stream depends only on (seed, device_index, round), so results do not change with the number of
    workers, the order of devices or the size of batches. Its words are those of NumPy's Philox generator; the same
    words become the same values on any machine, and in compiled code (`hushfleet.models.native.noise`), because only
    single operations of IEEE 754 make them. A value has the precision of float32, and none is beyond 6.7.
    """

    def __init__(self, seed: int, device_index: int, round: int) -> None:
        """Seeds the stream; all three are whole numbers, zero or more."""
        self.generator = np.random.Philox(stream_seed(seed, device_index, round))
        self.key: np.ndarray = self.generator.state["state"]["key"]
        self._drawn = np.empty(0, np.float32)

    def normal(self, size: int) -> np.ndarray:
        """Returns standard normal values, float64 `[size]`; two calls give the same values as one call for both."""
        out = np.empty(size)
        filled = 0
        while True:
            given = self._drawn[: size - filled]
            out[filled : filled + len(given)] = given
            self._drawn, filled = self._drawn[len(given) :], filled + len(given)
            if filled == size:
                return out
            groups = min(_GROUPS_PER_BLOCK, -(-(size - filled) // (2 * PAIRS)))
            self._drawn = _box_muller_groups(self.generator.random_raw(groups * PAIRS))

    def words(self, count: int) -> np.ndarray:
        """Returns uniform words, uint64 `[count]`."""
        words: np.ndarray = self.generator.random_raw(count)
        return words


def _box_muller_groups(words: np.ndarray) -> np.ndarray:
    """Returns standard normal values, float32, two of each of the words, uint64 `[groups * PAIRS]`.

    The first half of a group's words gives radii, the second half angles, which make two values each.
    """
    halves = words.astype("<u8", copy=False).view("<u4").reshape(-1, 2, PAIRS)
    turns = halves[:, 1].reshape(-1)
    radius = (halves[:, 0] >> 1).astype(np.float32).reshape(-1)
    radius += 0.5  # (0, 1]: the logarithm never gets zero
    radius *= 2.0**-31
    radius = _minus_log(radius)
    np.sqrt(radius, out=radius)  # divided by sqrt 2, which the rotation by pi/4 below needs
    angle = (turns.view(np.int32) >> 2).astype(np.float32)
    angle *= math.pi / 4 * 2.0**-29
    square = angle * angle
    sine = _polynomial(square, SHORT_SINE)
    sine *= angle
    cosine = np.multiply(sine, sine, out=square)
    np.subtract(1, cosine, out=cosine)
    np.sqrt(cosine, out=cosine)
    # The point at angle + pi/4 is in the first quadrant; two other bits move it to any quadrant.
    out = np.empty((len(halves), 2, PAIRS), np.float32)
    for place, (coordinate, sign) in enumerate(((cosine - sine, turns << 31), (cosine + sine, turns >> 1 << 31))):
        coordinate *= radius
        coordinate.view(np.uint32)[...] ^= sign
        out[:, place] = coordinate.reshape(-1, PAIRS)
    return out.reshape(-1)


def _minus_log(x: np.ndarray) -> np.ndarray:
    """Returns -log x of positive normal float32 `[n]`; it overwrites `x`."""
    bits = x.view(np.int32)
    bits -= ROOT_HALF
    exponent = (bits >> 23).astype(np.float32)
    bits &= 0x7FFFFF
    bits += ROOT_HALF
    x -= 1  # 1 + x is from sqrt 1/2 to sqrt 2
    log = _polynomial(x, LOGARITHM)
    log *= x
    exponent *= math.log(2)
    log += exponent
    np.negative(log, out=log)
    return log


def _polynomial(x: np.ndarray, coefficients: Sequence[float]) -> np.ndarray:
    """:param coefficients: of the highest power first."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value


def add_on_grid(noise: Any, values: Any, stds: Any) -> Any:
    """Returns `noise + values`, rounded to the grid of `stds`, in the memory of `noise`: the last bits of a float then
    reveal nothing about either.

    The smaller a float is, the finer its steps are. The last bits of a sum near zero therefore show how large its parts
    were: noise added to exactly 0 keeps all its bits, noise added to 0.3 loses some (Mironov, "On significance of the
    least significant bits for differential privacy", CCS 2012). Here the sum is computed in float64 and rounded at once
    to a multiple of a power of two of about 2^-10 standard deviations, the same for all values. All later steps,
    including the conversion to float32, use this multiple.

    :param noise: float64 `[n]`, of standard deviation `stds`.
    :param values: float32 or float64 `[n]`.
    :param stds: above zero; a number, `[1]` or `[n]`.

    Sums beyond 2^42 standard deviations are on the coarser grid of float64 itself.
    """
    # A large number is added and subtracted again: float64 rounds off the bits that do not fit. Both are single
    # operations of IEEE 754, so that NumPy and PyTorch give the same bits on any device.
    shift = stds * _SHIFT
    noise += values
    noise += shift
    noise -= shift
    return noise
