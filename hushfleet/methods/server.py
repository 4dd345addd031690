"""The server half of a method: pure functions of its own state and of closed rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.params import ParamLayout

ServerArrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class ClosedRound:
    """A closed round, for the server half.

    :param before: the global vector float32 `[d]` that the round began with.
    :param after: the new one.
    :param reports: of the accepted devices, in the order of their names.
    :param accuracy: of the new model on the server's own test set, in 0..1; None without one.
    :param loss: likewise.
    :param updates: how many updates are in `after`.
    :param devices: how many devices the task is for.
    """

    round: int
    before: np.ndarray
    after: np.ndarray
    reports: Sequence[tuple[float, ...]]
    accuracy: float | None
    loss: float | None
    updates: int = 0
    devices: int = 0


@dataclass(frozen=True)
class ServerHalf:
    """The base of server halves; itself the mean of the sent values, with nothing kept from round to round."""

    @property
    def weighs(self) -> bool:
        """Whether `weight` may be other than 1: a median has no weights, and then noises do not simply add up."""
        return False

    @property
    def lowers_noise(self) -> bool:
        """Whether `controls` may lower the noise, so that all rounds cost more than at the task's own multiplier."""
        return False

    def initial(self, seed: int) -> ServerArrays:
        """Named arrays that the server carries from round to round."""
        return {}

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        """The numbers that the plan of `round` tells every device: `clip_norm`, `noise_multiplier`."""
        return {}

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of arrays of the state, float32 `[d]`, that every device is given with the global model.

        One that the state does not have yet is zero. What `advance` gives is rounded as the model is, and the state of
        the next round has it as devices have it.
        """
        return ()

    def weight(self, state: ServerArrays, global_params: np.ndarray, sent: np.ndarray, layout: ParamLayout) -> float:
        """The weight of an update `sent [d]` in the mean; positive."""
        return 1.0

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        """The new global vector `[d]` from the weighted sum of sent values and the sum of their senders' weights.

        A parameter that nobody shared keeps its value.

        :param state: of the server half, NumPy; the vectors may be tensors of an accelerator.
        """
        xp = array_api.array_namespace(global_params)
        mean = sums / xp.astype(xp.where(weights > 0, weights, xp.ones_like(weights)), sums.dtype)
        return global_params + xp.astype(mean, global_params.dtype)

    def final(self, state: ServerArrays, last: np.ndarray) -> np.ndarray:
        """The global vector float32 `[d]` that the task ends with.

        :param last: what the last round made of the others.
        """
        return last

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        """The state after a round; a function of its arguments alone, since a killed server starts over."""
        return state
