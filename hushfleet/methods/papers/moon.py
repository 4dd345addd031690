"""MOON: local training keeps what a model makes of a sample near the global model's, and away from the own last one's.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. Local training starts from the global
model w^t, with the loss of Eqs. (3) and (4): CE + mu l, where
l = -log(exp(sim(z, z_glob) / tau) / (exp(sim(z, z_glob) / tau) + exp(sim(z, z_prev) / tau))). z is the representation
of a sample by the model in training, z_glob by w^t and z_prev by the device's model after its last round; sim is the
cosine.

Deviation: representations are the logits. The paper has a projection head before the last layer; boards get graphs
whose outputs are the loss, the gradient and the logits, for any network.
Reading: mu = 1 and tau = 0.5; the paper tunes mu in {0.1, 1, 5, 10} and has tau = 0.5.
Reading: a device that never trained has no last model, and trains by CE alone.
Reading: z_glob and z_prev are computed once a round, of samples without augmentation and without dropout.
Reading: with noise, which the paper does not have, the update is clipped and noised as by DP-FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushfleet.array_api import np
from hushfleet.methods.local import SelfDistillation, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Temperature, TrainingConfig, Weight, published
from hushfleet.methods.papers.pfedsd import DistillationScale
from hushfleet.objectives import Objective
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.own_samples import OwnSamples, Teacher
    from hushfleet.methods.state import RoundContext


@dataclass(frozen=True, kw_only=True)
class MoonConfig(TrainingConfig):
    """Settings of MOON.

    :param mu: weight of the contrastive loss; the cross-entropy has the weight 1.
    :param temperature: tau.
    """

    mu: Weight = 1.0
    temperature: Temperature = 0.5


@dataclass(frozen=True)
class Contrast(SelfDistillation):
    """The global model and the device's personalized model of its last round, beside each other."""

    models = 2

    def teacher(self, context: RoundContext, samples: OwnSamples) -> Teacher | None:
        last = super().teacher(context, samples)
        if last is None:
            return None
        return last._replace(logits=np.concatenate((samples.logits(context.global_params), last.logits), 1))


@published(
    "moon",
    MoonConfig,
    source="Li et al., CVPR 2021",
    summary="a contrastive loss draws training towards the global model, away from the device's last one",
)
def moon(config: MoonConfig, privacy: PrivacySpec, rounds: int) -> Method:
    contrast = Contrast(Objective("contrastive", config.temperature), config.mu / (1 + config.mu))
    return Method(
        training=Sgd(penalties=(DistillationScale(1 + config.mu),), distillation=contrast), stages=CLIP_AND_NOISE
    )
