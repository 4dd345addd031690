"""The Gaussian mechanism on a device's whole update, as one object: noise scale, two adversaries, charge.

Release: the clipped update of one device in one round, plus noise. Sensitivity: whole-vector clipping to C
bounds the change from adding or removing the device by C. With layers (FedGLP-ADP, Eq. 13 to 16) layer l is
clipped to C_l and receives noise of standard deviation C_l * sigma * sqrt(L). Each layer alone costs
order / (2 sigma^2 L) in Rényi terms, and the L layers together cost order / (2 sigma^2), the same as the
plain mechanism. One layer is the plain mechanism.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy.grid import add_on_grid
from hushfleet.privacy.noise import NoiseSource

DEVICE_ADJACENCY = "add or remove one device's whole contribution to the round"
RECORD_ADJACENCY = "add or remove one record of the device's data"

_BLOCK_ENTRIES = 1 << 16
MOST_WEIGHT = 1e12


@dataclass(frozen=True)
class Charge:
    """Privacy cost of one release for a device, against anyone who sees it (the server, the broker, a wire tap).

    :param unit: what is protected, `"device"` or `"record"`.
    :param adjacency: which two inputs must be indistinguishable.
    :param mechanism: `"gaussian"`, or `"none"` if nothing is protected.
    :param noise_multiplier: noise over sensitivity in the server's view: in this device's own bytes, or in the sum
        if the server sees only the sum.
    :param noise_split: number of devices among which the noise of the sum was divided (1: not divided).
    :param sample_rate: rate of secret Poisson sampling inside the device; 1 for device-level noise.
    :param steps: number of such releases in this charge.
    :param raw: functions of private data that leave without noise beside them, in words. No epsilon covers them.
    """

    unit: str
    adjacency: str
    mechanism: str
    noise_multiplier: float
    noise_split: int = 1
    sample_rate: float = 1.0
    steps: int = 1
    raw: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in ("device", "record"):
            raise PrivacyError(f'the unit of privacy is "device" or "record", got {self.unit!r}')
        if self.mechanism not in ("gaussian", "none"):
            raise PrivacyError(f'the mechanism is "gaussian" or "none", got {self.mechanism!r}')
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"a noise multiplier must be finite, zero or more, got {self.noise_multiplier!r}")
        if (self.noise_multiplier == 0) != (self.mechanism == "none"):
            raise PrivacyError(
                f"mechanism {self.mechanism!r} contradicts a noise multiplier of {self.noise_multiplier!r}"
            )
        if self.noise_split < 1 or self.steps < 1 or not 0 < self.sample_rate <= 1:
            raise PrivacyError(
                f"a charge needs noise_split and steps of at least 1 and a sample rate in (0, 1], got "
                f"{self.noise_split!r}, {self.steps!r} and {self.sample_rate!r}"
            )
        if any(not words or "\n" in words for words in self.raw):
            raise PrivacyError(f"raw values are named in one line each, got {self.raw!r}")

    @property
    def weight(self) -> float:
        """Adds up over charges, so that two ledgers can be compared: steps x (sample rate / noise multiplier)^2, at
        most 10^12; 1 for each step without noise."""
        ratio = self.sample_rate / self.noise_multiplier if self.noise_multiplier else 1.0
        return min(MOST_WEIGHT, self.steps * ratio * ratio)


@dataclass(frozen=True)
class GaussianMechanism:
    """Device-level Gaussian noise, whole or divided among devices.

    Against the server, only the noise in a device's own bytes counts (`multiplier_server`). Against readers
    who see only the aggregate, the noise of all devices adds up (`multiplier_release`). This helps only if
    nobody sees single updates, so dividing the noise (`noise_split > 1`) is sound only under that condition.
    Both hold for adding or removing a contribution; exchanging it for another one doubles the sensitivity.

    :param noise_multiplier: sigma of the SUM of `noise_split` devices, over the clip norm; 0 = no noise.
    :param noise_split: n; each device adds 1 / sqrt(n) of the noise. 1 is local differential privacy.
    """

    noise_multiplier: float
    noise_split: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"a noise multiplier must be finite, zero or more, got {self.noise_multiplier!r}")
        if type(self.noise_split) is not int or self.noise_split < 1:
            raise PrivacyError(f"noise is divided among 1 device or more, got {self.noise_split!r}")

    @property
    def multiplier_server(self) -> float:
        """Noise over sensitivity in one device's own update: sigma / sqrt(n)."""
        return self.noise_multiplier / math.sqrt(self.noise_split)

    def multiplier_release(self, participants: int) -> float:
        """Returns noise over sensitivity in the sum of `participants` (k) honest devices: sigma * sqrt(k / n)."""
        if participants < 1:
            raise PrivacyError(f"a sum has at least one participant, got {participants!r}")
        return self.noise_multiplier * math.sqrt(participants / self.noise_split)

    def layer_stds(self, clip_norms: ArrayLike) -> np.ndarray:
        """Returns the noise std of layers that are clipped one by one: bounds `[L]` -> float64 `[L]` (Eq. 15).

        A bound of inf (no clipping) is accepted only without noise. Raises `PrivacyError` for a bound that is not
        above zero.
        """
        bounds = self._bounds(clip_norms)
        return self._scaled(bounds, math.sqrt(len(bounds)))

    def vector_stds(self, clip_norms: ArrayLike) -> np.ndarray:
        """Returns the noise std of a vector that is clipped as a whole: C for each layer `[L]` -> float64 `[L]`."""
        return self._scaled(self._bounds(clip_norms), 1.0)

    def add_noise(
        self,
        x: np.ndarray,
        stds: ArrayLike,
        noise: NoiseSource,
        *,
        where: np.ndarray | None = None,
        layout: ParamLayout | None = None,
    ) -> np.ndarray:
        """Returns the noised values; outside `where` they are exactly 0, so that no value without noise can leave.

        :param x: clipped update, `[d]`.
        :param stds: standard deviations: with `layout`, `[L]`; without it, a number or `[d]`.
        :param where: bool `[d]`, True for released values; None releases everything.

        Raises `PrivacyError` for values that are not finite, before or after, and for standard deviations that
        contradict the multiplier (such as 0 with a positive multiplier).
        """
        spans = [(0, len(x))] if layout is None else [(span.start, span.stop) for span in layout.layers]
        deviations = np.atleast_1d(np.asarray(stds, np.float64))
        if x.ndim != 1 or (layout is not None and layout.size != len(x)):
            raise PrivacyError(f"values of shape {x.shape} are no vector of this layout")
        if deviations.ndim != 1 or len(deviations) not in ({1, len(x)} if layout is None else {len(spans)}):
            raise PrivacyError(f"standard deviations of shape {deviations.shape} do not fit values of {x.shape}")
        if where is not None and (where.dtype != bool or where.shape != x.shape):
            raise PrivacyError(f"the mask must be boolean, one for each value, got {where.dtype} {where.shape}")
        out = np.zeros_like(x)
        for index, (first, last) in enumerate(spans):
            for start in range(first, last, _BLOCK_ENTRIES):  # a board has no memory for `[d]` doubles
                piece = slice(start, min(start + _BLOCK_ENTRIES, last))
                each = deviations[piece] if layout is None and len(deviations) > 1 else deviations[index : index + 1]
                mask = None if where is None else where[piece]
                if mask is None or mask.all():
                    out[piece] = self._released(x[piece], each, noise)
                else:
                    (places,) = np.nonzero(mask)  # with a mixed mask three times as fast as indexing by the mask
                    some = each if len(each) == 1 else each[places]
                    out[piece][places] = self._released(x[piece][places], some, noise)
        return out

    def _released(self, values: np.ndarray, stds: np.ndarray, noise: NoiseSource) -> np.ndarray:
        if not np.isfinite(values).all():
            raise PrivacyError("a value to be noised is not finite; training has diverged, and nothing may be released")
        if not ((stds > 0) & np.isfinite(stds) if self.noise_multiplier > 0 else stds == 0).all():
            raise PrivacyError(
                f"a noise standard deviation is not finite or contradicts the noise multiplier of "
                f"{self.noise_multiplier:g}: take them from layer_stds or vector_stds of this mechanism"
            )
        if self.noise_multiplier == 0:
            return values
        noised = add_on_grid(noise.normal(len(values)) * stds, values, stds)
        if not (np.abs(noised) <= np.finfo(values.dtype).max).all():
            raise PrivacyError(f"a noised value does not fit into {values.dtype}; the clip norm is too large")
        return np.asarray(noised, values.dtype)

    def _bounds(self, clip_norms: ArrayLike) -> np.ndarray:
        bounds = np.asarray(clip_norms, np.float64)
        limit = math.inf if self.noise_multiplier == 0 else sys.float_info.max
        if bounds.ndim != 1 or not len(bounds) or not ((bounds > 0) & (bounds <= limit)).all():
            raise PrivacyError(f"clip norms must be above zero, and finite where noise is scaled to them; got {bounds}")
        return bounds

    def _scaled(self, bounds: np.ndarray, layers_factor: float) -> np.ndarray:
        if self.noise_multiplier == 0:  # a bound of inf times 0 would be NaN
            return np.zeros_like(bounds)
        scaled: np.ndarray = bounds * (self.multiplier_server * layers_factor)
        return scaled

    def charge(self) -> Charge:
        """Returns the cost of one round, in the server's view."""
        return Charge(
            unit="device",
            adjacency=DEVICE_ADJACENCY,
            mechanism="gaussian" if self.noise_multiplier > 0 else "none",
            noise_multiplier=self.multiplier_server,
            noise_split=self.noise_split,
        )
