"""DP-SGD inside a device: each record's gradient is clipped, and each step's sum is noised.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, with Poisson sampling: a batch takes
each record with probability q, independently, and nobody outside learns which. Adding or removing one record changes a
batch's sum of clipped gradients by at most C, so a step is a subsampled Gaussian mechanism of multiplier sigma.

If a method takes g gradients of one batch, they are one release, not g: a record is in all of them or in none. If it is
in them, they are g Gaussian mechanisms of multiplier sigma, which together are one of sigma / sqrt(g), and this one is
sampled once. Counting g independent steps would charge too little.

Gradients are added up in float64. In float32 the rounding of later additions depends on the sum so far, and one record
may move the sum of 2,000 records by 1.06 C and the sum of 65,536 records by 65 C (Casacuberta et al., "Widespread
Underestimation of Sensitivity in Differentially Private Libraries and How to Fix It", CCS 2022); in float64 it moves
the sum by at most C plus 1e-7 C.

The sum is divided by the nominal batch size. This size, q and the number of steps are the same for all devices, so
neither the update nor the charge shows how many records a device has; the training time does (`constant_time`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hushfleet import array_api
from hushfleet.array_api import np
from hushfleet.errors import PrivacyError
from hushfleet.privacy.charge import RECORD_ADJACENCY, Charge

if TYPE_CHECKING:
    from hushfleet.privacy.noise import NoiseSource

LEAST_CLIP_NORM, MOST_CLIP_NORM = 1e-30, 1e30
"""Below the least, clipped entries may be denormal float32, which has few digits, so that rounding may change an entry
by as much as its own size: a record could exceed its bound, or end the training. At the most, a sum of a hundred
million records still fits into float32, so that an overflow cannot reveal how many records there are."""

_LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32
_BLOCK_ENTRIES = 1 << 15  # this many doubles fit in a cache, and a board has no memory for `[d]`


@dataclass(frozen=True)
class RecordMechanism:
    """The noised gradients of one round of one device. Raises `PrivacyError` as `check_record_bound` does.

    :param clip_norm: C, bound of each record's gradient.
    :param noise_multiplier: sigma; the noise on a sum has standard deviation sigma C.
    :param sample_rate: q.
    :param batches: number of batches in a round.
    :param gradients_per_batch: number of gradients that are taken of each batch.
    :param batch_size: divisor of the sums.
    :param noise_split: number of honest devices among which the noise of secure aggregation is divided; then the ring
        adds the noise, and training adds none. 0: training adds it.
    :param subset: number of records that are clipped together, by their mean gradient, which then counts as many times
        in the sum.
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
        """Returns the charge of one round, which is the same against the server and against anybody else."""
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
        """Returns the indices of one batch's records among `count`: int64, rising, possibly empty."""
        return np.flatnonzero(rng.random(count) < self.sample_rate)

    def subsets(self, count: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Divides a batch's `count` records into subsets of about `subset`; no subsets if each is clipped alone.

        Each record draws its own subset, so that adding or removing one record changes only one subset.
        """
        if self.subset == 1:
            return []
        places = rng.integers(math.ceil(self.batch_size / self.subset), size=count)
        return [np.flatnonzero(places == place) for place in np.unique(places)]

    def noised_mean(self, clipped_sum: Any, noise: NoiseSource) -> Any:
        """Returns `(sum + sigma C z) / batch_size`, in place: float64 `[d]`. Raises `PrivacyError` beyond float32.

        For secure aggregation no noise is added here. A subset's clipped mean counts `subset` times in the sum.
        """
        from hushfleet.privacy.noise import add_on_grid

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
    """Raises `PrivacyError` for a bound on single records that float32 arithmetic cannot keep."""
    if not LEAST_CLIP_NORM <= bound <= MOST_CLIP_NORM:
        raise PrivacyError(
            f"the bound on what one record changes must be {LEAST_CLIP_NORM:g} to {MOST_CLIP_NORM:g}, got {bound!r}: "
            "below that float32 is too coarse to hold it, and above that the sum of many records would be infinite, "
            "which shows how many there are"
        )


def gradients_factor(gradients_per_batch: int) -> float:
    """Returns the factor by which the noise multiplier of one gradient exceeds that of a batch's whole release.

    >>> round(gradients_factor(2), 3)
    1.414
    """
    return math.sqrt(gradients_per_batch)


def sensitivity(subset: int) -> float:
    """Returns by how many clip norms one record can move a batch's sum if `subset` records are clipped together.

    Alone, a record adds a gradient of at most C. In a subset it may reverse the mean gradient, from C to -C.

    >>> sensitivity(1), sensitivity(4)
    (1.0, 8.0)
    """
    return 1.0 if subset == 1 else 2.0 * subset
