"""pFedSD: each device distils its own last model into the one that it trains.

Jin, Bai, Yao, Dai, Gu, Yu, Sun: "Personalized Edge Intelligence via Federated Self-Knowledge Distillation", IEEE TPDS
34(2), 2022. Local training starts from the global model, with the loss CE + lambda T^2 KL(teacher || student) at the
temperature T; the teacher is the device's model at the end of its last round, before aggregation, and a device that
never trained has none. The model after local training is the personal one.

Reading: lambda = 1, as in the public code (CGCL-codes/pFedSD); T = 3, as ACDP-pFSD's Section 5.1 runs it.
Reading: with noise, which the paper does not have, the update is clipped and noised as by DP-FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushfleet.array_api import Array
from hushfleet.methods.local import Penalty, SelfDistillation, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Temperature, TrainingConfig, Weight, published
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.methods.state import RoundContext


@dataclass(frozen=True, kw_only=True)
class PFedSDConfig(TrainingConfig):
    """Settings of pFedSD.

    :param distillation_weight: lambda, weight of the distillation; the cross-entropy has the weight 1.
    :param temperature: T.
    """

    distillation_weight: Weight = 1.0
    temperature: Temperature = 3.0


@dataclass(frozen=True)
class DistillationScale(Penalty):
    """Multiplies the gradient if the device has a teacher: an objective's weights add up to 1, the paper's do not."""

    factor: float

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        if context.state.own is not None:
            gradient *= self.factor


@published(
    "pfedsd",
    PFedSDConfig,
    source="Jin et al., IEEE TPDS 2022",
    summary="each device distils its own last model into the one that it trains",
)
def pfedsd(config: PFedSDConfig, privacy: PrivacySpec, rounds: int) -> Method:
    weight, objective = config.distillation_weight, Objective("distillation", temperature=config.temperature)
    training = Sgd(
        penalties=(DistillationScale(1 + weight),), distillation=SelfDistillation(objective, weight / (1 + weight))
    )
    return Method(training=training, stages=CLIP_AND_NOISE)
