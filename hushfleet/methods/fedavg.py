"""FedAvg, the mean of the devices' updates; with noise it is DP-FedAvg, with a proximal term FedProx.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1.

DP-FedAvg: McMahan, Ramage, Talwar, Zhang: "Learning Differentially Private Recurrent Language Models", ICLR 2018, in
the form of Eq. (6) of FedGLP-ADP (Xiao, Jiang, Li, 2026): each device clips its whole update to C, and each of the |P|
participants adds noise of variance sigma^2 C^2 / |P|.

FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2: device k minimises F_k(w) + (mu / 2) |w - w^t|^2. Clipping and noise of `[privacy]` make it DP-FedProx.

Reading: mu has no default in the paper, which takes the best of 0.001, 0.01, 0.1 and 1; here it is 0.01.
Deviation: every device has the same weight and trains the same number of epochs. The papers weigh by sample count,
which is a function of private data and is not sent, and FedProx lets slow devices train less.
Deviation: `accounting = "strict"` does not divide the noise by |P|, so that sigma is what the server sees.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.methods.local import Pull, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, Weight, published
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(TrainingConfig):
    """Settings of FedProx.

    :param mu: weight of the proximal term; 0 is FedAvg.
    """

    mu: Weight = 0.01


@published(
    "fedavg",
    TrainingConfig,
    source="McMahan et al., AISTATS 2017",
    summary="mean of the updates; no clipping, no noise, no privacy",
)
def fedavg(config: TrainingConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method()


@published(
    "dp-fedavg",
    TrainingConfig,
    source="McMahan et al., ICLR 2018; Eq. (6) of FedGLP-ADP",
    summary="mean of the updates, each clipped as a whole and noised on the device",
)
def dp_fedavg(config: TrainingConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(stages=CLIP_AND_NOISE)


@published(
    "fedprox",
    FedProxConfig,
    source="Li et al., MLSys 2020",
    summary="mean of the updates, each trained with a pull towards the global model",
)
def fedprox(config: FedProxConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(training=Sgd(penalties=(Pull(config.mu),)), stages=CLIP_AND_NOISE)
