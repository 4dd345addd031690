"""DP-SGD inside a device: each record's gradient is clipped, and each step's sum is noised.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, with Poisson sampling: a batch takes
each record with probability q, independently, and nobody outside learns which. Adding or removing one record changes a
batch's sum of clipped gradients by at most C, so a step is a subsampled Gaussian mechanism of multiplier sigma.

Where a method takes g gradients of one batch, they are one release, not g: a record is in all of them or in none. Given
that it is, they are g Gaussian mechanisms of multiplier sigma, together one of sigma / sqrt(g), and that one is sampled
once. Counting g independent steps would charge too little.

Gradients are added up in float64. In float32 the rounding of later additions follows the sum so far, and one record may
move the sum of two thousand by 1.06 C and that of 65,536 by 65 C (Casacuberta et al., "Widespread Underestimation of
Sensitivity in Differentially Private Libraries and How to Fix It", CCS 2022); in float64 by 1e-7 C more than C.

The sum is divided by the nominal batch size, q and the number of steps are the same for all devices, and so neither
the update nor the charge tells how many records a device has; how long it trains does (`constant_time`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hushfleet import array_api
from hushfleet.errors import PrivacyError
from hushfleet.privacy.clipping import clip
from hushfleet.privacy.grid import add_on_grid
from hushfleet.privacy.mechanism import RECORD_ADJACENCY, Charge
from hushfleet.privacy.noise import NoiseSource

LEAST_CLIP_NORM, MOST_CLIP_NORM = 1e-30, 1e30
"""With less, clipped entries may be denormal float32, which has few digits, so that rounding may change an entry by as
much as its own size: a record could leave its bound, or end the training. With the most, a sum of a hundred million
records fits into float32, so that whether a noised sum does not fit does not tell how many there are."""

_LARGEST = float(np.finfo(np.float32).max)
_BLOCK_ENTRIES = 1 << 15  # so many doubles stay in a cache, and a board has no room for `[d]` of them


@dataclass(frozen=True)
class RecordMechanism:
    """The noised gradients of one round of one device. Raises `PrivacyError` as `check_record_bound` does.

    :param clip_norm: C, bound of each record's gradient.
    :param noise_multiplier: sigma; the noise on a sum has standard deviation sigma C.
    :param sample_rate: q.
    :param batches: how many batches a round has.
    :param gradients_per_batch: how many gradients are taken of each.
    :param batch_size: what sums are divided by.
    :param noise_split: among how many honest devices the noise of a secure sum is divided, which the ring adds, and
        training none; 0: training adds it.
    :param subset: how many records are clipped as one, by their mean gradient, which then counts so often in the sum.
    """

    clip_norm: float
    noise_multiplier: float
    sample_rate: float
    batches: int
    gradients_per_batch: int
    batch_size: int
    noise_split: int = 0
    subset: int = 1

    def __post_init__(self) -> None:
        if self.noise_multiplier > 0:
            check_record_bound(self.clip_norm)

    def charge(self) -> Charge:
        """Returns the cost of one round, against the server as against anybody else."""
        return Charge(
            unit="record",
            adjacency=RECORD_ADJACENCY,
            mechanism="gaussian" if self.noise_multiplier > 0 else "none",
            noise_multiplier=self.noise_multiplier
            / gradients_factor(self.gradients_per_batch)
            / sensitivity(self.subset),
            sample_rate=self.sample_rate,
            steps=self.batches,
            noise_split=max(1, self.noise_split),
        )

    def check_charged(self, gradients: int) -> None:
        """Raises `PrivacyError` for more gradients of one batch than the charge covers."""
        if gradients > self.gradients_per_batch:
            charged = self.gradients_per_batch
            raise PrivacyError(f"a method takes {gradients} gradients of a batch, but {charged} are charged")

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """The records of one batch among `count`: int64, rising, perhaps none."""
        return np.flatnonzero(rng.random(count) < self.sample_rate)

    def subsets(self, count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divides a batch's `count` records into subsets of about `subset`; none where each is clipped by itself.

        Each record draws its own place, so that one more or less changes one subset only.
        """
        if self.subset == 1:
            return []
        places = rng.integers(math.ceil(self.batch_size / self.subset), size=count)
        return [np.flatnonzero(places == place) for place in np.unique(places)]

    def noised_mean(self, clipped_sum: Any, noise: NoiseSource) -> Any:
        """`(sum + sigma C z) / batch_size`, in place: float64 `[d]`. Raises `PrivacyError` if it is no float32.

        For a secure sum there is no noise. A subset's clipped mean counts `subset` times in the sum.
        """
        xp = array_api.array_namespace(clipped_sum)
        if self.subset > 1:
            clipped_sum *= self.subset
        if self.noise_multiplier > 0 and not self.noise_split:
            std = self.clip_norm * self.noise_multiplier
            for start in range(0, clipped_sum.shape[-1], _BLOCK_ENTRIES):
                values = clipped_sum[start : start + _BLOCK_ENTRIES]
                drawn = noise.normal(values.shape[-1])
                drawn *= std
                noised = add_on_grid(xp.asarray(drawn, device=array_api.device(values)), values, std)
                noised /= self.batch_size
                values[...] = noised
        else:
            clipped_sum /= self.batch_size
        if not (xp.max(clipped_sum) <= _LARGEST and xp.min(clipped_sum) >= -_LARGEST):  # also for a NaN
            raise PrivacyError("a noised gradient is not finite; training has diverged, and nothing of it may be used")
        return clipped_sum


def check_record_bound(bound: float) -> None:
    """Raises `PrivacyError` for a bound of single records that float32 cannot hold to."""
    if not LEAST_CLIP_NORM <= bound <= MOST_CLIP_NORM:
        raise PrivacyError(
            f"the bound on what one record changes must be {LEAST_CLIP_NORM:g} to {MOST_CLIP_NORM:g}, got {bound!r}: "
            "below that float32 is too coarse to hold it, and above that the sum of many records would be infinite, "
            "which shows how many there are"
        )


def gradients_factor(gradients_per_batch: int) -> float:
    """Returns the factor by which the noise multiplier of one gradient exceeds that of a batch's whole release."""
    return math.sqrt(gradients_per_batch)


def sensitivity(subset: int) -> float:
    """Returns by how many clip norms one record moves a batch's sum, with so many records clipped as one.

    Alone, a record adds a gradient of at most C. In a subset it may turn the mean gradient round, from C to -C.
    """
    return 1.0 if subset == 1 else 2.0 * subset


def clipped_sum(gradients: Iterable[Any], clip_norm: float, out: Any) -> Any:
    """Sum of single records' gradients, each clipped to `clip_norm`, into `out`, float64 `[..., d]`.

    One that is not finite counts as none: whoever chose the model could otherwise see which records make it so.

    :param gradients: `[..., d]` of one record, or `[..., k, d]` of several.
    """
    xp = array_api.array_namespace(out)
    out[...] = 0
    for gradient in gradients:
        clipped = gradient if math.isinf(clip_norm) else clip(gradient, clip_norm, drop=True)
        out += clipped if clipped.ndim == out.ndim else xp.sum(clipped, axis=-2, dtype=out.dtype)
    return out
