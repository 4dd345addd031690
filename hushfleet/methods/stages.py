"""The stages that an update passes before it leaves the device, and their privacy cost.

Accounting is a fold over the list: each stage changes a `Cost`, and `TaskMethod.charge` is the result.
The ledger, the owner's limits, the aggregator's check of headers, the audit and the forecast all use this one number.

A method cannot be charged less than its list costs:

- Noise is always (bound x multiplier), in `Gaussian` only, for the bound that the stage before it enforced.
- The stages that may lower a cost are `ClipWhole`, `ScaleWhole`, `OneStep`, `ClipLayers`, `Gaussian` and
  `NumberReport`, but no class derived from them. Anything else in a list is a `Transform`: after it the update counts
  as having no bound and no noise.
- The code that chooses the bounds of layers (`LayerBounds`) sees the global model and earlier sent values, never the
  update. `ClipLayers` checks that the bounds are within the norm that they declare.
- The functions of a `NumberReport` may return any numbers: they are bounded here before noise is added.

Noise without a finite bound protects nothing, and raw values have no finite cost: both are charged as infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from hushfleet.array_api import Array
from hushfleet.errors import PrivacyError
from hushfleet.methods.cost import Cost, remaining_multiplier
from hushfleet.methods.state import PrivateArrays, RoundContext, RoundSetting, kept_count, largest
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import clip, clip_layers, scale
from hushfleet.privacy.mechanism import Charge, GaussianMechanism
from hushfleet.privacy.noise import NoiseSource
from hushfleet.privacy.record import check_record_bound

_TOLERANCE = 1e-6


@dataclass(frozen=True)
class NoisedUpdate:
    """A clipped and noised update, before the codec.

    :param values: `[d]`, zero where the parameter is personal.
    :param clip_norms: float64 `[L]`, the bound to which each layer's noise was scaled.
    :param noise_stds: float64 `[L]`, standard deviation of the noise per coordinate; 0 if the noise was added during
        training. With secure sums it is the standard deviation of the sum of the honest devices' parts, and the values
        have no noise yet: it is added in the ring (`hushfleet.privacy.ring`).
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


class Transform:
    """Any change of the update, such as a paper's step before clipping; the result has no bound and no noise."""

    shrinks: ClassVar[bool] = False  # whether no value becomes larger
    adds_noise: ClassVar[bool] = False  # no charge counts this noise

    def raw(self, setting: RoundSetting) -> tuple[str, ...]:
        """Returns names of what it reveals about the device's data that no noise covers."""
        return ()

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Changes the update, float32 `[d]`, into another array."""
        raise NotImplementedError

    def by_record(self) -> Transform | None:
        """Returns the transform that replaces it when the training is noised: then it sees only noised values."""
        return self

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Returns private arrays for the next round."""
        return {}


@dataclass(frozen=True)
class KeepLargest(Transform):
    """Zeroes all shared entries except the largest, by magnitude, of each vector; ties go to the lower index.

    The choice of entries depends on the data, so the zeroed entries get noise, too.

    :param share: share of the entries that stay, `ceil(share x n)` of n; in (0, 1].
    """

    share: float
    shrinks = True

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Returns the update, `[d]`, with the other entries 0."""
        magnitude = np.where(context.mask, -1.0, np.abs(update))
        magnitude[np.isnan(magnitude)] = np.inf  # NaN stays, so that clipping detects diverged training
        stays = largest(magnitude, kept_count(self.share, int(np.count_nonzero(~context.mask))))
        return np.where(stays, update, np.zeros_like(update))


@dataclass(frozen=True)
class ClipWhole:
    """Clips the shared part as a whole to the round's clip norm C."""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to C."""
        return replace(cost, norm=1.0)

    def apply(self, context: RoundContext, noised: NoisedUpdate) -> NoisedUpdate:
        """Clips the values to C."""
        return _bounded(context, noised, clip)


@dataclass(frozen=True)
class ScaleWhole:
    """Scales the shared part as a whole to the round's clip norm C, upwards too; zero stays zero."""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to C."""
        return replace(cost, norm=1.0)

    def apply(self, context: RoundContext, noised: NoisedUpdate) -> NoisedUpdate:
        """Scales the values to the norm C."""
        return _bounded(context, noised, scale)


def _bounded(context: RoundContext, noised: NoisedUpdate, bound: Callable[[Array, float], Array]) -> NoisedUpdate:
    """Returns the update with its values as a whole brought to the round's clip norm C by `bound`."""
    clip_norm = context.setting.clip_norm
    bounds = np.full(len(context.layout.layers), clip_norm)
    return replace(noised, values=bound(noised.values, clip_norm), clip_norms=bounds, by_layer=False)


@dataclass(frozen=True)
class OneStep:
    """Bounds one step on the sum of clipped gradients, for a secure sum that protects records.

    The noise is the noise of the sum. Its multiplier is relative to the change by one record: `step` times the clip
    norm. The whole update is clipped to the bound of `records` records, which does not enlarge any difference of two
    updates.

    :param step: the factor of a gradient.

    Raises `PrivacyError` outside such a sum, because nothing else adds the noise that is charged here, and as
    `check_record_bound` does.
    """

    step: float
    records: int

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Sets the norm to the step, and the noise to the noise of the sum."""
        if setting.privacy.unit != "record" or setting.privacy.secure is None:
            raise PrivacyError("OneStep is for a secure sum over records alone: nothing else adds its noise")
        check_record_bound(setting.clip_norm * self.step)
        cost = replace(cost, norm=self.step, summed=True, records=self.records)
        return replace(cost, noise_multiplier=setting.noise_multiplier, noise_split=setting.noise_split)

    def apply(self, context: RoundContext, noised: NoisedUpdate) -> NoisedUpdate:
        """Clips the values to the bound of all records together, and declares the noise of the sum."""
        cost = self.cost(context.setting, Cost(context.setting.clip_norm))
        bounds = np.full(len(context.layout.layers), cost.largest)
        stds = np.full(len(bounds), cost.bound * cost.noise_multiplier)
        values = clip(noised.values, cost.largest)
        return replace(noised, values=values, clip_norms=bounds, noise_stds=stds)


class LayerBounds:
    """The bounds of the layers, in units of C. They depend on public values: the global model, and their own memory.

    The memory follows the sent values, unless `ClipLayers` declares that it follows raw updates.
    """

    def norm(self, layout: ParamLayout) -> float:
        """Returns the largest norm of all bounds together."""
        return 1.0

    def initial(self, layout: ParamLayout) -> PrivateArrays:
        """Returns the memory of a device that has not trained."""
        return {}

    def bounds(self, memory: PrivateArrays, global_params: Array, layout: ParamLayout) -> Array:
        """Returns the bounds, float64 `[L]`."""
        raise NotImplementedError

    def remember(self, memory: PrivateArrays, seen: Array, layout: ParamLayout) -> PrivateArrays:
        """:param seen: `[d]`, the values as they were sent."""
        return {}


@dataclass(frozen=True)
class EvenBounds(LayerBounds):
    """The same bound for each layer.

    :param size: in units of C.
    """

    size: float = 1.0

    def norm(self, layout: ParamLayout) -> float:
        return self.size * math.sqrt(len(layout.layers))

    def bounds(self, memory: PrivateArrays, global_params: Array, layout: ParamLayout) -> Array:
        return np.full(len(layout.layers), self.size)


@dataclass(frozen=True)
class ClipLayers:
    """Clips each layer of the shared part to its own bound.

    :param raw: if the bounds follow raw updates instead of sent values: a description of this. They are in the header.
    """

    bounds: LayerBounds
    raw: str = ""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to the norm of all bounds together; adds raw values that influence them."""
        raw = (*cost.raw, self.raw) if self.raw and math.isfinite(setting.clip_norm) else cost.raw
        return replace(cost, norm=self.bounds.norm(setting.layout), raw=raw)

    def apply(self, context: RoundContext, noised: NoisedUpdate) -> NoisedUpdate:
        """Clips each layer. Raises `PrivacyError` for bounds above their declared norm."""
        layout = context.layout
        units = self.bounds.bounds(self._memory(context), context.global_params, layout)
        declared = self.bounds.norm(layout)
        if not np.linalg.norm(units) <= declared * (1 + _TOLERANCE):
            raise PrivacyError(f"{type(self.bounds).__name__} gives bounds above the norm {declared:g} that it names")
        bounds = context.setting.clip_norm * units
        return replace(noised, values=clip_layers(noised.values, layout, bounds), clip_norms=bounds, by_layer=True)

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Lets the bounds remember the sent values, or the raw update with `raw`."""
        seen = context.shared(update) if self.raw else sent
        return self.bounds.remember(self._memory(context), seen, context.layout)

    def _memory(self, context: RoundContext) -> PrivateArrays:
        """Returns the arrays that the bounds keep, without the arrays of other parts."""
        return {name: context.state.private[name] for name in self.bounds.initial(context.layout)}


@dataclass(frozen=True)
class NumberReport:
    """A few numbers beside the update for the server's half, each clipped to [-1/2, 1/2].

    :param count: how many numbers.
    :param what: what they are, in words; without noise they are raw values.
    :param measure: computes them from the context and the shared part of the raw update.
    :param multiplier: of their noise, relative to their own bound; None sends them without noise.
    :param adds_up: whether the server does nothing but add them up.
    :param evaluates: whether `measure` reads `RoundContext.measured`.
    """

    count: int
    what: str
    measure: Callable[[RoundContext, Array], Sequence[float]]
    multiplier: Callable[[RoundSetting], float] | None = None
    adds_up: bool = False
    evaluates: bool = False

    @property
    def bound(self) -> float:
        return math.sqrt(self.count / 4)

    def mechanism(self, setting: RoundSetting) -> GaussianMechanism | None:
        """Returns the mechanism of the numbers; None if they leave without noise."""
        if self.multiplier is None or setting.noise_multiplier == 0:
            return None
        return GaussianMechanism(self.multiplier(setting), setting.noise_split)

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Adds the report's multiplier to the cost, or names it among the raw values."""
        mechanism = self.mechanism(setting)
        if mechanism is None:
            return replace(cost, raw=(*cost.raw, self.what), report_limit=max(cost.report_limit, 0.5))
        limit = 0.5 + 8 * float(mechanism.vector_stds([self.bound])[0])
        reports = (*cost.reports, (mechanism.noise_multiplier, self.adds_up))
        return replace(cost, reports=reports, report_limit=max(cost.report_limit, limit))

    def apply(self, context: RoundContext, noised: NoisedUpdate, update: Array, noise: NoiseSource) -> NoisedUpdate:
        """Measures and bounds the numbers and adds noise. Raises `PrivacyError` if they are not `count` numbers."""
        found = np.asarray(self.measure(context, update), np.float64)
        if found.shape != (self.count,):
            raise PrivacyError(f"a report of {self.count} numbers has the shape {found.shape}")
        numbers = np.clip(np.nan_to_num(found, nan=-0.5, posinf=0.5), -0.5, 0.5)
        mechanism = self.mechanism(context.setting)
        if mechanism is not None:
            numbers = mechanism.add_noise(numbers, mechanism.vector_stds([self.bound])[0], noise)
        return replace(noised, report=(*noised.report, *map(float, numbers)))


@dataclass(frozen=True)
class Gaussian:
    """Adds noise for the bounds of the clipping before it: layer by layer if layers were clipped one by one.

    :param scaled_to_clip_norm: scales the noise to C even if the layers' bounds together are larger (DP-FedSim).
    :param beside: a report that uses a part of the charge for the round's noise multiplier; the values use the rest.
    :param max_preference: devices may choose their own noise multiplier, up to this many times the round's.
    """

    scaled_to_clip_norm: bool = False
    beside: NumberReport | None = None
    max_preference: float | None = None

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Sets the noise multiplier of the values; 0 if they have no bound."""
        summed = setting.privacy.secure is not None
        cost = replace(cost, noise_multiplier=0.0, noise_split=setting.noise_split, summed=summed)
        if not math.isfinite(cost.bound):
            return cost
        sigma = setting.preferred_multiplier(self.max_preference)
        if self.scaled_to_clip_norm:
            sigma /= cost.norm
        report = None if self.beside is None else self.beside.mechanism(setting)
        if report is not None:
            sigma = remaining_multiplier(sigma, report.noise_multiplier)
        return replace(cost, noise_multiplier=sigma)

    def apply(self, context: RoundContext, noised: NoisedUpdate, cost: Cost, noise: NoiseSource) -> NoisedUpdate:
        """Adds the noise to the shared values; with a secure sum it only declares its standard deviation."""
        if cost.summed:  # the ring adds it
            stds = GaussianMechanism(cost.noise_multiplier).vector_stds(noised.clip_norms)
            return replace(noised, noise_stds=stds)
        mechanism = GaussianMechanism(cost.noise_multiplier, cost.noise_split)
        stds = (mechanism.layer_stds if noised.by_layer else mechanism.vector_stds)(noised.clip_norms)
        values = mechanism.add_noise(noised.values, stds, noise, where=~context.mask, layout=context.layout)
        return replace(noised, values=values, noise_stds=stds)


Stage = Transform | ClipWhole | ScaleWhole | OneStep | ClipLayers | Gaussian | NumberReport
# The classes that may lower a cost, without derived classes.
_PRICED = (ClipWhole, ScaleWhole, OneStep, ClipLayers, Gaussian, NumberReport)


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises `PrivacyError` for an object that is no stage, and for noise that is not the last change of the values."""
    for stage in stages:
        if type(stage) not in _PRICED and not isinstance(stage, Transform):
            raise PrivacyError(f"{type(stage).__name__} is no stage: derive it from Transform, or take one as it is")
    of_values = [stage for stage in stages if not isinstance(stage, NumberReport)]
    if any(isinstance(stage, Gaussian) for stage in of_values[:-1]):
        raise PrivacyError("Gaussian is the last thing that is done to the values, and is done once")


def costs(stages: Sequence[Stage], setting: RoundSetting) -> list[Cost]:
    """Returns the cost after each stage; the first is the cost of the raw update, which is not bounded."""
    folded = [Cost(setting.clip_norm)]
    for stage in stages:
        cost = folded[-1]
        if isinstance(stage, Transform):
            folded.append(replace(cost, norm=math.inf, noise_multiplier=0.0, raw=(*cost.raw, *stage.raw(setting))))
        else:
            folded.append(stage.cost(setting, cost))
    return folded


def privatized(
    stages: Sequence[Stage], context: RoundContext, update: Array, noise: NoiseSource, charge: Charge
) -> NoisedUpdate:
    """Applies the stages to `update = trained - start`, one after the other."""
    raw, layers = context.shared(update), len(context.layout.layers)
    unbounded, silent = np.full(layers, math.inf), np.zeros(layers)
    leaving = NoisedUpdate(raw, unbounded, silent, charge)
    for stage, cost in zip(stages, costs(stages, context.setting)[1:], strict=True):
        if isinstance(stage, Transform):
            changed = context.shared(stage.change(context, leaving.values, noise))
            leaving = replace(leaving, values=changed, clip_norms=unbounded, noise_stds=silent, by_layer=False)
        elif isinstance(stage, Gaussian):
            leaving = stage.apply(context, leaving, cost, noise)
        elif isinstance(stage, NumberReport):
            leaving = stage.apply(context, leaving, raw, noise)
        else:
            leaving = stage.apply(context, leaving)
    return leaving
