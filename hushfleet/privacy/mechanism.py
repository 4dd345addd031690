"""The Gaussian mechanism on a device's whole update, as one object: noise scale, two adversaries, charge.

What is released: the clipped update of one device in one round, plus noise. Sensitivity: whole-vector
clipping to C bounds what adding or removing the device changes by C. With layers (FedGLP-ADP, Eq. 13
to 16) layer l is clipped to C_l and receives noise of standard deviation C_l * sigma * sqrt(L): it alone
costs order / (2 sigma^2 L) in Rényi terms, and the L layers add up to the plain mechanism's
order / (2 sigma^2). One layer is the plain mechanism.

Noise is always (bound x multiplier), and the bound is the one that was clipped to; there is no free
"sensitivity" anywhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hushfleet import array_api
from hushfleet.errors import PrivacyError
from hushfleet.model.params import ParamLayout
from hushfleet.privacy.grid import add_on_grid
from hushfleet.privacy.noise import NoiseSource

DEVICE_ADJACENCY = "add or remove one device's whole contribution to the round"
RECORD_ADJACENCY = "add or remove one record of the device's data"

_BLOCK_ENTRIES = 1 << 16


@dataclass(frozen=True)
class Charge:
    """What one release costs a device against whoever sees it (the server, the broker, a wire tap).

    :param unit: what is protected, `"device"` or `"record"`.
    :param adjacency: which two inputs are to look alike.
    :param mechanism: `"gaussian"`, or `"none"` where nothing is protected.
    :param noise_multiplier: noise over sensitivity in this device's own bytes (the server's view).
    :param noise_split: among how many devices the noise of the sum was divided (1: not divided).
    :param sample_rate: secret Poisson sampling inside the device; 1 for device-level noise.
    :param steps: how many such releases this charge stands for.
    :param raw: functions of private data that leave beside them without noise, in words. No epsilon covers them.
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


@dataclass(frozen=True)
class GaussianMechanism:
    """Device-level Gaussian noise, whole or divided among devices.

    Against the server each device's bytes hold for themselves (`multiplier_server`). Against readers of
    the aggregate alone the noises add up (`multiplier_release`), which is worth something only if
    nobody sees the single updates; dividing (`noise_split > 1`) is sound only under that condition.
    Both hold for adding or removing a contribution; exchanging it for any other doubles the sensitivity.

    :param noise_multiplier: sigma of the SUM of `noise_split` devices, over the clip norm; 0 = no noise.
    :param noise_split: n; each device adds 1 / sqrt(n) of the noise. 1 is local differential privacy.
    """

    noise_multiplier: float
    noise_split: int = 1
    unit: str = "device"
    adjacency: str = DEVICE_ADJACENCY

    def __post_init__(self) -> None:
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"a noise multiplier must be finite, zero or more, got {self.noise_multiplier!r}")
        if type(self.noise_split) is not int or self.noise_split < 1:
            raise PrivacyError(f"noise is divided among 1 device or more, got {self.noise_split!r}")
        if self.unit != "device" or self.adjacency != DEVICE_ADJACENCY:
            raise PrivacyError(
                f"this mechanism protects a device's contribution, not {self.unit!r} / {self.adjacency!r}"
            )

    @property
    def multiplier_server(self) -> float:
        """Noise over sensitivity in one device's own update: sigma / sqrt(n)."""
        return self.noise_multiplier / math.sqrt(self.noise_split)

    def multiplier_release(self, participants: int) -> float:
        """Noise over sensitivity in the sum of `participants` honest devices: sigma * sqrt(k / n)."""
        if participants < 1:
            raise PrivacyError(f"a sum has at least one participant, got {participants!r}")
        return self.noise_multiplier * math.sqrt(participants / self.noise_split)

    def layer_stds(self, clip_norms: Any) -> Any:
        """Noise of layers clipped one by one: bounds `[..., L]` -> float64 `[..., L]` (Eq. 15).

        Array type and place follow `clip_norms`; a list gives NumPy. A bound of inf (no clipping) is
        accepted only without noise. Raises `PrivacyError` for a bound that is not above zero.
        """
        bounds = self._bounds(clip_norms)
        return self._scaled(bounds, math.sqrt(bounds.shape[-1]))

    def vector_stds(self, clip_norms: Any) -> Any:
        """Noise of a vector clipped as a whole: C for each layer `[..., L]` -> float64 `[..., L]`."""
        return self._scaled(self._bounds(clip_norms), 1.0)

    def add_noise(
        self,
        x: Any,
        stds: Any,
        noise: NoiseSource | Sequence[NoiseSource],
        *,
        where: Any = None,
        layout: ParamLayout | None = None,
    ) -> Any:
        """The noised values; outside `where` they are exactly 0, so that nothing un-noised can leave.

        :param x: clipped update, `[d]`, or `[clients, d]` with one noise source a client.
        :param stds: standard deviations: with `layout`, `[L]` or `[clients, L]`; without it, a number, `[d]`
            or `[clients, d]`.
        :param noise: the source, or the sequence of sources.
        :param where: bool `[d]` or `[clients, d]`, True for what is released; None releases everything.

        Returns an array like `x`. Raises `PrivacyError` for values that are not finite, before or after,
        and for standard deviations that contradict the multiplier (none where there should be noise).
        """
        xp = array_api.array_namespace(x)
        rows = x[None, :] if x.ndim == 1 else x
        sources = [noise] if x.ndim == 1 else noise
        if rows.ndim != 2 or not isinstance(sources, Sequence) or len(sources) != rows.shape[0]:
            raise PrivacyError(f"values of shape {tuple(x.shape)} need one noise source for each row")
        if layout is not None and layout.size != rows.shape[1]:
            raise PrivacyError(f"a layout of {layout.size} entries does not fit values of {rows.shape[1]}")
        spans = [(0, rows.shape[1])] if layout is None else [(span.start, span.stop) for span in layout.layers]
        place = array_api.device(x)
        stds_of = _rows_of(xp.asarray(stds, dtype=xp.float64, device=place), rows, spans, "standard deviations")
        released = _rows_of(xp.asarray(True if where is None else where, device=place), rows, spans[:1], "the mask")
        if released.dtype != xp.bool:
            raise PrivacyError(f"the mask must be boolean, got {released.dtype}")
        out = xp.zeros_like(rows)
        for row, source in enumerate(sources):
            for index, start, stop in _pieces(rows, spans):
                piece = slice(start, stop)
                mask = released[row, piece] if released.shape[1] > 1 else released[row, :]
                std = stds_of[row, index : index + 1] if stds_of.shape[1] == len(spans) else stds_of[row, piece]
                out[row, piece] = self._noised(xp, rows[row, piece], std, mask, source)
        return out[0, :] if x.ndim == 1 else out

    def _noised(self, xp: Any, values: Any, stds: Any, mask: Any, source: NoiseSource) -> Any:
        mask = xp.broadcast_to(mask, values.shape)
        if bool(xp.all(mask)):
            return self._released(xp, values, stds, source)
        out = xp.zeros_like(values)
        (places,) = xp.nonzero(mask)  # on a mixed mask three times as quick as indexing by the mask itself
        out[places] = self._released(xp, values[places], stds if stds.shape[0] == 1 else stds[places], source)
        return out

    def _released(self, xp: Any, values: Any, stds: Any, source: NoiseSource) -> Any:
        if not bool(xp.all(xp.isfinite(values))):
            raise PrivacyError("a value to be noised is not finite; training has diverged, and nothing may be released")
        if not bool(xp.all((stds > 0) & xp.isfinite(stds) if self.noise_multiplier > 0 else stds == 0)):
            raise PrivacyError(
                f"a noise standard deviation is not finite or contradicts the noise multiplier of "
                f"{self.noise_multiplier:g}: take them from layer_stds or vector_stds of this mechanism"
            )
        if self.noise_multiplier == 0:
            return values
        normal = xp.asarray(source.normal(values.shape[0]), dtype=xp.float64, device=array_api.device(values))
        noised = add_on_grid(normal * stds, values, stds)
        if not bool(xp.all(xp.abs(noised) <= xp.finfo(values.dtype).max)):
            raise PrivacyError(f"a noised value does not fit into {values.dtype}; the clip norm is too large")
        return xp.astype(noised, values.dtype)

    def _bounds(self, clip_norms: Any) -> Any:
        known = array_api.is_array_api_obj(clip_norms)
        given = clip_norms if known else np.asarray(clip_norms, dtype=np.float64)
        xp = array_api.array_namespace(given)
        bounds = xp.astype(given, xp.float64)
        limit = math.inf if self.noise_multiplier == 0 else sys.float_info.max
        if bounds.ndim < 1 or bounds.shape[-1] < 1 or not bool(xp.all((bounds > 0) & (bounds <= limit))):
            raise PrivacyError(
                f"clip norms must be above zero, and finite where noise is scaled to them; got {clip_norms}"
            )
        return bounds

    def _scaled(self, bounds: Any, layers_factor: float) -> Any:
        if self.noise_multiplier == 0:  # a bound of inf times 0 would be NaN
            return array_api.array_namespace(bounds).zeros_like(bounds)
        return bounds * (self.multiplier_server * layers_factor)

    def charge(self) -> Charge:
        """What one round of this costs, in the server's view."""
        return Charge(
            unit=self.unit,
            adjacency=self.adjacency,
            mechanism="gaussian" if self.noise_multiplier > 0 else "none",
            noise_multiplier=self.multiplier_server,
            noise_split=self.noise_split,
        )


def _pieces(rows: Any, spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(index of the span, start, stop). On a host in blocks, since a board has no room for `[d]` doubles."""
    on_host = array_api.is_numpy_array(rows) or rows.device.type == "cpu"
    for index, (first, last) in enumerate(spans):
        step = _BLOCK_ENTRIES if on_host else max(1, last - first)
        for start in range(first, last, step):
            yield index, start, min(start + step, last)


def _rows_of(values: Any, rows: Any, spans: Sequence[tuple[int, int]], what: str) -> Any:
    """A number, `[k]` or `[clients, k]` as `[clients, k]`: k is 1 or d, or the number of spans."""
    widths = {1, rows.shape[1]} if len(spans) == 1 else {len(spans)}
    values = values[None] if values.ndim == 0 else values
    if values.shape[-1] not in widths or tuple(values.shape[:-1]) not in ((), (rows.shape[0],)):
        raise PrivacyError(f"{what} of shape {tuple(values.shape)} do not fit values of {tuple(rows.shape)}")
    return array_api.array_namespace(rows).broadcast_to(values, (rows.shape[0], values.shape[-1]))
