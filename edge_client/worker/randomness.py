"""Random numbers of a device: secret ones in the field, repeatable ones in a simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hushfleet.privacy.noise import NoiseSource, SecureNoise, SeededNoise

_ORDER_STREAM = 0x4F524452


class Randomness(Protocol):
    """Gives a device its random numbers."""

    def noise(self, round: int) -> NoiseSource: ...

    def order(self, round: int) -> np.random.Generator:
        """Returns the generator for the order of the samples, augmentation and dropout, which need not be secret; and
        for the members of a batch with privacy unit `record`, which must stay secret."""


class FieldRandomness:
    """Noise from a cryptographically secure stream; nothing is repeatable."""

    def noise(self, round: int) -> NoiseSource:
        return SecureNoise()

    def order(self, round: int) -> np.random.Generator:
        return np.random.default_rng()


@dataclass(frozen=True)
class SeededRandomness:
    """Repeatable random numbers. FOR SIMULATION ONLY: anyone who knows the seed can subtract the noise.

    :param make_noise: creates the noise source; a faster implementation must give the same bits.
    """

    seed: int
    device_index: int
    make_noise: Callable[[int, int, int], NoiseSource] = SeededNoise

    def noise(self, round: int) -> NoiseSource:
        return self.make_noise(self.seed, self.device_index, round)

    def order(self, round: int) -> np.random.Generator:
        key = np.random.SeedSequence(self.seed, spawn_key=(_ORDER_STREAM, self.device_index, round))
        return np.random.Generator(np.random.PCG64(key))
