"""APFL: each device's personalized model is a mixture of the shared model and of one that stays on the device.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020 (arXiv 2003.13461), Algorithm 1. With w the
device's copy of the global model, v its local model, and the mixture u = alpha v + (1 - alpha) w, each batch gives

    w <- w - eta grad f(w);    v <- v - eta grad_v f(u);    alpha <- alpha - eta <v - w, grad f(u)>, Eq. (10)

Only the change of w leaves the device, clipped and noised as `[privacy]` says; v, alpha and u stay there.

Reading: grad_v f(u) = alpha grad f(u), by the chain rule. All three gradients are taken before a step.
Reading: v begins as the global model of the device's first round, and is kept from round to round, as alpha is.
Reading: with `adaptive`, alpha follows Eq. (10) with each batch and stays in [0, 1]. The public code,
MLOPTPSU/FedTorch, does so once a round, after the steps, and adds 0.02 alpha to the derivative.
Deviation: with the unit `record` both gradients of a batch are noised, and charged together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.methods.local import GradientRule, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, PlainSgdConfig, published
from hushfleet.schema import Fraction
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.batch import Batch
    from hushfleet.methods.state import PrivateArrays, RoundContext


@dataclass(frozen=True, kw_only=True)
class APFLConfig(PlainSgdConfig):
    """Settings of APFL.

    :param alpha: the share of the device's own model in the mixture; with `adaptive` the first one.
    :param adaptive: whether each device adapts its alpha on its own samples.
    """

    alpha: Fraction = 0.5
    adaptive: bool = True


@published(
    "apfl",
    APFLConfig,
    source="Deng et al., 2020",
    summary="a mixture of the shared model and of one that stays on the device, in a share that each device learns",
)
def apfl(config: APFLConfig, privacy: PrivacySpec, rounds: int) -> Method:
    mixture = MixedModel(alpha=config.alpha, adaptive=config.adaptive, learning_rate=config.learning_rate)
    return Method(training=Sgd(mixture), stages=CLIP_AND_NOISE)


@dataclass(frozen=True, kw_only=True)
class MixedModel(GradientRule):
    """The gradient of w; it takes the steps of v and alpha itself, and keeps them as `local` and `alpha`.

    :param learning_rate: eta.
    """

    alpha: float
    adaptive: bool
    learning_rate: float

    @property
    def lasting(self) -> tuple[str, ...]:
        return ("local", "alpha")

    @property
    def gradients(self) -> int:
        return 2

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: PrivateArrays
    ) -> tuple[Any, Array, PrivateArrays]:
        xp = array_api.array_namespace(params)
        local = memory.get("local", params)
        alpha = memory["alpha"] if "alpha" in memory else self.alpha * xp.ones_like(params[..., :1])
        _, gradient = batch.mean(alpha * local + (1 - alpha) * params)
        after = {"local": local - self.learning_rate * (alpha * gradient), "alpha": alpha}
        if self.adaptive:
            slope = xp.vecdot(local - params, gradient)[..., None]
            after["alpha"] = xp.clip(alpha - self.learning_rate * slope, 0.0, 1.0)
        return (*batch.mean(params), after)

    def own_model(self, params: Array, memory: PrivateArrays) -> Array:
        if "local" not in memory:
            return params
        return memory["alpha"] * memory["local"] + (1 - memory["alpha"]) * params
