"""Applies the stages of a method to an update: it becomes what leaves the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hushfleet.array_api import Array
from hushfleet.errors import PrivacyError
from hushfleet.methods.stages import (
    ClipLayers,
    ClipWhole,
    Gaussian,
    NumberReport,
    OneStep,
    ScaleWhole,
    Stage,
    Transform,
    costs,
)
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.clipping import clip, clip_layers, scale
from hushfleet.privacy.mechanism import GaussianMechanism

if TYPE_CHECKING:
    from hushfleet.methods.cost import Cost
    from hushfleet.methods.state import RoundContext
    from hushfleet.privacy.noise import NoiseSource

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class NoisedUpdate:
    """A clipped and noised update, before the codec.

    :param values: `[d]`, zero where the parameter is personal.
    :param clip_norms: float64 `[L]`, the bound to which each layer's noise was scaled.
    :param noise_stds: float64 `[L]`, standard deviation of the noise per coordinate; 0 if the noise was added during
        training. With secure aggregation it is the standard deviation of the sum of the honest devices' parts, and the
        values have no noise yet: it is added in the ring (`hushfleet.privacy.ring`).
    :param charge: the charge that the ledger must record before the values and the report leave.
    :param report: a few numbers for the server's half beside the update, covered by the charge.
    :param by_layer: whether layers were clipped one by one.
    """

    values: Array
    clip_norms: Array
    noise_stds: Array
    charge: Charge
    report: tuple[float, ...] = ()
    by_layer: bool = False


class Bounds(NamedTuple):
    """The bounds of a clipping.

    :param norms: clip norms, float64 `[1]` of the whole vector or `[L]` of its layers.
    :param scales: whether the whole vector is scaled to its clip norm also if it is shorter.
    """

    norms: Array
    scales: bool = False


Release = Callable[
    ["RoundContext", Array, "Bounds | None", Array, GaussianMechanism, "NoiseSource"],
    Array,
]
"""`clip_and_noise`, or what a simulation does in its place."""


def clip_and_noise(
    context: RoundContext,
    values: Array,
    bounds: Bounds | None,
    stds: Array,
    mechanism: GaussianMechanism,
    noise: NoiseSource,
) -> Array:
    """Returns the clipped values with noise, `[d]`, zero where the parameter is personal.

    :param values: `[d]`, zero where the parameter is personal.
    :param bounds: None: the values have a bound.
    :param stds: of the noise, float64 `[L]`.
    """
    values = _clipped(context, values, bounds)
    return mechanism.add_noise(values, stds, noise, where=~context.mask, layout=context.layout)


def privatized(
    stages: Sequence[Stage],
    context: RoundContext,
    update: Array,
    noise: NoiseSource,
    charge: Charge,
    release: Release = clip_and_noise,
    priced: Sequence[Cost] = (),
) -> NoisedUpdate:
    """Applies the stages to `update = trained - start`, one after the other.

    :param release: applies the last clipping and the noise together.
    :param priced: what `costs` gives for the stages, if it is known.
    """
    values = raw = context.shared(update)
    layers, clip_norm = len(context.layout.layers), context.setting.clip_norm
    norms = unbounded = np.full(layers, math.inf)
    stds, by_layer, report = np.zeros(layers), False, tuple[float, ...]()
    bounds = None  # of a clipping that is still to do
    for stage, cost in zip(stages, (priced or costs(stages, context.setting))[1:], strict=True):
        if not isinstance(stage, Gaussian | NumberReport):
            values, bounds = _clipped(context, values, bounds), None
        match stage:
            case Transform():
                values = context.shared(stage.change(context, values, noise))
                norms, stds, by_layer = unbounded, np.zeros(layers), False
            case ClipWhole() | ScaleWhole():
                bounds = Bounds(np.array([clip_norm]), scales=isinstance(stage, ScaleWhole))
                norms, by_layer = np.full(layers, clip_norm), False
            case ClipLayers():
                norms, by_layer = _layer_bounds(stage, context), True
                bounds = Bounds(norms)
            case OneStep():
                stds = np.full(layers, cost.bound * cost.noise_multiplier)
                values, norms = clip(values, cost.largest), np.full(layers, cost.largest)
            case Gaussian() if cost.summed:  # the ring adds it
                stds = GaussianMechanism(cost.noise_multiplier).vector_stds(norms)
            case Gaussian():
                mechanism, stds = _mechanism(cost.noise_multiplier, cost.noise_split, by_layer, tuple(norms.tolist()))
                values, bounds = release(context, values, bounds, stds, mechanism, noise), None
            case NumberReport():
                report += _report(stage, context, raw, noise)
    return NoisedUpdate(_clipped(context, values, bounds), norms, stds, charge, report, by_layer)


@lru_cache(maxsize=64)  # most devices of a round have the same
def _mechanism(
    noise_multiplier: float, noise_split: int, by_layer: bool, norms: tuple[float, ...]
) -> tuple[GaussianMechanism, Array]:
    """Returns the mechanism, and the standard deviations of its noise, read-only."""
    mechanism = GaussianMechanism(noise_multiplier, noise_split)
    stds = (mechanism.layer_stds if by_layer else mechanism.vector_stds)(norms)
    stds.setflags(write=False)
    return mechanism, stds


def _clipped(context: RoundContext, values: Array, bounds: Bounds | None) -> Array:
    """Returns the values, clipped to `bounds` as in `clip_and_noise`."""
    if bounds is None:
        return values
    if len(bounds.norms) != 1:
        return clip_layers(values, context.layout, bounds.norms)
    return (scale if bounds.scales else clip)(values, bounds.norms[0])


def _layer_bounds(stage: ClipLayers, context: RoundContext) -> Array:
    """Returns the layers' bounds. Raises `PrivacyError` for bounds above their declared norm."""
    layout = context.layout
    units = stage.bounds.bounds(stage.memory(context), context.global_params, layout)
    declared = stage.bounds.norm(layout)
    if not np.linalg.norm(units) <= declared * (1 + _TOLERANCE):
        raise PrivacyError(f"{type(stage.bounds).__name__} gives bounds above the norm {declared:g} that it names")
    return context.setting.clip_norm * units


def _report(stage: NumberReport, context: RoundContext, update: Array, noise: NoiseSource) -> tuple[float, ...]:
    """Measures and bounds the numbers and adds noise. Raises `PrivacyError` if they are not `count` numbers."""
    found = np.asarray(stage.measure(context, update), np.float64)
    if found.shape != (stage.count,):
        raise PrivacyError(f"a report of {stage.count} numbers has the shape {found.shape}")
    numbers = np.clip(np.nan_to_num(found, nan=-0.5, posinf=0.5), -0.5, 0.5)
    if multiplier := stage.noise_multiplier(context.setting):
        mechanism = GaussianMechanism(multiplier, context.setting.noise_split)
        numbers = mechanism.add_noise(numbers, mechanism.vector_stds([stage.bound])[0], noise)
    return tuple(map(float, numbers))
