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
from typing import TYPE_CHECKING

from hushfleet.array_api import np
from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hushfleet.privacy.noise import NoiseSource

_BLOCK_ENTRIES = 1 << 16


@dataclass(frozen=True)
class GaussianMechanism:
    """Device-level Gaussian noise, whole or divided among devices.

    Against the server, only the noise in a device's own bytes counts (`multiplier_server`). Against readers
    who see only the aggregate, the noise of all devices adds up (`multiplier_release`). This helps only if
    nobody sees single updates, so dividing the noise (`noise_split > 1`) is sound only under that condition.
    Both hold for adding or removing a contribution; replacing it by another one doubles the sensitivity.

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
        from hushfleet.privacy.noise import add_on_grid

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
