"""Applies the stages of a method to an update: it becomes what leaves the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
) -> NoisedUpdate:
    """Applies the stages to `update = trained - start`, one after the other.

    :param release: applies the last clipping and the noise together.
    """
    raw, layers = context.shared(update), len(context.layout.layers)
    unbounded, silent = np.full(layers, math.inf), np.zeros(layers)
    leaving, bounds = NoisedUpdate(raw, unbounded, silent, charge), None  # bounds: of a clipping that is still to do
    for stage, cost in zip(stages, costs(stages, context.setting)[1:], strict=True):
        if not isinstance(stage, Gaussian | NumberReport):
            leaving, bounds = replace(leaving, values=_clipped(context, leaving.values, bounds)), None
        match stage:
            case Transform():
                changed = context.shared(stage.change(context, leaving.values, noise))
                leaving = replace(leaving, values=changed, clip_norms=unbounded, noise_stds=silent, by_layer=False)
            case ClipWhole():
                leaving, bounds = _bounded(context, leaving), Bounds(np.array([context.setting.clip_norm]))
            case ScaleWhole():
                leaving, bounds = _bounded(context, leaving), Bounds(np.array([context.setting.clip_norm]), scales=True)
            case ClipLayers():
                bounds = Bounds(_layer_bounds(stage, context))
                leaving = replace(leaving, clip_norms=bounds.norms, by_layer=True)
            case OneStep():
                stds = np.full(layers, cost.bound * cost.noise_multiplier)
                values, norms = clip(leaving.values, cost.largest), np.full(layers, cost.largest)
                leaving = replace(leaving, values=values, clip_norms=norms, noise_stds=stds)
            case Gaussian() if cost.summed:  # the ring adds it
                stds = GaussianMechanism(cost.noise_multiplier).vector_stds(leaving.clip_norms)
                leaving = replace(leaving, noise_stds=stds)
            case Gaussian():
                mechanism = GaussianMechanism(cost.noise_multiplier, cost.noise_split)
                stds = (mechanism.layer_stds if leaving.by_layer else mechanism.vector_stds)(leaving.clip_norms)
                values, bounds = release(context, leaving.values, bounds, stds, mechanism, noise), None
                leaving = replace(leaving, values=values, noise_stds=stds)
            case NumberReport():
                leaving = _with_report(stage, context, leaving, raw, noise)
    return leaving if bounds is None else replace(leaving, values=_clipped(context, leaving.values, bounds))


def _clipped(context: RoundContext, values: Array, bounds: Bounds | None) -> Array:
    """Returns the values, clipped to `bounds` as in `clip_and_noise`."""
    if bounds is None:
        return values
    if len(bounds.norms) != 1:
        return clip_layers(values, context.layout, bounds.norms)
    return (scale if bounds.scales else clip)(values, bounds.norms[0])


def _bounded(context: RoundContext, leaving: NoisedUpdate) -> NoisedUpdate:
    """Returns the update with the round's clip norm C as the bound of its values as a whole."""
    bounds = np.full(len(context.layout.layers), context.setting.clip_norm)
    return replace(leaving, clip_norms=bounds, by_layer=False)


def _layer_bounds(stage: ClipLayers, context: RoundContext) -> Array:
    """Returns the layers' bounds. Raises `PrivacyError` for bounds above their declared norm."""
    layout = context.layout
    units = stage.bounds.bounds(stage.memory(context), context.global_params, layout)
    declared = stage.bounds.norm(layout)
    if not np.linalg.norm(units) <= declared * (1 + _TOLERANCE):
        raise PrivacyError(f"{type(stage.bounds).__name__} gives bounds above the norm {declared:g} that it names")
    return context.setting.clip_norm * units


def _with_report(
    stage: NumberReport, context: RoundContext, noised: NoisedUpdate, update: Array, noise: NoiseSource
) -> NoisedUpdate:
    """Measures and bounds the numbers and adds noise. Raises `PrivacyError` if they are not `count` numbers."""
    found = np.asarray(stage.measure(context, update), np.float64)
    if found.shape != (stage.count,):
        raise PrivacyError(f"a report of {stage.count} numbers has the shape {found.shape}")
    numbers = np.clip(np.nan_to_num(found, nan=-0.5, posinf=0.5), -0.5, 0.5)
    if multiplier := stage.noise_multiplier(context.setting):
        mechanism = GaussianMechanism(multiplier, context.setting.noise_split)
        numbers = mechanism.add_noise(numbers, mechanism.vector_stds([stage.bound])[0], noise)
    return replace(noised, report=(*noised.report, *map(float, numbers)))
