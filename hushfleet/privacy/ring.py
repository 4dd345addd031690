"""Exact noise for secure aggregation: clipped updates become integers modulo a prime, plus each device's part of the
noise.

The distributed discrete Gaussian of Kairouz, Liu and Steinke ("The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation", ICML 2021, Algorithm 1). A device rotates its update by a public map, so
that no value is much larger than the others; scales it; rounds it at random, repeatedly until the integers' norm is
within Delta; adds discrete noise of variance S^2 / h, where at least h devices of a sum are honest; reduces all modulo
the prime. The sum's noise has the parameter S^2 at least. The proof is about the integers; the rest is post-processing.

Privacy. The sum's epsilon exceeds a continuous Gaussian's epsilon at multiplier sqrt(S^2 - s1^2) / Delta, s1 = 2, by
less than 1e-19, and its delta by less than 1e-20, for up to epsilon 10, 10^5 devices, 10^8 values, 10^3 rounds. Let
e(s) = 3 exp(-2 pi^2 s^2). By Poisson's summation formula, for each real y,

    sum over integers j of exp(-(j - y)^2 / 2 s^2)  is within a factor of 1 +- e(s) of  s sqrt(2 pi).           (1)

- Rounding a continuous Gaussian (Peikert, CRYPTO 2010, Theorem 3.1). Take y of N(0, s2^2) and then the integer x with a
  probability proportional to exp(-(x - y)^2 / 2 s1^2). By (1) the probability of x is the integral of the densities
  N(0, s2^2)(y) N(y, s1^2)(x) within 1 +- e(s1), hence N(0, s1^2 + s2^2)(x), hence (1 again) the probability of the
  discrete Gaussian of S^2 = s1^2 + s2^2: all within a factor exp(+-3 e(s1)). The rounding moves with y by integers, so
  the integers q plus discrete noise are, within this factor for each value, a randomised function of
  q + N(0, S^2 - s1^2), the Gaussian mechanism. Two such factors enlarge epsilon; e(2) < 2e-34.
- A sum of discrete Gaussians (their Theorem 11). P(X + Y = z) is exp(-z^2 / 2 (a^2 + b^2)) times the sum in (1) with
  1 / s^2 = 1 / a^2 + 1 / b^2: the discrete Gaussian of a^2 + b^2 within a factor exp(+-3 e(s)). Adding one part of
  standard deviation a >= 3 to the others has s^2 >= a^2 / 2, and e(s) < 1e-38 each time.
- The samples are within 2^-140 of the distribution (`discrete_gaussian`): this adds the part in delta.

All this holds for any other releases of the devices (factors multiply), and for each of the roundings. The integers'
norm is kept within Delta, so Delta is the sensitivity, and the proof does not rely on any floating-point result.

Records. If one record is protected, a device's values are a sum over its records, each of a norm of D steps at most:
x without one of them, x + v with it. Value by value both are rounded with the same uniform u, to floor(x + u) and
floor(x + v + u). The difference is v rounded at random, by w = x + u modulo 1: floor(w + v), for any x. By Proposition
22 of the same paper with beta = 1e-20 its square norm is above

    Delta^2 = d^2 + 9.6 (d + sqrt(k) / 2) + k / 4,   9.6 = sqrt(2 log(1 / beta)),

with a probability of beta at most, which adds e^epsilon beta to delta; d = |v|. For all other u the sensitivity is
Delta, and also for their mixture (delta is convex at a fixed epsilon). Rounding is not repeated here, because a device
cannot check a bound on what it would send without some record. A sum over records is computed in float64
(`hushfleet.privacy.record`) and then rounded to float32: as a mean, times the learning rate, and if it is clipped, the
factor and the product. Each of these four roundings moves it by at most 2^-24 of its norm, which is at most the norm of
n records, with the record and without it. So d = (1 + max(0.005, n 2^-21)) D, and
`tests/hushfleet/methods/test_record_sums.py` measures that float32 needs only a small part of this margin.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hushfleet.errors import PrivacyError
from hushfleet.privacy.discrete_gaussian import LARGEST_STD, DiscreteGaussian
from hushfleet.privacy.noise import NoiseSource

ROUNDED_STD = 2.0
"""s1 in the module docstring: the part of the noise that the proof uses up."""
LEAST_STD = 3.0
"""Least standard deviation of the noise of one device, in steps of the grid."""
_DEVIATIONS = 6.5  # standard deviations of a sum's coordinate that fit into half of the ring
_SUSPECTED = 6.0
_RECORD_TAIL = math.sqrt(2 * math.log(1e20))
_RECORD_SPARE = 5e-3
_RECORD_ROUNDING = 2.0**-21  # for each of a device's records
_RECORD_ENOUGH = 2.5e-3
_ENOUGH = 1e-3  # extra noise below which a finer scale is of no use
_MOST_EXTRA = 0.01
_BLOCK = 1 << 14  # values
_ATTEMPTS = 1000  # one fails with a probability of at most exp(-1/2), in practice hardly ever
_ROOM = 1e-6


@dataclass(frozen=True)
class Scale:
    """The resolution of a ring: a function of public numbers, none of them in units of the values.

    :param steps: number of grid steps in a clip norm.
    :param bound: Delta^2, a whole number: no rounded update has a larger square norm; with records, no change by one
        record has a larger one.
    :param variance: S^2, of the noise of h devices; 0: no noise.
    :param extra: relative excess of the noise, rounding included, over the noise of the plain Gaussian mechanism.
    """

    steps: float
    bound: int
    variance: float
    extra: float

    @property
    def inflation(self) -> float:
        """The relative increase of the sensitivity by rounding."""
        return math.sqrt(self.bound) / self.steps - 1

    @property
    def multiplier(self) -> float:
        """Noise multiplier of a Gaussian mechanism; the sum is at least as private as that mechanism."""
        return math.sqrt(max(0.0, self.variance - ROUNDED_STD**2) / self.bound)


def scale_for(
    *, prime: int, noise_multiplier: float, honest_devices: int, devices: int, size: int, records: int = 0
) -> Scale:
    """Returns the finest scale whose sums do not wrap around, or a coarser one that is fine enough.

    The values of a sum of `devices` rotated updates have on average a variance of at most (n Delta)^2 / k, reached if
    all updates are equal (a single value at most twice that), and their noise has the variance S^2 n / h; 6.5 standard
    deviations fit into half of the ring.

    :param records: 0 if a device is protected; if a record is, a device's values have the norm of at most this many.

    Raises `PrivacyError` if the ring is too small.
    """
    if not (0 <= noise_multiplier < math.inf and 1 <= honest_devices <= devices and size >= 1):
        raise PrivacyError(
            "a sum needs a finite noise multiplier, 1 honest device or more, and at least as many devices; got "
            f"{noise_multiplier!r}, {devices!r} and {honest_devices!r}, and {size!r} values"
        )
    z2, parts = noise_multiplier**2, devices / honest_devices
    rounded = ROUNDED_STD**2 if z2 else 0.0
    # Delta^2 = c^2 + t c + k/4 + t sqrt(k)/2 for c steps in a clip norm: their Proposition 22, t = sqrt(2 log(1/beta))
    t, spare, enough = (_RECORD_TAIL, _RECORD_SPARE, _RECORD_ENOUGH) if records else (1.0, 0.0, _ENOUGH)
    spare = max(spare, records * _RECORD_ROUNDING)
    added = size / 4 + t * math.sqrt(size) / 2
    room = (prime / 2 / _DEVIATIONS) ** 2 - devices / 4 - rounded * parts
    bound = room / ((devices * max(1, records)) ** 2 / size + z2 * parts)
    if z2:
        fine = (t + math.sqrt(t * t + 8 * enough * added)) / (4 * enough)
        finest = max(fine**2 + t * fine + added, devices / (8 * enough * z2), LEAST_STD**2 * honest_devices / z2)
        bound = min(bound, finest, (LARGEST_STD**2 * honest_devices - rounded) / z2 * (1 - _ROOM))
    bound = math.floor(max(bound, 0.0))
    if bound <= added:
        raise PrivacyError(f"sums of {devices} devices and {size} values do not fit into integers modulo {prime}")
    steps = (math.sqrt(t * t + 4 * (bound - added)) - t) / 2 / (1 + spare)
    variance = (z2 * bound + rounded) * (1 + 1e-12)  # floating point may not make it smaller
    if z2 and variance < LEAST_STD**2 * honest_devices:
        raise PrivacyError(
            f"modulo {prime} the noise of {honest_devices} devices comes to {math.sqrt(variance / honest_devices):.3g} "
            f"steps each, and at least {LEAST_STD:g} are needed: take more bits, or more noise"
        )
    extra = math.sqrt((variance + devices / 4) / z2) / steps - 1 if z2 else 0.0
    return Scale(steps, bound, variance if z2 else 0.0, extra)


Bits = TypeVar("Bits", bound=int)


def least_bits(
    primes: Mapping[Bits, int], *, noise_multiplier: float, honest_devices: int, devices: int, size: int,
    records: int = 0,
) -> Bits:  # fmt: skip
    """Returns the fewest bits per value whose ring adds less than 1 % of extra noise, not counting the part that the
    float32 rounding of a sum over records needs. Raises `PrivacyError` if no width is enough.

    :param primes: the prime of each width in bits; the other parameters as in `scale_for`.
    """
    reason = ""
    for bits, prime in sorted(primes.items()):
        try:
            found = scale_for(
                prime=prime,
                noise_multiplier=noise_multiplier,
                honest_devices=honest_devices,
                devices=devices,
                size=size,
                records=records,
            )
        except PrivacyError as error:
            reason = str(error)
            continue
        if found.extra < _MOST_EXTRA + max(0.0, records * _RECORD_ROUNDING - _RECORD_SPARE):
            return bits
        reason = f"{bits} bits a value cost {100 * found.extra:.1f} % of extra noise"
    raise PrivacyError(f"no ring is fine enough: {reason}")


class Ring:
    """Converts between clipped values and integers modulo a prime.

    :param prime: modulus of the field.
    :param clip_norm: C, the largest change of a device's values by the protected unit.
    :param noise_multiplier: of the sum, over the parts of `honest_devices`; 0: no noise.
    :param honest_devices: number of devices among which the noise is divided.
    :param devices: most devices in a sum; a sum of this many must not wrap around.
    :param size: number of values.
    :param length: number of integers, not below `size`; zeros are added to the values before the rotation.
    :param records: as in `scale_for`.
    :param key: public, 16 bytes; of the round's rotation.

    Raises `PrivacyError` if the ring is too small for these numbers, or for the noise that the guarantee needs.
    """

    def __init__(
        self,
        *,
        prime: int,
        clip_norm: float,
        noise_multiplier: float,
        honest_devices: int,
        devices: int,
        size: int,
        length: int,
        key: bytes,
        records: int = 0,
    ) -> None:
        if not 0 < clip_norm < math.inf:
            raise PrivacyError(f"the clip norm of a sum of integers must be finite and above zero, got {clip_norm!r}")
        self.prime, self.size, self.length, self._records = prime, size, length, records
        self.scale = scale_for(
            prime=prime,
            noise_multiplier=noise_multiplier,
            honest_devices=honest_devices,
            devices=devices,
            size=length,
            records=records,
        )
        self.unit = clip_norm / self.scale.steps
        """Size of one step of the grid, in units of a value."""
        self._share = DiscreteGaussian(self.scale.variance / honest_devices) if noise_multiplier else None
        bits = np.frombuffer(hashlib.shake_256(key).digest((size + 7) // 8), np.uint8)
        self._signs = np.unpackbits(bits, count=size) * 2.0 - 1

    @property
    def multiplier(self) -> float:
        """Noise multiplier that is charged for the sum."""
        return self.scale.multiplier

    def encode(self, values: np.ndarray, noise: NoiseSource) -> np.ndarray:
        """Encodes clipped values, float32 `[size]`, as uint32 `[length]`. It draws noise, so it is called once a round.

        Raises `PrivacyError` for values that are not finite, or were not clipped.
        """
        whole = self._rounded(values, noise)
        if self._share is not None:
            whole += self._share.sample(self.length, noise)
        whole -= whole // self.prime * self.prime  # an eighth of the time of %
        return whole.astype(np.uint32)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """Decodes a sum modulo the prime, uint32 `[length]`, to the sum of values, float64 `[size]`."""
        summed: np.ndarray = self._signs * _hartley(self._centred(total) * self.unit)[: self.size]
        return summed

    def suspected_wraps(self, total: np.ndarray) -> int:
        """Counts the values beyond 6 of the 6.5 standard deviations that fit; honest sums hardly ever have one.

        A normal value lies there with a probability of 2e-9, and wraps around with a probability of 8e-11.
        """
        return int(np.count_nonzero(np.abs(self._centred(total)) > self.prime / 2 * _SUSPECTED / _DEVIATIONS))

    def _rounded(self, values: np.ndarray, noise: NoiseSource) -> np.ndarray:
        """Returns int64 `[length]` with a square norm within the bound; each value is rounded up or down, unbiased."""
        if values.shape != (self.size,) or not np.isfinite(values).all():
            raise PrivacyError(
                f"expected {self.size} finite values, got an array of {values.shape}, or values that are not finite"
            )
        exact = _hartley(np.append(self._signs * values, np.zeros(self.length - self.size))) / self.unit
        if not np.linalg.norm(exact) <= self.scale.steps * max(1, self._records) * (1 + _ROOM):
            raise PrivacyError("values are above the clip norm, and nothing of them may be released")
        rounded = np.empty(self.length)
        for _ in range(_ATTEMPTS):
            for start in range(0, self.length, _BLOCK):
                part = exact[start : start + _BLOCK]
                lower = np.floor(part, out=rounded[start : start + _BLOCK])
                lower += (noise.words(len(part)) >> np.uint64(11)) * 2.0**-53 < part - lower
            whole = rounded.astype(np.int64)
            if self._records or rounded @ rounded < self.scale.bound * (1 - _ROOM) or whole @ whole <= self.scale.bound:
                return whole
        raise PrivacyError(f"in {_ATTEMPTS} attempts no rounding was within the bound")

    def _centred(self, total: np.ndarray) -> np.ndarray:
        centred = total.astype(np.int64)
        centred -= self.prime * (centred > self.prime // 2)
        return centred


def _hartley(values: np.ndarray) -> np.ndarray:
    """Returns the discrete Hartley transform, float64 `[n]`: orthonormal, and its own inverse, for any n."""
    half = np.fft.rfft(values, norm="ortho")
    mirrored = half[1 : (len(values) + 1) // 2]
    return np.concatenate([half.real - half.imag, (mirrored.real + mirrored.imag)[::-1]])
