"""An update as integers modulo a prime, with this device's part of the sum's noise.

STUB by the lead, for part `ring` to replace: the interface stays.
"""

from __future__ import annotations

import math

import numpy as np

from hushfleet.privacy.noise import NoiseSource


class Ring:
    """Between clipped values and integers modulo a prime.

    :param prime: of the field.
    :param clip_norm: C.
    :param noise_multiplier: of the sum, over the parts of `honest_devices`.
    :param honest_devices: among how many the noise is divided.
    :param devices: in a sum, at most: what must not wrap around.
    :param size: how many values.
    :param key: public, 16 bytes; of the round's rotation.
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
        key: bytes,
    ) -> None:
        self.prime, self.honest_devices = prime, honest_devices
        self.noise_units = prime / 2 / (devices / max(noise_multiplier, 1e-9) + 6)
        self.unit = clip_norm * noise_multiplier / self.noise_units

    def encode(self, values: np.ndarray, noise: NoiseSource) -> np.ndarray:
        """uint32 `[size]`, of clipped values `[size]`; noise is drawn, so once a round."""
        std = self.noise_units / math.sqrt(self.honest_devices)
        whole = np.rint(values / self.unit + noise.normal(len(values)) * std).astype(np.int64)
        return (whole % self.prime).astype(np.uint32)

    def decode(self, total: np.ndarray) -> np.ndarray:
        """The sum of values, float64 `[size]`, of the sum modulo the prime, uint32 `[size]`."""
        centred = total.astype(np.int64)
        centred -= self.prime * (centred > self.prime // 2)
        return centred * self.unit
