"""Applies the stages of a method to an update: it becomes what leaves the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.array_api import Array
from hushfleet.errors import PrivacyError
from hushfleet.methods.cost import Cost
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


def privatized(
    stages: Sequence[Stage], context: RoundContext, update: Array, noise: NoiseSource, charge: Charge
) -> NoisedUpdate:
    """Applies the stages to `update = trained - start`, one after the other."""
    raw, layers = context.shared(update), len(context.layout.layers)
    unbounded, silent = np.full(layers, math.inf), np.zeros(layers)
    leaving = NoisedUpdate(raw, unbounded, silent, charge)
    for stage, cost in zip(stages, costs(stages, context.setting)[1:], strict=True):
        match stage:
            case Transform():
                changed = context.shared(stage.change(context, leaving.values, noise))
                leaving = replace(leaving, values=changed, clip_norms=unbounded, noise_stds=silent, by_layer=False)
            case ClipWhole():
                leaving = _bounded(context, leaving, clip)
            case ScaleWhole():
                leaving = _bounded(context, leaving, scale)
            case ClipLayers():
                leaving = _clipped_by_layer(stage, context, leaving)
            case OneStep():
                stds = np.full(layers, cost.bound * cost.noise_multiplier)
                values, bounds = clip(leaving.values, cost.largest), np.full(layers, cost.largest)
                leaving = replace(leaving, values=values, clip_norms=bounds, noise_stds=stds)
            case Gaussian():
                leaving = _noised(context, leaving, cost, noise)
            case NumberReport():
                leaving = _with_report(stage, context, leaving, raw, noise)
    return leaving


def _bounded(context: RoundContext, noised: NoisedUpdate, bound: Callable[[Array, float], Array]) -> NoisedUpdate:
    """Returns the update with its values as a whole brought to the round's clip norm C by `bound`."""
    clip_norm = context.setting.clip_norm
    bounds = np.full(len(context.layout.layers), clip_norm)
    return replace(noised, values=bound(noised.values, clip_norm), clip_norms=bounds, by_layer=False)


def _clipped_by_layer(stage: ClipLayers, context: RoundContext, noised: NoisedUpdate) -> NoisedUpdate:
    """Clips each layer. Raises `PrivacyError` for bounds above their declared norm."""
    layout = context.layout
    units = stage.bounds.bounds(stage.memory(context), context.global_params, layout)
    declared = stage.bounds.norm(layout)
    if not np.linalg.norm(units) <= declared * (1 + _TOLERANCE):
        raise PrivacyError(f"{type(stage.bounds).__name__} gives bounds above the norm {declared:g} that it names")
    bounds = context.setting.clip_norm * units
    return replace(noised, values=clip_layers(noised.values, layout, bounds), clip_norms=bounds, by_layer=True)


def _noised(context: RoundContext, noised: NoisedUpdate, cost: Cost, noise: NoiseSource) -> NoisedUpdate:
    """Adds the noise to the shared values; with secure aggregation it only declares its standard deviation."""
    if cost.summed:  # the ring adds it
        return replace(noised, noise_stds=GaussianMechanism(cost.noise_multiplier).vector_stds(noised.clip_norms))
    mechanism = GaussianMechanism(cost.noise_multiplier, cost.noise_split)
    stds = (mechanism.layer_stds if noised.by_layer else mechanism.vector_stds)(noised.clip_norms)
    values = mechanism.add_noise(noised.values, stds, noise, where=~context.mask, layout=context.layout)
    return replace(noised, values=values, noise_stds=stds)


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
