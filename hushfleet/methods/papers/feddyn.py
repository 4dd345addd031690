"""FedDyn: each device's objective has a linear term that follows its own gradient, so that local minima agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: "Federated Learning Based on Dynamic Regularization", ICLR
2021, Algorithm 1. With m devices, of which P take part, and g_k the gradient that device k remembers:

    device   theta_k = argmin L_k(theta) - <g_k, theta> + alpha/2 |theta - theta^t-1|^2
             g_k <- g_k - alpha (theta_k - theta^t-1)
    server   h <- h - alpha/m sum_P (theta_k - theta^t-1);    theta^t = 1/|P| sum_P theta_k - h / alpha

Privacy: h follows from the mean of what was sent, and g_k never leaves the device. Later updates contain its noise, so
it hides no other device: secure aggregation refuses the method.

Reading: the argmin is a local training of `local_epochs` or `local_steps`, as in the paper's experiments.
Reading: both sides compute from what was sent, so that h is the mean of all g_k; with noise g_k has that of alpha s_k.
Reading: the global model is theta^t, from which devices start. The paper also tests the mean of the theta_k.
Deviation: with clipping or noise, theta_k - theta^t-1 is the clipped and noised one. With `record` gradients are.
Deviation: an update that arrives too late is in the device's g_k and not in h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hushfleet import array_api
from hushfleet.array_api import Array, np
from hushfleet.methods.local import Penalty, Pull, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.personal import Personal
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.state import PrivateArrays, RoundContext
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class FedDynConfig(TrainingConfig):
    """Settings of FedDyn.

    :param alpha: weight of the dynamic term; the paper takes the best of 0.001, 0.01, 0.03 and 0.1.
    """

    alpha: Annotated[float, Meta(gt=0, le=1000)] = 0.1


@published(
    "feddyn",
    FedDynConfig,
    source="Acar et al., ICLR 2021",
    summary="each device's objective follows its last gradients, so that the minima of all devices agree",
)
def feddyn(config: FedDynConfig, privacy: PrivacySpec, rounds: int) -> Method:
    alpha = config.alpha
    return Method(OwnGradient(alpha), Sgd(penalties=(Pull(alpha), LinearTerm())), CLIP_AND_NOISE, Dynamic(alpha))


@dataclass(frozen=True)
class LinearTerm(Penalty):
    """-<g_k, params>."""

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        if "gradient" in context.state.private:
            gradient -= context.state.private["gradient"]


@dataclass(frozen=True)
class OwnGradient(Personal):
    """Keeps g_k on the device, and no part of the model."""

    alpha: float

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        return {"gradient": context.state.private.get("gradient", 0) - np.float32(self.alpha) * sent}


@dataclass(frozen=True)
class Dynamic(ServerHalf):
    """Keeps h, float64 `[d]`, on the server."""

    alpha: float

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        xp, devices = array_api.array_namespace(global_params), float(state["devices"])
        mean = super().aggregate(state, global_params, sums, weights) - global_params
        after = global_params + mean * (1 + xp.max(weights) / devices)  # h has this round's mean too
        if "h" not in state:
            return after
        h = xp.asarray(state["h"], dtype=after.dtype, device=array_api.device(after))
        return after - h / self.alpha

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        share = self.alpha * closed.updates / closed.devices
        return {"h": state.get("h", 0.0) - share * closed.mean.astype(np.float64)}
