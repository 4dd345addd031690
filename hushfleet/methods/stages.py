"""The stages that an update passes before it leaves the device, and their cost.

Accounting is a fold over the list: each stage says what it does to a `Cost`, and `TaskMethod.charge` is what comes out.
The ledger, the owner's limits, the aggregator's check of headers, the audit and the forecast all use this one number.

A method cannot be charged less than its list costs:

- Noise is always (bound x multiplier), in `Gaussian` alone, for the bound that the stage before it enforced.
- The stages that lower a cost are `ClipWhole`, `ScaleWhole`, `OneStep`, `ClipLayers`, `Gaussian` and `NumberReport`,
  and no class derived from them. Whatever else is in a list is a `Transform`: after it the update has no bound and no
  noise.
- What chooses the bounds of layers (`LayerBounds`) sees the global model and what was sent before, never the update.
  `ClipLayers` checks that the bounds are within the norm that they declare.
- The functions of a `NumberReport` may give any numbers: they are bounded here before they are noised.

Without a finite bound, noise protects nothing, and raw values have no finite price: both are charged as infinite.
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
class Release:
    """A clipped and noised update, before the codec.

    :param values: `[d]`, zero where the parameter is personal.
    :param clip_norms: float64 `[L]`, the bound that each layer's noise was scaled to.
    :param noise_stds: float64 `[L]`, standard deviation of the noise per coordinate; 0 where the noise was added
        during training. With secure sums it is that of the sum of the honest devices' parts, and the values have none
        yet: it is added in the ring (`hushfleet.privacy.ring`).
    :param charge: what the ledger must record before the values and the report leave.
    :param report: a few numbers for the server's half beside the update, within the charge.
    :param by_layer: whether layers were clipped one by one.
    """

    values: Array
    clip_norms: Array
    noise_stds: Array
    charge: Charge
    report: tuple[float, ...] = ()
    by_layer: bool = False


class Transform:
    """Changes the update, as it likes: a paper's own step before clipping. After it nothing is bounded or noised."""

    shrinks: ClassVar[bool] = False  # whether no value of the result is larger than it was
    adds_noise: ClassVar[bool] = False  # which no charge counts

    def raw(self, setting: RoundSetting) -> tuple[str, ...]:
        """Names what it tells of the device's data that no noise could cover."""
        return ()

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Changes the update, float32 `[d]`, into another array."""
        raise NotImplementedError

    def by_record(self) -> Transform | None:
        """The transform that replaces it when the training is noised: then it sees noised values only."""
        return self

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Private arrays for the next round."""
        return {}


@dataclass(frozen=True)
class KeepLargest(Transform):
    """Zeroes all but the largest shared entries, by magnitude, of each vector; ties go to the lower index.

    Which entries are zero depends on the data: noise goes on them too.

    :param share: how many stay, `ceil(share x n)` of n; in (0, 1].
    """

    share: float
    shrinks = True

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Returns the update, `[d]`, with the other entries 0."""
        magnitude = np.where(context.mask, -1.0, np.abs(update))
        magnitude[np.isnan(magnitude)] = np.inf  # it stays, so that the clipping sees that the training has diverged
        stays = largest(magnitude, kept_count(self.share, int(np.count_nonzero(~context.mask))))
        return np.where(stays, update, np.zeros_like(update))


@dataclass(frozen=True)
class ClipWhole:
    """Clips the shared part as a whole to the round's clip norm C."""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to C."""
        return replace(cost, norm=1.0)

    def apply(self, context: RoundContext, release: Release) -> Release:
        """Clips the values to C."""
        return _bounded(context, release, clip)


@dataclass(frozen=True)
class ScaleWhole:
    """Scales the shared part as a whole to the round's clip norm C, upwards too; zero stays zero."""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to C."""
        return replace(cost, norm=1.0)

    def apply(self, context: RoundContext, release: Release) -> Release:
        """Scales the values to the norm C."""
        return _bounded(context, release, scale)


def _bounded(context: RoundContext, release: Release, bound: Callable[[Array, float], Array]) -> Release:
    """The values as a whole brought to the round's clip norm C."""
    clip_norm = context.setting.clip_norm
    bounds = np.full(len(context.layout.layers), clip_norm)
    return replace(release, values=bound(release.values, clip_norm), clip_norms=bounds, by_layer=False)


@dataclass(frozen=True)
class OneStep:
    """Bounds one step on the sum of clipped gradients, for a secure sum that protects records.

    The noise is that of the sum, and its multiplier is against what one record moves: `step` times the clip norm. The
    whole is clipped to what `records` of them come to, which moves no two updates apart.

    :param step: what a gradient is multiplied by.

    Raises `PrivacyError` elsewhere than in such a sum, since nothing else adds the noise that is charged here, and as
    `check_record_bound` does.
    """

    step: float
    records: int

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Sets the norm to the step, and the noise to that of the sum."""
        if setting.privacy.unit != "record" or setting.privacy.secure is None:
            raise PrivacyError("OneStep is for a secure sum over records alone: nothing else adds its noise")
        check_record_bound(setting.clip_norm * self.step)
        cost = replace(cost, norm=self.step, summed=True, records=self.records)
        return replace(cost, noise_multiplier=setting.noise_multiplier, noise_split=setting.noise_split)

    def apply(self, context: RoundContext, release: Release) -> Release:
        """Clips the values to what all records move together, and declares the noise of the sum."""
        cost = self.cost(context.setting, Cost(context.setting.clip_norm))
        bounds = np.full(len(context.layout.layers), cost.largest)
        stds = np.full(len(bounds), cost.bound * cost.noise_multiplier)
        values = clip(release.values, cost.largest)
        return replace(release, values=values, clip_norms=bounds, noise_stds=stds)


class LayerBounds:
    """The bounds of the layers, in units of C. They depend on public values: the global model, and their own memory.

    The memory follows values as they were sent, unless `ClipLayers` says that it follows raw updates.
    """

    def norm(self, layout: ParamLayout) -> float:
        """The largest norm of all bounds together."""
        return 1.0

    def initial(self, layout: ParamLayout) -> PrivateArrays:
        """The memory of a device that has not trained."""
        return {}

    def bounds(self, memory: PrivateArrays, global_params: Array, layout: ParamLayout) -> Array:
        """float64 `[L]`."""
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
    """Clips each layer of the shared part to a bound of its own.

    :param raw: if the bounds follow raw updates in place of what was sent: that, in words. They are in the header.
    """

    bounds: LayerBounds
    raw: str = ""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to that of all bounds together; adds raw values that steer them."""
        raw = (*cost.raw, self.raw) if self.raw and math.isfinite(setting.clip_norm) else cost.raw
        return replace(cost, norm=self.bounds.norm(setting.layout), raw=raw)

    def apply(self, context: RoundContext, release: Release) -> Release:
        """Clips each layer. Raises `PrivacyError` for bounds above the norm that they declare."""
        layout = context.layout
        units = self.bounds.bounds(self._memory(context), context.global_params, layout)
        declared = self.bounds.norm(layout)
        if not np.linalg.norm(units) <= declared * (1 + _TOLERANCE):
            raise PrivacyError(f"{type(self.bounds).__name__} gives bounds above the norm {declared:g} that it names")
        bounds = context.setting.clip_norm * units
        return replace(release, values=clip_layers(release.values, layout, bounds), clip_norms=bounds, by_layer=True)

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Lets the bounds remember the values as sent, or the raw update with `raw`."""
        seen = context.shared(update) if self.raw else sent
        return self.bounds.remember(self._memory(context), seen, context.layout)

    def _memory(self, context: RoundContext) -> PrivateArrays:
        """The arrays that the bounds themselves keep, without those of other parts."""
        return {name: context.state.private[name] for name in self.bounds.initial(context.layout)}


@dataclass(frozen=True)
class NumberReport:
    """A few numbers beside the update for the server's half, each held within 1/2 of 0.

    :param count: how many.
    :param what: what they are, in words; in the clear they are raw values.
    :param measure: gives them, from the context and the shared part of the raw update.
    :param multiplier: of their noise, against their own bound; None sends them in the clear.
    :param adds_up: whether all that the server does with them is to add them up.
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
        """None where the numbers leave in the clear."""
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

    def apply(self, context: RoundContext, release: Release, update: Array, noise: NoiseSource) -> Release:
        """Measures, bounds and noises the numbers. Raises `PrivacyError` for another number of them."""
        found = np.asarray(self.measure(context, update), np.float64)
        if found.shape != (self.count,):
            raise PrivacyError(f"a report of {self.count} numbers has the shape {found.shape}")
        numbers = np.clip(np.nan_to_num(found, nan=-0.5, posinf=0.5), -0.5, 0.5)
        mechanism = self.mechanism(context.setting)
        if mechanism is not None:
            numbers = mechanism.add_noise(numbers, mechanism.vector_stds([self.bound])[0], noise)
        return replace(release, report=(*release.report, *map(float, numbers)))


@dataclass(frozen=True)
class Gaussian:
    """Adds noise for the bounds of the clipping before it: layer by layer if layers were clipped one by one.

    :param scaled_to_clip_norm: as if C were the bound, however large the layers' bounds are together (DP-FedSim).
    :param beside: a report that has its part of the round's noise multiplier; the values have what is left.
    :param max_preference: devices may choose their own noise multiplier, up to so many times the round's.
    """

    scaled_to_clip_norm: bool = False
    beside: NumberReport | None = None
    max_preference: float | None = None

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Sets the noise multiplier of the values; 0 where they have no bound."""
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

    def apply(self, context: RoundContext, release: Release, cost: Cost, noise: NoiseSource) -> Release:
        """Adds the noise to the shared values; with a secure sum it only declares its standard deviation."""
        if cost.summed:  # the ring adds it
            stds = GaussianMechanism(cost.noise_multiplier).vector_stds(release.clip_norms)
            return replace(release, noise_stds=stds)
        mechanism = GaussianMechanism(cost.noise_multiplier, cost.noise_split)
        stds = (mechanism.layer_stds if release.by_layer else mechanism.vector_stds)(release.clip_norms)
        values = mechanism.add_noise(release.values, stds, noise, where=~context.mask, layout=context.layout)
        return replace(release, values=values, noise_stds=stds)


Stage = Transform | ClipWhole | ScaleWhole | OneStep | ClipLayers | Gaussian | NumberReport
# The classes that may lower a cost; no class derived from them.
_PRICED = (ClipWhole, ScaleWhole, OneStep, ClipLayers, Gaussian, NumberReport)


def check_stages(stages: Sequence[Stage]) -> None:
    """Raises `PrivacyError` for what is no stage, and for noise that is not the last thing done to the values."""
    for stage in stages:
        if type(stage) not in _PRICED and not isinstance(stage, Transform):
            raise PrivacyError(f"{type(stage).__name__} is no stage: derive it from Transform, or take one as it is")
    of_values = [stage for stage in stages if not isinstance(stage, NumberReport)]
    if any(isinstance(stage, Gaussian) for stage in of_values[:-1]):
        raise PrivacyError("Gaussian is the last thing that is done to the values, and is done once")


def costs(stages: Sequence[Stage], setting: RoundSetting) -> list[Cost]:
    """The cost after each stage; the first is that of an update as it is, which is not bounded."""
    folded = [Cost(setting.clip_norm)]
    for stage in stages:
        cost = folded[-1]
        if isinstance(stage, Transform):
            folded.append(replace(cost, norm=math.inf, noise_multiplier=0.0, raw=(*cost.raw, *stage.raw(setting))))
        else:
            folded.append(stage.cost(setting, cost))
    return folded


def released(
    stages: Sequence[Stage], context: RoundContext, update: Array, noise: NoiseSource, charge: Charge
) -> Release:
    """Applies the stages to `update = trained - start`, one after the other."""
    raw, layers = context.shared(update), len(context.layout.layers)
    unbounded, silent = np.full(layers, math.inf), np.zeros(layers)
    leaving = Release(raw, unbounded, silent, charge)
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
