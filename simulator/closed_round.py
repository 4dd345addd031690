"""Gives a program the round that has just closed, with its global model, before the next round begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.params import ParamLayout

if TYPE_CHECKING:
    from torch import Tensor

STOPPED = "the program ended the run after this round (on_round)"


@dataclass(frozen=True, eq=False)
class Round:
    """A round of a simulation that has closed.

    :param number: 1 for the first.
    :param participants: number of updates in the new global model.
    :param accuracy: of the global model on the common test, in 0..1; None if it was not measured.
    :param loss: likewise.
    :param metrics: likewise, the task's own metrics by name.
    :param params: the global model as a vector float32 `[d]`, read-only.
    """

    number: int
    participants: int
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float | None]
    params: np.ndarray
    layout: ParamLayout

    @property
    def model(self) -> dict[str, Tensor]:
        """The global model as a PyTorch state_dict, a copy."""
        import torch

        return {name: torch.from_numpy(array.copy()) for name, array in self.layout.unflatten(self.params).items()}


OnRound = Callable[[Round], object]
"""Is called after each round; no further round opens if it returns False."""


def tell(on_round: OnRound | None, engine: RoundEngine, closed: Mapping[str, Any]) -> None:
    """Calls the program's function for a round that the engine has just closed.

    :param closed: its `RoundSummary`, as plain values.
    """
    if on_round is None:
        return
    numbers = (closed["round"], closed["participants"], closed["accuracy_global"], closed["loss"])
    if on_round(Round(*numbers, closed.get("metrics", {}), engine.global_params, engine.layout)) is False:
        engine.progress.ended = STOPPED
