"""DP-FedSAM: local steps look for flat minima, which suffer less from clipping and noise.

Shi, Liu, Wei, Shen, Wang, Tao: "Make Landscape Flatter in Differentially Private Federated Learning", CVPR 2023,
Algorithm 1: a step of sharpness-aware minimisation uses the gradient at w + rho g / |g|, where g is the gradient at w.
Clipping and noise are the same as in DP-FedAvg. `keep_share` below 1 is DP-FedSAM-top-k: only the largest entries of an
update are kept before it is clipped.

Reading: rho is 0.5, the default of the published code; the top-k variant is not in that code.
Reading: top-k is taken over the whole vector; every entry gets noise, also the zeroed ones. Without noise on the zeros,
their positions would reveal information about the data that the noise does not cover. So zeros are sent with noise: the
purpose of the sparsity is not to save bytes.
Deviation: the code clips each tensor separately to C, so that an update of L tensors may have the norm sqrt(L) C, and
it scales each perturbation by the squared weight (ASAM); the paper clips the update to C and does not mention ASAM, so
this is plain SAM.
Deviation: learning rates do not decay by round, there is no weight decay, and every device has the same weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from hushfleet import array_api
from hushfleet.array_api import Array, blocks
from hushfleet.methods.local import GradientRule, Sgd, squared_norm
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.sparse import KeepLargest
from hushfleet.methods.state import PrivateArrays, RoundContext, divided
from hushfleet.schema import Share
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.batch import Batch


@dataclass(frozen=True, kw_only=True)
class DPFedSAMConfig(TrainingConfig):
    """Settings of DP-FedSAM.

    :param rho: distance from w at which the gradient is taken; 0 is DP-FedAvg's step, with one gradient.
    :param keep_share: the share of an update's entries that is kept; 1 turns sparsification off.
    """

    rho: Annotated[float, Meta(ge=0, le=100)] = 0.5
    keep_share: Share = 1.0


@dataclass(frozen=True)
class Sharpness(GradientRule):
    """The gradient at the SAM point, rho uphill of the parameters."""

    rho: float = 0.5

    @property
    def gradients(self) -> int:
        return 2 if self.rho > 0 else 1

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: PrivateArrays
    ) -> tuple[Any, Array, PrivateArrays]:
        """Returns the loss at `params`, and the gradient at the SAM point uphill of it."""
        loss, uphill = batch.mean(params)
        if self.rho == 0:
            return loss, uphill, memory
        _, gradient = batch.mean(sam_point(params, uphill, self.rho))
        return loss, gradient, memory


def sam_point(params: Array, gradient: Array, rho: float) -> Array:
    """Returns params + rho gradient / |gradient|, `[..., d]`; params itself for a gradient of zero."""
    xp = array_api.array_namespace(params)
    step = xp.astype(divided(rho, squared_norm(gradient) ** 0.5), params.dtype)[..., None]
    there = xp.empty_like(params)
    for part in blocks(params):
        there[..., part] = params[..., part] + step * gradient[..., part]
    return there


@published(
    "dp-fedsam",
    DPFedSAMConfig,
    source="Shi et al., CVPR 2023",
    summary="DP-FedAvg with sharpness-aware local steps, and top-k of the update if wanted",
)
def dp_fedsam(config: DPFedSAMConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(training=Sgd(Sharpness(rho=config.rho)), stages=(KeepLargest(config.keep_share), *CLIP_AND_NOISE))
