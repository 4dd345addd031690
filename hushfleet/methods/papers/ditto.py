"""Ditto: a personal model beside the shared one, kept close to it by a penalty.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
the shared model is trained as by FedAvg; the device's personalized model v minimises F_k(v) + (lambda / 2) |v - w^t|^2,
starting from its last value. Only the shared model's update leaves the device, clipped and noised as `[privacy]` says.

Reading: both models train for `local_epochs` with the same optimizer and step size.
Reading: a device's first personalized model starts from the global one.
Deviation: every device has the same weight. The paper weighs by sample count, which is a function of private data.
Deviation: with privacy unit `record` the personalized model trains without noise, because no part of it is ever sent.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.methods.local import Pull, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, Weight, published
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class DittoConfig(TrainingConfig):
    """Settings of Ditto.

    :param lambda_: weight of the pull of the personalized model towards the global one; the paper's lambda.
    """

    lambda_: Weight = 0.1


@published(
    "ditto",
    DittoConfig,
    source="Li et al., ICML 2021",
    summary="FedAvg, and beside it a model that stays on the device, pulled towards the global one",
)
def ditto(config: DittoConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(stages=CLIP_AND_NOISE, own_training=Sgd(penalties=(Pull(config.lambda_),)))
