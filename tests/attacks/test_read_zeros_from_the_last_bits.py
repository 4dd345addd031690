"""Wanted: which sums of gradients were exactly zero, from the last bits of noised floats.

Noise that is rounded to float32 and added to a sum in float32 leaves a trace: added to 0 it keeps all of its bits, and
added to anything else it loses those below the other's last bit. Where nobody in a batch has a class, whole layers
have sums of zero.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.record import RecordMechanism

ENTRIES, TRIALS, SIGMA = 400, 200, 1.1
RECORD = RecordMechanism(1.0, SIGMA, sample_rate=0.1, batches=1, gradients_per_batch=1, batch_size=1)
DEVICE = GaussianMechanism(SIGMA)

Release = Callable[[np.ndarray, int], np.ndarray]


def as_it_was(sums: np.ndarray, trial: int) -> np.ndarray:
    return sums + (SIGMA * SeededNoise(2, 0, trial).normal(len(sums))).astype(np.float32)


def by_record(sums: np.ndarray, trial: int) -> np.ndarray:
    return RECORD.noised_mean(sums.copy(), SeededNoise(2, 0, trial))


def by_device(sums: np.ndarray, trial: int) -> np.ndarray:
    return DEVICE.add_noise(sums, SIGMA, SeededNoise(2, 0, trial))


def finest_bit(values: np.ndarray) -> int:
    """The exponent of the lowest bit that is set in any of them."""
    mantissa, exponent = np.frexp(values[values != 0].astype(np.float64))
    whole = (mantissa * 2.0**53).astype(np.int64)
    lowest = np.log2((whole & -whole).astype(np.float64)).astype(int)
    return int((exponent + lowest - 53).min())


def guessed_right(release: Release) -> float:
    """The share of right guesses at "was this sum all zero?", by the finest bit and nothing else."""
    one_record = np.full(ENTRIES, 1 / np.sqrt(ENTRIES), np.float32)  # a whole clip norm, spread over all entries
    zero = [finest_bit(release(np.zeros(ENTRIES, np.float32), trial)) for trial in range(TRIALS)]
    other = [finest_bit(release(one_record, TRIALS + trial)) for trial in range(TRIALS)]
    shares = [
        (np.mean(np.less(zero, threshold)) + np.mean(np.greater_equal(other, threshold))) / 2
        for threshold in range(min(zero + other), max(zero + other) + 2)
    ]
    return float(max(shares))


def test_the_attack_works_on_noise_that_is_added_in_float32() -> None:
    assert guessed_right(as_it_was) > 0.9


@pytest.mark.parametrize("release", [by_record, by_device])
def test_the_last_bits_tell_nothing(release: Release) -> None:
    assert guessed_right(release) < 0.55


@pytest.mark.parametrize("release", [by_record, by_device])
@pytest.mark.parametrize("value", [0.0, 1e-30, 0.3, 1.0])
def test_all_that_leaves_is_on_one_grid(release: Release, value: float) -> None:
    released = release(np.full(ENTRIES, value, np.float32), 0).astype(np.float64)
    grid = 2.0**-10  # of a standard deviation between 1 and 2
    np.testing.assert_array_equal(released, np.rint(released / grid) * grid)
    assert len(np.unique(released)) > ENTRIES / 2
