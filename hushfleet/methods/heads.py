"""FedPer, LG-FedAvg and FedRep: a network is split into head (last layers) and backbone; one part stays on the device.

FedPer: Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithm 1.
The head stays on the device; both parts train together.

LG-FedAvg: Liang, Liu, Liu, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with Local and
Global Representations", 2020, Algorithm 1. The backbone stays on the device; the head is shared.

FedRep: Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1. The head stays on the device: tau updates of the head with a fixed backbone, then updates of the
backbone with a fixed head.

Clipping and noise of `[privacy]` are the same as in DP-FedAvg, on the shared part only.

Reading: FedPer draws each device's first head on the device; here the part that stays starts from the initial global
model, so that devices differ only by their data. LG-FedAvg begins with a model that FedAvg has trained.
Reading: an update of FedRep is an epoch, as in its experiments (10 epochs of the head, then 1 or 5 of the backbone).
Reading: a FedRep device's personalized model is its head and the backbone that it trained in the same round, so the
head has not seen that backbone's last step. After aggregation it predicts with its head on the new global backbone.
Reading: FedRep's public code tests its heads on that backbone, for all clients after each aggregation (`hushfleet
reproduce`: `accuracy_next_local`); here a device's metrics are measured on its personalized model, defined above.
Deviation: there is no weight decay. FedRep's code has 1e-4 on weights and none on biases; its paper does not say.
Deviation: every device has the same weight. FedPer and LG-FedAvg weigh by sample count, which is a function of private
data, and so does FedRep's code; FedRep's paper does not.
Deviation: LG-FedAvg's auxiliary and adversarial losses on local representations are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hushfleet.methods.local import PersonalFirst, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.personal import Backbone, Head
from hushfleet.schema import AtLeast1
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class HeadConfig(TrainingConfig):
    """Settings of methods that divide a network into backbone and head.

    :param head_layers: number of layers at the end that are the head; the others are the backbone.
    """

    head_layers: AtLeast1 = 1


@dataclass(frozen=True, kw_only=True)
class HeadFirstConfig(HeadConfig):
    """Settings of methods that train in whole epochs, because the epoch decides which part trains."""

    rules = {
        **HeadConfig.rules,
        "method.head-needs-whole-epochs": (
            lambda config: config.local_steps,
            "local_steps = {local_steps}: must be 0: head and backbone train in whole epochs",
        ),
    }


@dataclass(frozen=True, kw_only=True)
class FedRepConfig(HeadFirstConfig):
    """Settings of FedRep.

    :param head_epochs: number of local epochs that train the head; the others train the backbone.
    """

    head_epochs: Annotated[int, Meta(ge=1, lt=1000)] = 1
    local_epochs: Annotated[int, Meta(ge=2, le=1000)] = 2

    rules = {
        **HeadFirstConfig.rules,
        "method.head-epochs-below-local": (
            lambda config: config.head_epochs >= config.local_epochs,
            "head_epochs = {head_epochs}: must be below the {local_epochs} local epochs, since the backbone trains in "
            "the others",
        ),
    }


@published(
    "fedper",
    HeadConfig,
    source="Arivazhagan et al., 2019",
    summary="the last layers stay on the device; the others are averaged",
)
def fedper(config: HeadConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(Head(config.head_layers), stages=CLIP_AND_NOISE)


@published(
    "lg-fedavg",
    HeadConfig,
    source="Liang et al., 2020",
    summary="lower layers stay on the device; the last layers are averaged",
)
def lg_fedavg(config: HeadConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(Backbone(config.head_layers), stages=CLIP_AND_NOISE)


@published(
    "fedrep",
    FedRepConfig,
    source="Collins et al., ICML 2021",
    summary="the last layers stay on the device and train first; the others follow and are averaged",
)
def fedrep(config: FedRepConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(Head(config.head_layers), Sgd(order=PersonalFirst(config.head_epochs)), CLIP_AND_NOISE)
