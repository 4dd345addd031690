"""The stages that an update passes before it leaves the device, and their privacy cost; `release` applies them.

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
from typing import TYPE_CHECKING, ClassVar

from hushfleet.array_api import Array, np
from hushfleet.errors import PrivacyError
from hushfleet.methods.cost import Cost, RoundSetting, remaining_multiplier
from hushfleet.params import ParamLayout

if TYPE_CHECKING:
    from hushfleet.methods.state import PrivateArrays, RoundContext
    from hushfleet.privacy.noise import NoiseSource


class Transform:
    """Any change of the update, such as a paper's step before clipping; the result has no bound and no noise."""

    shrinks: ClassVar[bool] = False  # whether no value becomes larger
    adds_noise: ClassVar[bool] = False  # no charge counts this noise

    def raw(self, setting: RoundSetting) -> tuple[str, ...]:
        """Returns names of what it reveals about the device's data that no noise covers."""
        return ()

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Changes the update, float32 `[d]`, into another array."""
        raise NotImplementedError(f"{type(self).__name__} has no change(context, update, noise)")

    def by_record(self) -> Transform | None:
        """Returns the transform that replaces it when the training is noised: then it sees only noised values."""
        return self

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Returns private arrays for the next round."""
        return {}


@dataclass(frozen=True)
class ClipWhole:
    """Clips the shared part as a whole to the round's clip norm C."""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to C."""
        return replace(cost, norm=1.0)


@dataclass(frozen=True)
class ScaleWhole:
    """Scales the shared part as a whole to the round's clip norm C, upwards too; zero stays zero."""

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Lowers the norm to C."""
        return replace(cost, norm=1.0)


@dataclass(frozen=True)
class OneStep:
    """Bounds one step on the sum of clipped gradients, for secure aggregation that protects records.

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
            raise PrivacyError("OneStep is for secure aggregation over records alone: nothing else adds its noise")
        from hushfleet.privacy.record import check_record_bound

        check_record_bound(setting.clip_norm * self.step)
        cost = replace(cost, norm=self.step, summed=True, records=self.records)
        return replace(cost, noise_multiplier=setting.noise_multiplier, noise_split=setting.noise_split)


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
        raise NotImplementedError(f"{type(self).__name__} has no bounds(memory, global_params, layout)")

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

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Lets the bounds remember the sent values, or the raw update with `raw`."""
        seen = context.shared(update) if self.raw else sent
        return self.bounds.remember(self.memory(context), seen, context.layout)

    def memory(self, context: RoundContext) -> PrivateArrays:
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

    def noise_multiplier(self, setting: RoundSetting) -> float:
        """Returns the noise multiplier of the numbers, of all devices that divide the noise; 0 without noise."""
        return 0.0 if self.multiplier is None or setting.noise_multiplier == 0 else self.multiplier(setting)

    def cost(self, setting: RoundSetting, cost: Cost) -> Cost:
        """Adds the report's multiplier to the cost, or names it among the raw values."""
        multiplier = self.noise_multiplier(setting)
        if multiplier == 0:
            return replace(cost, raw=(*cost.raw, self.what), report_limit=max(cost.report_limit, 0.5))
        limit = 0.5 + 8 * self.bound * (multiplier / math.sqrt(setting.noise_split))
        return replace(
            cost, reports=(*cost.reports, (multiplier, self.adds_up)), report_limit=max(cost.report_limit, limit)
        )


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
        report = 0.0 if self.beside is None else self.beside.noise_multiplier(setting)
        if report:
            sigma = remaining_multiplier(sigma, report)
        return replace(cost, noise_multiplier=sigma)


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
