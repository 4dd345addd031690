"""FedAvgM with local noise: the server keeps a velocity and moves the global model along it.

Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019:
v <- beta v + mean update, w <- w + v. Updates are clipped and noised as by DP-FedAvg; the server's computations on them
are post-processing. This is an example of a server half outside the package (docs/methods.md):

    hushfleet simulate examples/fedavgm.toml --method examples/fedavgm.py:fedavgm
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.array_api import Array, array_namespace
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Momentum, TrainingConfig, published
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class FedAvgMConfig(TrainingConfig):
    """Settings of FedAvgM.

    :param momentum_server: beta of the server; 0 is FedAvg.
    """

    momentum_server: Momentum = 0.9


@published(
    "fedavgm",
    FedAvgMConfig,
    source="Hsu, Qi, Brown, 2019",
    summary="FedAvg with momentum on the server; updates are clipped and noised as by DP-FedAvg",
)
def fedavgm(config: FedAvgMConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(stages=CLIP_AND_NOISE, server=Velocity(config.momentum_server))


@dataclass(frozen=True)
class Velocity(ServerHalf):
    """Adds the mean of updates to a velocity, which moves the model."""

    beta: float

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        after = super().aggregate(state, global_params, sums, weights)
        if "velocity" not in state:
            return after
        xp = array_namespace(global_params)
        return after + self.beta * xp.asarray(state["velocity"], dtype=after.dtype, device=after.device)

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        """Returns the velocity as seen by the devices: the change of the model."""
        return {"velocity": closed.after - closed.before}
