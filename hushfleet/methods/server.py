"""The server half of a method: pure functions of its own state and of closed rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hushfleet import array_api
from hushfleet.array_api import Array, np
from hushfleet.params import ParamLayout

ServerArrays: TypeAlias = "dict[str, np.ndarray]"


@dataclass(frozen=True)
class ClosedRound:
    """A closed round, for the server half.

    :param before: the global vector float32 `[d]` at the start of the round.
    :param after: the new global vector.
    :param reports: of the accepted devices, in the order of their names.
    :param accuracy: of the new model on the server's own test set, in 0..1; None without a test set.
    :param loss: the same for the loss.
    :param updates: number of updates in `after`.
    :param devices: number of devices of the task.
    :param mean: float32 `[d]`, the weighted mean of the sent values, before `aggregate`; 0 where nobody sent one.
    """

    round: int
    before: np.ndarray
    after: np.ndarray
    reports: Sequence[tuple[float, ...]]
    accuracy: float | None
    loss: float | None
    updates: int = 0
    devices: int = 0
    mean: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


def mean_of(sums: Array, weights: Array) -> Array:
    """Returns the mean of the sent values, float64 `[d]`, from their weighted sum and the sum of the senders'
    weights; 0 where nobody sent one."""
    xp = array_api.array_namespace(sums)
    return sums / xp.astype(xp.where(weights > 0, weights, xp.ones_like(weights)), sums.dtype)


@dataclass(frozen=True)
class ServerHalf:
    """The base class of server halves; the base takes the mean of the sent values and keeps no state."""

    def of_layout(self, layout: ParamLayout) -> ServerHalf:
        """Returns the server half for a network of this layout; the base needs nothing of it."""
        return self

    @property
    def weighs(self) -> bool:
        """Whether `weight` may differ from 1. A median has no weights, and weighted noise does not simply add up."""
        return False

    @property
    def lowers_noise(self) -> bool:
        """Whether `controls` may lower the noise, so that the rounds cost more than at the task's own multiplier."""
        return False

    def initial(self, seed: int) -> ServerArrays:
        """Returns named arrays that the server keeps from round to round."""
        return {}

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        """Returns the numbers that the plan of `round` gives to every device: `clip_norm`, `noise_multiplier`."""
        return {}

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of arrays of the state, float32 `[d]`, that every device receives with the global model.

        An array that is not yet in the state is zero. Arrays from `advance` are rounded like the model, and the state
        of the next round has the same rounded values as the devices.
        """
        return ()

    def weight(self, state: ServerArrays, global_params: np.ndarray, sent: np.ndarray, layout: ParamLayout) -> float:
        """Returns the weight of an update `sent [d]` in the mean; positive."""
        return 1.0

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        """Returns the new global vector `[d]` from the weighted sum of sent values and the sum of the senders' weights.

        A parameter that nobody shared keeps its value.

        :param state: of the server half, NumPy, and `devices`, the number of devices of the task; the vectors may be
            tensors on an accelerator.
        """
        xp = array_api.array_namespace(global_params)
        return global_params + xp.astype(mean_of(sums, weights), global_params.dtype)

    @property
    def averages_periods(self) -> bool:
        """Whether noise is the larger part of what a task adds to the model that it continues, so that the p-th task of
        a chain takes 1 / sqrt(p) of its step (`TaskProgress.next_model`)."""
        return False

    def final(self, state: ServerArrays, last: np.ndarray) -> np.ndarray:
        """Returns the final global vector of the task, float32 `[d]`.

        :param last: the global vector after the last round.
        """
        return last

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        """Returns the state after a round; a function of its arguments only, because a killed server repeats it."""
        return state


@dataclass(frozen=True)
class ScaledMean(ServerHalf):
    """Moves the global model by the mean of the sent values times a learning rate."""

    learning_rate: float = 1.0

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        return super().aggregate(state, global_params, self.learning_rate * sums, weights)
