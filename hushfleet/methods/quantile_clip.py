"""A clip norm that follows a quantile of the updates' norms: the AQC baseline of ACDP-pFSD's Table 3.

Andrew, Thakkar, McMahan, Ramaswamy: "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021. By its
Algorithm 1 each device says by one bit whether its update's norm is within C; the server moves
C <- C exp(-eta (b - gamma)), with b the noised share of those that are. The bits' noise is paid for: Theorem 1 of that
paper splits the charge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BIT_BOUND = 0.5  # a bit less one half: what adding or removing a device changes by
_LEAST_SHARE = 0.05  # of the devices: the deviation of the noise on the sum of bits, Section 3.1


def bit_multiplier(multiplier: float, *, devices: int) -> float:
    """Noise over sensitivity of the sum of bits, `2 sigma_b`, so that something of the charge is left for the values.

    Reading: sigma_b is a twentieth of the devices. Where these are so few that the bits alone would cost more than a
    quarter of the charge, sigma_b is `multiplier`: then they cost just that.
    """
    return max(2 * _LEAST_SHARE * devices, 2 * multiplier)


def followed(clip_norm: float, bits: Sequence[float], *, step: float, quantile: float) -> float:
    """C after a round, from noised bits less one half.

    Deviation: the share is clipped to [0, 1], so that no report moves C by more than exp(step).
    """
    share = min(max(float(np.mean(bits)) + BIT_BOUND, 0.0), 1.0)
    return clip_norm * math.exp(-step * (share - quantile))
