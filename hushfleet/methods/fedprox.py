"""FedProx: local training is held near the global model by a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2: device k minimises F_k(w) + (mu / 2) |w - w^t|^2. Clip and noise of `[privacy]` make it DP-FedProx.

Reading: mu has no default in the paper, which takes the best of 0.001, 0.01, 0.1 and 1; 0.01 stands here.
Deviation: every device has the same weight and trains the same number of epochs. The paper weighs by sample count,
which is a function of private data, and lets slow devices train less.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.config.spec import require
from hushfleet.methods.base import Array, DeviceState, Method, TrainingConfig
from hushfleet.methods.proximal import add_pull


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(TrainingConfig):
    """:param mu: weight of the proximal term; 0 is FedAvg."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.mu <= 1000, "mu", self.mu, "in [0, 1000]")


class FedProx(Method):
    name = "fedprox"
    source = "Li et al., MLSys 2020"
    summary = "mean of the updates, each trained with a pull towards the global model"
    config_class = FedProxConfig
    config: FedProxConfig

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        add_pull(gradient, params, start, self.config.mu)
