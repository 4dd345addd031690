"""Releases updates of devices in one compiled pass, where that gives the same bits as the steps on boards do."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.aggregator.payloads.decoding import MAX_MAGNITUDE
from hushfleet.array_api import Array
from hushfleet.methods.privatize import Bounds, clip_and_noise
from hushfleet.methods.state import RoundContext
from hushfleet.models.native import NativeNoise
from hushfleet.models.native.release import Released, released
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import NoiseSource
from hushfleet.simulator.engines.fast.coded_size import sample_stride
from hushfleet.wire.format.codec import MAX_STEP, MIN_STEP
from hushfleet.wire.format.codecs import steps_for
from hushfleet.wire.format.symbols import MAX_LEVEL

if TYPE_CHECKING:
    from hushfleet.wire.format.spec import WireSpec
    from hushfleet.wire.format.update_values import SentValues

_CODECS = ("quantized", "float32")
_FARTHEST = 7.0
"""No noise of a simulation is beyond this many standard deviations."""
_SMALLEST_BOUND = 2.0**-60
"""Of a clip norm: a clipped value below is no normal float32, and its rounding might exceed the bound."""


class CompiledRelease:
    """Does what `clip_and_noise` and then the codec do. FOR SIMULATION ONLY.

    :param dither_key: of the update's header.
    """

    def __init__(self, wire: WireSpec, dither_key: bytes) -> None:
        self._wire, self._dither_key = wire, dither_key
        self.sent: SentValues | None = None
        """The last update as it will be seen, if the values that were returned are those; then the codec is done."""

    def __call__(
        self,
        context: RoundContext,
        values: Array,
        bounds: Bounds | None,
        stds: Array,
        mechanism: GaussianMechanism,
        noise: NoiseSource,
    ) -> Array:
        """Returns the values as they will be seen, or the result of `clip_and_noise`."""
        mask = context.mask if context.mask.any() else None
        self.sent = None
        if isinstance(noise, NativeNoise) and self._covers(values, bounds, stds):
            self.sent = self._released(context, values, bounds, stds, noise, mask)
        if self.sent is None:
            return clip_and_noise(context, values, bounds, stds, mechanism, noise)
        if mask is None:
            return self.sent.values
        whole = np.zeros_like(values)
        whole[~mask] = self.sent.values
        return whole

    def _released(
        self,
        context: RoundContext,
        values: Array,
        bounds: Bounds | None,
        stds: Array,
        noise: NativeNoise,
        mask: Array | None,
    ) -> SentValues | None:
        found = released_rows(self._wire, context, values[None], bounds, stds, noise.stream, self._dither_key, mask)
        return None if found is None else found.of(0)

    def _covers(self, values: Array, bounds: Bounds | None, stds: Array) -> bool:
        return values.dtype == np.float32 and covers(self._wire, bounds, stds)


def covers(wire: WireSpec, bounds: Bounds | None, stds: Array) -> bool:
    """Returns whether the compiled pass gives the same as the steps: with noise, and values that cannot become too
    large, so that nothing is refused after it."""
    if wire.codec not in _CODECS or bounds is None:
        return False
    return _fit(wire, tuple(bounds.norms.tolist()), tuple(stds.tolist()))


def released_rows(
    wire: WireSpec,
    context: RoundContext,
    values: Array,
    bounds: Bounds | None,
    stds: Array,
    streams: np.ndarray,
    dither_keys: bytes,
    mask: Array | None,
) -> Released | None:
    """Releases the updates of clients with the same mask, bounds and noise, float32 `[n, d]`; None as `released`.

    :param mask: bool `[d]`, of what is not sent; None: all is.
    """
    left_out = 0 if mask is None else int(np.count_nonzero(mask))
    return released(
        values,
        context.layout,
        streams,
        mask=mask,
        bounds=None if bounds is None else bounds.norms,
        scales=bounds is not None and bounds.scales,
        stds=stds,
        steps=_steps(wire, tuple(stds.tolist())),
        dither_keys=dither_keys,
        stride=sample_stride(values.shape[-1] - left_out),
    )


@lru_cache(maxsize=256)
def _steps(wire: WireSpec, stds: tuple[float, ...]) -> tuple[float, ...]:
    return steps_for(wire, noise_stds=stds, layer_rms=())


@lru_cache(maxsize=256)
def _fit(wire: WireSpec, norms: tuple[float, ...], noise_stds: tuple[float, ...]) -> bool:
    """Returns whether no value can become too large; most devices have the same clip norms and noise."""
    bounds, stds = np.array(norms), np.array(noise_stds)
    if not (stds > 0).all() or not ((bounds > _SMALLEST_BOUND) & (bounds < MAX_MAGNITUDE)).all():
        return False
    largest, steps = bounds + _FARTHEST * stds, np.array(_steps(wire, noise_stds) or MAX_STEP)
    fits = (steps >= MIN_STEP) & (steps <= MAX_STEP) & (largest < (MAX_LEVEL - 1) * steps)
    return bool(fits.all() and (largest < MAX_MAGNITUDE).all())
