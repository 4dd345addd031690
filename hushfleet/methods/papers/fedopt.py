"""FedOpt: the server takes the mean update for a gradient, and moves the model by Adam, Yogi or Adagrad.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021, Algorithm
2. With Delta the mean of the updates of a round, m_0 = 0 and v_0 = tau^2:

    m <- beta_1 m + (1 - beta_1) Delta
    v <- v + Delta^2                                            FedAdagrad
    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)             FedYogi
    v <- beta_2 v + (1 - beta_2) Delta^2                        FedAdam
    x <- x + eta m / (sqrt(v) + tau)

There is no correction of the bias. Delta is what has arrived, with the devices' noise: m and v are computed from it, so
they cost no privacy. Noise makes v large; then eta must be larger for steps of the same length.

Reading: for FedAdagrad the paper takes beta_1 = 0, which a task says.
Deviation: every device has the same weight. The paper weighs by sample count, which is not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from hushfleet.array_api import Array, array_namespace, device
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Momentum, TrainingConfig, published
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf, mean_of
from hushfleet.wire.format.spec import PrivacySpec

ServerOptimizer = Literal["adam", "yogi", "adagrad"]


@dataclass(frozen=True, kw_only=True)
class FedOptConfig(TrainingConfig):
    """Settings of Algorithm 2.

    :param server_optimizer: `adam`, `yogi` or `adagrad`.
    :param server_learning_rate: eta.
    :param beta_1: of the mean of updates.
    :param beta_2: of the mean of squares; `adagrad` adds them up.
    :param tau: keeps the divisor away from 0; v begins at its square.
    """

    server_optimizer: ServerOptimizer = "adam"
    server_learning_rate: Annotated[float, Meta(gt=0, le=100)] = 0.01
    beta_1: Momentum = 0.9
    beta_2: Momentum = 0.99
    tau: Annotated[float, Meta(gt=0, le=1)] = 1e-3


@published(
    "fedopt",
    FedOptConfig,
    source="Reddi et al., ICLR 2021",
    summary="FedAdam, FedYogi or FedAdagrad: the server's steps are adaptive; updates are treated as by DP-FedAvg",
)
def fedopt(config: FedOptConfig, privacy: PrivacySpec, rounds: int) -> Method:
    how = config.server_learning_rate, config.beta_1, config.beta_2, config.tau
    return Method(stages=CLIP_AND_NOISE, server=Adaptive(config.server_optimizer, *how))


@dataclass(frozen=True)
class Adaptive(ServerHalf):
    """Keeps m and v, float32 `[d]`."""

    optimizer: ServerOptimizer
    learning_rate: float
    beta_1: float
    beta_2: float
    tau: float

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        xp = array_namespace(global_params)
        mean = xp.astype(mean_of(sums, weights), xp.float32)  # as `advance` gets it
        m, v = (xp.astype(moment, global_params.dtype) for moment in self._moments(state, mean))
        return global_params + self.learning_rate * m / (xp.sqrt(v) + self.tau)

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        m, v = self._moments(state, closed.mean)
        return {"m": m, "v": v}

    def _moments(self, state: ServerArrays, mean: Array) -> tuple[Array, Array]:
        """Returns m and v after a round, float32 `[d]`."""
        xp, square = array_namespace(mean), mean * mean
        m, v = xp.zeros_like(mean), xp.full_like(mean, self.tau**2)
        if "m" in state:
            m, v = (xp.asarray(state[name], device=device(mean)) for name in ("m", "v"))
        m = self.beta_1 * m + (1 - self.beta_1) * mean
        if self.optimizer == "adagrad":
            return m, v + square
        if self.optimizer == "yogi":
            return m, v - (1 - self.beta_2) * square * xp.sign(v - square)
        return m, self.beta_2 * v + (1 - self.beta_2) * square
