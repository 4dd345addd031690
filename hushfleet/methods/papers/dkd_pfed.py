"""DKD-pFed: like pFedSD, with the distillation split into two parts: label against the rest, and within the rest.

Su, Wang, Zhu: "DKD-pFed: A novel framework for personalized federated learning via decoupling knowledge distillation
and feature decorrelation", Expert Systems with Applications 259, 125336, 2025; its public code is TuringSu/DKD_pFed.
Local training starts from the global model, with the loss CE + lambda T^2 (KL of label and rest + beta KL of the rest),
both parts at the temperature T, against the device's own last model. The model after training is the personal one.

LDP-DKD-pFed of APDP-FL's section 6.2.4 is this method with the unit `record`.

Reading: lambda = 1, beta = 2, T = 2, and alpha = 1 before the first part: the defaults of the public code.
Reading: the abstract adds feature decorrelation. The public code computes it on the teacher's features but never uses
it, so it changes no parameter and is left out here.
Reading: with noise, which the paper does not have, the update is clipped and noised as by DP-FedAvg.
Deviation: with the unit `record` the two weights add up to 1: the loss is divided by 1 + lambda T^2, and only
`privacy.clip_norm` bounds the influence of a record.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.methods.local import SelfDistillation, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Temperature, TrainingConfig, Weight, published
from hushfleet.methods.papers.pfedsd import DistillationScale
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class DKDpFedConfig(TrainingConfig):
    """Settings of DKD-pFed.

    :param distillation_weight: lambda, weight of the distillation; the cross-entropy has the weight 1.
    :param temperature: T.
    :param non_target_weight: beta, weight of the classes other than the label.
    """

    distillation_weight: Weight = 1.0
    temperature: Temperature = 2.0
    non_target_weight: Weight = 2.0


@published(
    "dkd-pfed",
    DKDpFedConfig,
    source="Su, Wang, Zhu, Expert Systems with Applications 2025",
    summary="each device distils its own last model into the one that it trains, label and other classes apart",
)
def dkd_pfed(config: DKDpFedConfig, privacy: PrivacySpec, rounds: int) -> Method:
    heat, scale = config.temperature, config.distillation_weight * config.temperature**2
    objective = Objective("decoupled-distillation", heat, config.non_target_weight, target_temperature=heat)
    penalties = () if privacy.unit == "record" else (DistillationScale(1 + scale),)
    return Method(
        training=Sgd(penalties=penalties, distillation=SelfDistillation(objective, scale / (1 + scale))),
        stages=CLIP_AND_NOISE,
    )
