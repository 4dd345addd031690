"""Local training: the gradient of a step, penalties, the order of parts, and a teacher."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hushfleet import array_api
from hushfleet.array_api import Array, blocks
from hushfleet.errors import BadInput
from hushfleet.objectives import CROSS_ENTROPY, Objective

if TYPE_CHECKING:
    from hushfleet.data.samples import LabelledSamples
    from hushfleet.learning.batch import Batch
    from hushfleet.learning.own_samples import OwnSamples, Teacher
    from hushfleet.methods.state import PrivateArrays, RoundContext


@dataclass(frozen=True)
class GradientRule:
    """The base class of rules for the gradient of a step; the base itself uses the batch's mean gradient.

    :param record_bound: with the unit `record`, an upper limit for the clip norm of a record, besides the task's.
    :param subset: with the unit `record`, number of records that are clipped together, by their mean gradient.
    """

    record_bound: float = math.inf
    subset: int = 1

    samples: ClassVar[bool] = False  # whether it uses each sample's gradient

    @property
    def lasting(self) -> tuple[str, ...]:
        """The names of the arrays that it keeps from round to round, in the device's private arrays."""
        return ()

    @property
    def gradients(self) -> int:
        """The largest number of gradients of a batch; with the unit `record` they are charged together."""
        return 1

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: PrivateArrays
    ) -> tuple[Any, Array, PrivateArrays]:
        """Returns the mean loss `[...]`, the gradient `[..., d]` of the step, and the memory for the next batch.

        :param memory: arrays `[..., n]` by name; before the first batch, the arrays kept from earlier rounds.
        """
        return (*batch.mean(params), memory)

    def own_model(self, params: Array, memory: PrivateArrays) -> Array:
        """Returns the device's personalized model `[..., d]` after the training; `params` itself: the trained one.

        :param params: the trained vector.
        :param memory: after the last batch.
        """
        return params

    def by_record(self) -> GradientRule:
        """Returns the rule that replaces it when each gradient is noised."""
        return self


class Penalty:
    """A term of the local objective beyond the loss."""

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        """Adds its gradient at `params [..., d]` to `gradient`, in place."""
        raise NotImplementedError(f"{type(self).__name__} has no add(context, params, gradient)")

    def by_record(self) -> Penalty | None:
        """Returns the penalty that replaces it when the clip norm bounds gradients instead of updates; None: none."""
        return self


@dataclass(frozen=True)
class Pull(Penalty):
    """(weight / 2) |params - global model|^2."""

    weight: float

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        if self.weight == 0:
            return
        for part in blocks(params):
            gradient[..., part] += self.weight * (params[..., part] - context.global_params[..., part])


@dataclass(frozen=True)
class PartOrder:
    """The base class of orders in which parts of the vector train; the base itself trains all of it with each batch."""

    @property
    def parts_at_once(self) -> int:
        """The number of parts that use the same batch."""
        return 1

    def masks(self, context: RoundContext) -> Sequence[Array | None]:
        """Returns the parts of the vector that are updated one after the other, each with its own gradient and
        optimizer: bool `[..., d]`, or None for the whole vector."""
        return (None,)

    def active(self, epoch: int, parts: int) -> Sequence[int]:
        """Returns the numbers of the parts that the batches of an epoch (0, 1, ...) update."""
        return range(parts)

    @property
    def resets(self) -> bool:
        """Whether `reset` does anything."""
        return False

    def reset(self, context: RoundContext, params: Array) -> None:
        """Changes `params [..., d]`, in place, at the end of each epoch but the last."""


@dataclass(frozen=True)
class SharedOnly(PartOrder):
    """Trains only the shared part; personal entries stay unchanged."""

    def masks(self, context: RoundContext) -> Sequence[Array | None]:
        return (context.sent,)


@dataclass(frozen=True)
class PersonalFirst(PartOrder):
    """Trains the personal part, then the shared part.

    :param epochs: number of epochs that train only the personal part; the others train the shared part. 0: each batch
        trains both.
    """

    epochs: int = 0

    @property
    def parts_at_once(self) -> int:
        return 1 if self.epochs else 2

    def masks(self, context: RoundContext) -> Sequence[Array | None]:
        return (context.personal, context.sent)

    def active(self, epoch: int, parts: int) -> Sequence[int]:
        if not self.epochs:
            return range(parts)
        return (0,) if epoch < self.epochs else (1,)


@dataclass(frozen=True)
class SelfDistillation:
    """The device's personalized model of its last round teaches the one that it trains.

    :param weight: of the distillation relative to the cross-entropy, in [0, 1].
    """

    objective: Objective
    weight: float

    models: ClassVar[int] = 1  # whose logits the device computes for its samples

    def teacher(self, context: RoundContext, samples: OwnSamples) -> Teacher | None:
        """Returns the teacher; None if the device has no model of its own yet: then it trains on labels alone."""
        from hushfleet.learning.own_samples import Teacher

        own = context.state.own
        return None if own is None else Teacher(samples.logits(own), self.weight)


@dataclass(frozen=True)
class Sgd:
    """Local training in batches, by the optimizer of the method's configuration.

    :param centred: whether the mean of the device's samples is subtracted from each of them.
    """

    gradient: GradientRule = GradientRule()
    penalties: tuple[Penalty, ...] = ()
    order: PartOrder = PartOrder()
    distillation: SelfDistillation | None = None
    centred: bool = False

    @property
    def objective(self) -> Objective:
        """The loss whose gradient the task's graph computes."""
        return CROSS_ENTROPY if self.distillation is None else self.distillation.objective

    @property
    def gradients_per_batch(self) -> int:
        return self.gradient.gradients * self.order.parts_at_once

    def inputs(self, samples: LabelledSamples) -> LabelledSamples:
        """Returns a device's samples as they train."""
        if not self.centred or not len(samples):
            return samples
        from hushfleet.data.samples import FeatureSamples

        x = samples.x
        return FeatureSamples(x - x.mean(0), samples.labels, samples.targets, clips=samples.clips)

    def teacher(self, context: RoundContext, samples: OwnSamples) -> Teacher | None:
        """Returns the teacher of a distillation; None without one."""
        return None if self.distillation is None else self.distillation.teacher(context, samples)

    def add_penalties(self, context: RoundContext, params: Array, gradient: Array) -> None:
        """Adds the gradients of all penalties to `gradient [..., d]`, in place. Raises `BadInput` if one returns it."""
        for penalty in self.penalties:
            if penalty.add(context, params, gradient) is not None:  # type: ignore[func-returns-value]
                raise BadInput(f"{type(penalty).__name__}.add: must change `gradient` in place, and return nothing")

    def by_record(self) -> Sgd:
        """Returns the training that replaces it when gradients are noised, part by part."""
        penalties = tuple(each for penalty in self.penalties if (each := penalty.by_record()) is not None)
        # A record changes the mean, and so what all others send.
        return replace(self, gradient=self.gradient.by_record(), penalties=penalties, centred=False)


def squared_norm(array: Array) -> Array:
    """Returns the squared norm over the last axis, computed in blocks."""
    xp = array_api.array_namespace(array)
    total = 0.0
    for part in blocks(array):
        total = total + xp.vecdot(array[..., part], array[..., part])
    return total
