"""FedGLP-ADP: the parameters that move most become personal; layer clip norms follow the trend of the updates.

Xiao, Jiang, Li: "FedGLP-ADP: Federated Learning with Gradient-Based Layer-Wise Personalization and Adaptive
Differential Privacy", 2026. Equations (7)-(16), Algorithms 1 and 2.

GLP (layer-wise personalization): each round the share p = beta / T of a layer's parameters, those with the largest
noised values, changes from shared to personal, until the share beta is reached. ACNDP (adaptive clipping and
noising): layer l is clipped to C_l = C sqrt(tw_l) and each shared coordinate gets noise of standard deviation
sqrt(L) sigma C_l / sqrt(n).

Reading: the trend of Algorithm 1 needs a previous round, so a device's first round does not change the weights.
Reading: the clip weights are updated after the round, for the next one (the text of Section 4.2 and Fig. 1); Algorithm
2 updates them in line 10, before line 12 clips with them.
Reading: a layer is a module, weight and bias together, so L of Eq. (15) is the number of modules, not of tensors.
Reading: lambda_1 and lambda_2 are not printed; 0.1 and 0.05 are from FedDPA's public code, to which Section 4.1
refers for the two objectives.
Reading: p grows with the device's own participations, so a device that misses rounds falls behind evenly.
Reading: gamma is not stated for Table 1; 0.2 is the value of Table 4 closest to it.
Deviation: one gradient serves Eqs. (9) and (10); `sequential` takes a second one for the shared part, after the
personal part has moved, as in Algorithm 2, lines 6-7.
Deviation: the log-odds of Algorithm 1 have no limit. After some hundred rounds e^h would overflow and a layer's bound
would be 0, with which no update can be released. A weight counts as at least e^-40 of the largest.
Deviation: the next mask comes from the values as sent, after the codec, so that both sides can compute it. With
`wire.codec = "one-bit"` all values of a layer have the same size: then simply the first parameters become personal.
Deviation: `accounting = "strict"` compares norms of the noised values in Algorithm 1, and does not divide the
noise by n; its ledger is then valid without trust in the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from hushfleet import array_api
from hushfleet.array_api import Array, blocks, np
from hushfleet.methods.local import PartOrder, Penalty, PersonalFirst, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, Weight, published
from hushfleet.methods.personal import Personal
from hushfleet.methods.sparse import largest
from hushfleet.methods.stages import ClipLayers, Gaussian, LayerBounds
from hushfleet.methods.state import PrivateArrays, PublicState, RoundContext, divided
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import layer_norms
from hushfleet.schema import Fraction
from hushfleet.wire.format.spec import PrivacySpec

_RANGE = 40.0  # range of the log-odds that count; e^-_RANGE is the smallest weight
_LOWEST = -30.0  # below it the weight equals e^h, so that all log-odds may be shifted


@dataclass(frozen=True, kw_only=True)
class FedGLPADPConfig(TrainingConfig):
    """The settings; defaults are from the paper's Section 5.2.

    :param glp: layer-wise personalization; off leaves every parameter shared (Table 5).
    :param acndp: adaptive clipping and noising; off clips the whole update to C, as DP-FedAvg (Table 5).
    :param dynamic_beta: beta follows the noise by Eq. (11); off keeps beta_0 (Table 3).
    :param beta_0: share of each layer that is personal at the end, at the noise sigma_0.
    :param beta_growth: a of Eq. (11).
    :param sigma_0: the moderate noise of Eq. (11); the paper takes the multiplier of its epsilon = 6.
    :param gamma: step of the log-odds in Algorithm 1.
    :param sequential: update the personal part first, then the shared part by a gradient at the new point: twice the
        computation.
    :param lambda_1: pull of the personal part towards its start, Eq. (9).
    :param lambda_2: pull of the shared part's change towards the clip norm, Eq. (10).
    """

    glp: bool = True
    acndp: bool = True
    dynamic_beta: bool = True
    sequential: bool = False
    beta_0: Fraction = 0.3
    beta_growth: Annotated[float, Meta(ge=-100, le=100)] = 0.2
    sigma_0: Annotated[float, Meta(ge=0, le=1000)] = 1.965
    gamma: Annotated[float, Meta(ge=0, le=100)] = 0.2
    lambda_1: Weight = 0.1
    lambda_2: Weight = 0.05


@published(
    "fedglp-adp",
    FedGLPADPConfig,
    source="Xiao, Jiang, Li, 2026",
    summary="gradient-based layer-wise personalization, adaptive clipping and noising",
)
def fedglp_adp(config: FedGLPADPConfig, privacy: PrivacySpec, rounds: int) -> Method:
    beta = final_share(config, privacy.noise_multiplier)
    penalties = Penalties(config.lambda_1, config.lambda_2)
    order = InTurn() if config.sequential else PartOrder()
    # As published, the trend follows raw updates, and the clip norms in the header reveal it.
    raw = privacy.as_published and config.gamma > 0
    clip = ClipLayers(TrendBounds(config.gamma), raw="clip norms that follow the norms of raw updates" if raw else "")
    return Method(
        GrowingLargest(beta, rounds),
        Sgd(penalties=(penalties,), order=order),
        (clip, Gaussian()) if config.acndp else CLIP_AND_NOISE,
    )


def final_share(config: FedGLPADPConfig, noise_multiplier: float) -> float:
    """Returns beta, the personal share of each layer at the end, Eq. (11)."""
    if not config.glp:
        return 0.0
    if not config.dynamic_beta:
        return config.beta_0
    exponent = config.beta_growth * (noise_multiplier - config.sigma_0)
    return min(1.0, config.beta_0 * math.exp(min(exponent, 50.0)))


@dataclass(frozen=True)
class GrowingLargest(Personal):
    """GLP: with each update the largest sent values of each layer become personal, a share beta in `rounds` updates."""

    beta: float
    rounds: int

    @property
    def same_for_all(self) -> bool:
        return False

    def next_mask(self, public: PublicState, sent: Array, layout: ParamLayout) -> Array:
        """Returns the next mask; ties go to the lower index."""
        grown = public.mask.copy()
        for layer in layout.layers:
            part = slice(layer.start, layer.stop)
            mask = public.mask[part]
            target = int(self.beta * layer.size * min((public.participations + 1) / self.rounds, 1.0))
            grown[part] |= largest(np.where(mask, -1.0, np.abs(sent[part])), target - int(np.count_nonzero(mask)))
        return grown


@dataclass(frozen=True)
class Penalties(Penalty):
    """Eq. (9) on personal entries and Eq. (10) on shared ones.

    Both are norms, not squares: d/dv (lambda_1/2) |v - v0| = (lambda_1/2) (v - v0) / |v - v0|, and the second changes
    sign when the shared part has moved by C. At a norm of zero the gradient is zero.
    """

    lambda_1: float
    lambda_2: float

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        xp = array_api.array_namespace(params)
        mask, start = context.mask, context.start
        personal_sq, shared_sq = 0.0, 0.0
        for part in blocks(params):
            moved = params[..., part] - start[..., part]
            personal = xp.vecdot(moved * mask[..., part], moved)
            shared_sq = shared_sq + xp.vecdot(moved, moved) - personal
            personal_sq = personal_sq + personal
        pull = divided(self.lambda_1 / 2, personal_sq**0.5)
        shared_norm = xp.clip(shared_sq, min=0.0) ** 0.5
        push = divided(self.lambda_2 / 2, shared_norm)
        push = xp.where(shared_norm > context.setting.privacy.clip_norm, push, -push)
        push, more = push[..., None], (pull - push)[..., None]
        for part in blocks(params):
            weight = mask[..., part] * more  # indexing by the mask takes ten times as long as multiplying
            weight += push
            weight *= params[..., part] - start[..., part]
            gradient[..., part] += weight


@dataclass(frozen=True)
class InTurn(PersonalFirst):
    """Algorithm 2, lines 6-7: each batch trains both parts, once an entry is personal."""

    def masks(self, context: RoundContext) -> Sequence[Array | None]:
        xp = array_api.array_namespace(context.mask)
        return super().masks(context) if bool(xp.any(context.mask)) else (None,)


@dataclass(frozen=True)
class TrendBounds(LayerBounds):
    """ACNDP: the root of each layer's share tw of the squared clip norm; its log-odds follow the trend of its norm.

    :param gamma: step of the log-odds in Algorithm 1.
    """

    gamma: float

    def initial(self, layout: ParamLayout) -> PrivateArrays:
        sizes = np.array([span.size for span in layout.layers], dtype=np.float64)
        share = np.clip(sizes / sizes.sum(), 1e-12, 1 - 1e-12)
        return {"log_odds": np.log(share / (1 - share)), "norms": np.full(len(sizes), np.nan)}

    def bounds(self, memory: PrivateArrays, global_params: Array, layout: ParamLayout) -> Array:
        log_odds = memory["log_odds"]
        highest = min(float(log_odds.max()), 0.0)
        counted = np.maximum(log_odds, highest - _RANGE) - min(highest - _LOWEST, 0.0)
        weights = 1 / (1 + np.exp(-counted))
        return (weights / weights.sum()) ** 0.5

    def remember(self, memory: PrivateArrays, seen: Array, layout: ParamLayout) -> PrivateArrays:
        """Applies Algorithm 1 to the norms of this and the last round."""
        norms, before = layer_norms(seen, layout), memory["norms"]
        direction = np.where(np.isnan(before), 0.0, np.where(norms > before, 1.0, -1.0))
        return {"log_odds": memory["log_odds"] + self.gamma * direction, "norms": norms}
