"""BLUR + LUS: clipping removes less of an update if the update is short and sparse.

Cheng, Wang, Zhang, Cheng: "Differentially Private Federated Learning with Local Regularization and Sparsification",
CVPR 2022. BLUR (bounded local update regularization) adds a penalty for an update longer than the bound S, here the
clip norm, to the local objective; LUS (local update sparsification) zeroes the least important entries of an update
before it is clipped. Clipping and noise are the same as in DP-FedAvg: every entry gets noise, also the zeroed ones,
so that the choice of entries, which depends on the data, is hidden too.

The paper's text was not available: this file is based on its abstract and on descriptions in other papers.

Reading: the penalty is (lambda / 2) max(0, |w - w^t|^2 - S^2): its gradient is lambda (w - w^t) beyond S, else 0.
Reading: an entry's importance is its magnitude, and the kept share is a share of the whole vector, not of each layer.
Reading: the defaults of lambda and of the share are not the paper's, which are not known here.
Deviation: with privacy unit `record` the clip norm bounds gradients and not updates, so there is no penalty, and the
device sends the sparse update as trained; its noise is the noise of the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hushfleet import array_api
from hushfleet.array_api import Array, blocks
from hushfleet.methods.local import Penalty, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, Weight, published
from hushfleet.methods.sparse import KeepLargest
from hushfleet.schema import Share
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.methods.state import RoundContext


@dataclass(frozen=True, kw_only=True)
class BlurLusConfig(TrainingConfig):
    """Settings of BLUR and LUS.

    :param bound_weight: lambda of BLUR; 0 turns it off.
    :param keep_share: the share of an update's entries that LUS keeps; 1 turns it off.
    """

    bound_weight: Weight = 0.1
    keep_share: Share = 0.5


@dataclass(frozen=True)
class Blur(Penalty):
    """(weight / 2) max(0, |w - w^t|^2 - C^2): a pull back to the start, for models beyond the clip norm C."""

    weight: float

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        if self.weight == 0:
            return
        xp, start = array_api.array_namespace(params), context.start
        squares = 0.0
        for part in blocks(params):
            moved = params[..., part] - start[..., part]
            squares = squares + xp.vecdot(moved, moved)
        beyond = xp.astype(squares > context.setting.privacy.clip_norm**2, params.dtype)
        pull = (self.weight * beyond)[..., None]
        for part in blocks(params):
            gradient[..., part] += pull * (params[..., part] - start[..., part])

    def by_record(self) -> None:
        return None


@published(
    "blur-lus",
    BlurLusConfig,
    source="Cheng et al., CVPR 2022",
    summary="DP-FedAvg with updates held near the clip norm in training, and their small entries zeroed",
)
def blur_lus(config: BlurLusConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(
        training=Sgd(penalties=(Blur(config.bound_weight),)), stages=(KeepLargest(config.keep_share), *CLIP_AND_NOISE)
    )
