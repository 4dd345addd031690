"""pFedSD: each device distils its own last model into the one that it trains.

Jin, Bai, Yao, Dai, Gu, Yu, Sun: "Personalized Edge Intelligence via Federated Self-Knowledge Distillation", IEEE TPDS
34(2), 2022. Local training starts from the global model, with the loss CE + lambda T^2 KL(teacher || student) at the
temperature T; the teacher is the model that the device's last round ended with, before aggregation, and a device that
never trained has none. The model after local training is the personal one.

Reading: lambda = 1, as the public code has it (CGCL-codes/pFedSD); T = 3 is what ACDP-pFSD's Section 5.1 runs it with.
Reading: with noise, which the paper does not have, the update is clipped and noised as by DP-FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.config.spec import require
from hushfleet.methods.base import Array, DeviceState, Method, OwnData, Teacher, TrainingConfig
from hushfleet.model.objectives import Objective


@dataclass(frozen=True, kw_only=True)
class PFedSDConfig(TrainingConfig):
    """:param distillation_weight: lambda, of the distillation beside a cross-entropy of weight 1.
    :param temperature: T.
    """

    distillation_weight: float = 1.0
    temperature: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.distillation_weight <= 1000, "distillation_weight", self.distillation_weight, "in [0, 1000]")
        require(0 < self.temperature <= 1000, "temperature", self.temperature, "in (0, 1000]")


class PFedSD(Method):
    name = "pfedsd"
    source = "Jin et al., IEEE TPDS 2022"
    summary = "each device distils its own last model into the one that it trains"
    config_class = PFedSDConfig
    config: PFedSDConfig

    @property
    def objective(self) -> Objective:
        return Objective("distillation", temperature=self.config.temperature)

    def teacher(self, state: DeviceState, data: OwnData) -> Teacher | None:
        """The loss over 1 + lambda, which is the objective's form."""
        if state.own is None:
            return None
        weight = self.config.distillation_weight
        return Teacher(data.logits(state.own), weight / (1 + weight))

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        """Takes the division by 1 + lambda back."""
        if state.own is not None:
            gradient *= 1 + self.config.distillation_weight
