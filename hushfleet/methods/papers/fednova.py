"""FedNova, in the form for equal numbers of steps: FedAvg and FedProx, normalised by the length of a local training.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Eq. (6) and Algorithm 1, and its public code, JYWa/FedNova. A device takes tau_i steps, and its update is
-eta G_i a_i, a sum of its gradients with the weights a_i. The server takes the steps

    x <- x - tau_eff sum_i p_i eta G_i a_i / |a_i|_1

With the same number of steps tau on all devices, all a_i are the same public vector a, so that the server multiplies
the mean update by tau_eff / |a|_1. With plain SGD |a|_1 = tau = tau_eff, and this is FedAvg.

Reading: with a proximal term tau_eff = tau, so that the pull no longer shortens the server's step; without one tau_eff
= |a|_1, also with momentum. The public code does the same.
Reading: with momentum and a proximal term together, the pull is part of the gradient in the velocity, as in FedProx
with PyTorch's SGD; the public code adds it after the velocity.
Deviation: tau is the same on all devices. In the paper tau_i follows the samples of a device or its speed, and would
have to be sent: it is a function of private data.
Deviation: every device has the same weight p_i. The paper weighs by sample count.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.methods.local import Pull, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, CountedStepsConfig, Method, Momentum, Weight, published
from hushfleet.methods.server import ScaledMean
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class FedNovaConfig(CountedStepsConfig):
    """Settings of FedNova.

    :param mu: weight of a proximal term, as in FedProx; 0: none.
    """

    momentum: Momentum = 0.0
    mu: Weight = 0.0

    rules = {
        **CountedStepsConfig.rules,
        "method.pull-shorter-than-step": (
            lambda config: config.learning_rate * config.mu >= 1,
            "mu = {mu!r}: must be below 1 / learning_rate, or a pull goes beyond the global model",
        ),
    }


@published(
    "fednova",
    FedNovaConfig,
    source="Wang et al., NeurIPS 2020",
    summary="mean of the updates, normalised by the length of a local training with momentum or a proximal term",
)
def fednova(config: FedNovaConfig, privacy: PrivacySpec, rounds: int) -> Method:
    steps = privacy.batches if privacy.unit == "record" else config.local_steps
    factor = steps / length(steps, config.momentum, config.learning_rate * config.mu) if config.mu else 1.0
    training = Sgd(penalties=(Pull(config.mu),) if config.mu else ())
    return Method(training=training, stages=CLIP_AND_NOISE, server=ScaledMean(factor))


def length(steps: int, momentum: float, pull: float) -> float:
    """Returns |a|_1: how far gradients of 1 lead, in units of the learning rate eta.

    :param pull: eta mu.

    >>> length(3, 0.0, 0.0), length(3, 0.5, 0.0), length(3, 0.0, 0.5)
    (3.0, 4.25, 1.75)
    """
    distance = velocity = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1 - pull * distance
        distance += velocity
    return distance
