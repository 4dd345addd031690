"""FedADDP: FedDPA's parts and penalties, with a separate clip threshold and noise for each parameter.

Guo, Zhang, Mu, Li, Dong, Li: "FedADDP: Privacy-Preserving Personalized Federated Learning with Adaptive Dimensional
Differential Privacy", ICA3PP 2024. The paper's text was not available; this follows its authors' public code
(yyguo-xdu/FedADDP).

Parameter j of the trained model may differ by at most q_j = (beta / 2) |w_j| from its value at the start of the round,
and gets noise of standard deviation sqrt(M) sigma 2 q_j, where M is the number of tensors. In this way the device sends
its whole model, with the personal parameters, as its difference from the global one. The length that FedDPA's second
penalty pulls towards is the sum over the tensors of the norms |2 q| of the device's last round, 0 in its first.

Reading: w_j is from the trained model. The code takes the model before the last batch, minus the learning rate times
the last gradient, which under Adam is neither the model before that batch nor the one after it.
Reading: a parameter that is exactly 0 would have neither room nor noise, so no q is below 1e-8.
Reading: noise is not divided among the devices; the code does not divide it either.
Reading: the abstract's "global consistency regularization" is read as the second penalty, and its "GlobalRobust
Loss" as cross-entropy, because the code has no other.
Reading: with `clip_norm = inf` nothing is clipped and the length is 0, as with the code's `no_clip`; otherwise
`clip_norm` is not used under `as-published`.
Deviation: every device has the same weight. The code weighs by sample count, which is not sent.
Deviation: the code computes its noise by sigma = sqrt(T a / (2 (epsilon + ln(delta) / (a - 1)))) with
a = ceil(log2(1 / delta) / epsilon + 1); here `privacy` gives sigma.
As published, no epsilon holds. The centre and the width of the noise follow the device's personalized model, and so its
data; and d parameters, each bounded by its own q, give a sensitivity that grows with sqrt(d), which the factor sqrt(M)
does not cover. The ledger says that nothing is protected, although noise is added.
Deviation: `accounting = "strict"` takes the thresholds from the global model, which everybody has, and per layer,
because the codec's steps and the aggregator's checks are per layer: layer l of the change against the global model is
clipped to C_l = C |g_l| / |g|, with noise sqrt(L) sigma C_l. Its ledger is valid with the multiplier sigma. The length
of the penalty is C.
Deviation: with the unit `record`, squares of the last update replace the Fisher values, as in `feddpa`, and records
are clipped one by one instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hushfleet.array_api import Array, np
from hushfleet.methods.cost import RoundSetting
from hushfleet.methods.local import PersonalFirst, Sgd
from hushfleet.methods.method import Method, published
from hushfleet.methods.papers.feddpa import AgainstGlobal, FedDPAConfig, LengthPenalties
from hushfleet.methods.papers.fisher import ByFisher
from hushfleet.methods.stages import ClipLayers, Gaussian, LayerBounds, Transform
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.methods.state import PrivateArrays, RoundContext
    from hushfleet.privacy.noise import NoiseSource

_LEAST_ROOM = 1e-8
_LEAST_SHARE = 1e-3  # of a layer in the squared clip norm, before the shares are scaled to sum to 1
_LENGTH = "length"  # in the private arrays: float64 `[...]`, sum over the tensors of |2 q|


@dataclass(frozen=True, kw_only=True)
class FedADDPConfig(FedDPAConfig):
    """Settings of the public code: the settings of FedDPA, and:

    :param beta: width of the interval for a parameter's change, both directions together, relative to its size.
    """

    beta: Annotated[float, Meta(gt=0, le=100)] = 0.1


@published(
    "fedaddp",
    FedADDPConfig,
    source="Guo et al., ICA3PP 2024, by its public code",
    summary="FedDPA with a clip threshold and noise for each parameter, by its own size",
    epoch=1,
)
def fedaddp(config: FedADDPConfig, privacy: PrivacySpec, rounds: int) -> Method:
    as_published = privacy.unit == "device" and privacy.as_published
    penalties = (LastLength if as_published else LengthPenalties)(config.lambda_1, config.lambda_2)
    return Method(
        ByFisher(config.fisher_threshold),
        Sgd(penalties=(penalties,), order=PersonalFirst(config.personal_epochs)),
        (NoiseBySize(config.beta),) if as_published else (AgainstGlobal(), ClipLayers(GlobalShares()), Gaussian()),
    )


@dataclass(frozen=True)
class NoiseBySize(Transform):
    """The published mechanism: each parameter's change is clipped to its room q, with noise in proportion to q."""

    beta: float
    adds_noise = True

    def raw(self, setting: RoundSetting) -> tuple[str, ...]:
        return ("bounds and noise that follow the personalized model",) if setting.noise_multiplier > 0 else ()

    def room(self, trained: Array) -> Array:
        """Returns q of each parameter, `[d]`."""
        return np.maximum(self.beta / 2 * np.abs(trained), np.float32(_LEAST_ROOM))

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Returns the change against the global model."""
        moved_before = context.start - context.global_params
        change = update + moved_before
        if math.isinf(context.setting.privacy.clip_norm):
            return change
        room = self.room(context.global_params + change)
        values = moved_before + np.clip(change - moved_before, -room, room)
        added = GaussianMechanism(context.setting.noise_multiplier)
        stds = 2 * math.sqrt(len(context.layout.sizes)) * added.noise_multiplier * room.astype(np.float64)
        return added.add_noise(values, stds, noise)

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        if math.isinf(context.setting.privacy.clip_norm):
            return {}
        room = self.room(trained)
        norms = [np.vecdot(room[part], room[part]) ** 0.5 for part in context.layout.slices.values()]
        return {_LENGTH: np.asarray(2 * sum(norms), np.float64)}


@dataclass(frozen=True)
class LastLength(LengthPenalties):
    """The published penalty: it pulls towards the sum of the rooms of the last round."""

    def length(self, context: RoundContext) -> Array | float:
        return context.state.private.get(_LENGTH, 0.0)


@dataclass(frozen=True)
class GlobalShares(LayerBounds):
    """The bounds under `strict`: each layer's share of C^2 is its share of the global model's squared norm."""

    def bounds(self, memory: PrivateArrays, global_params: Array, layout: ParamLayout) -> Array:
        squares = layer_norms(global_params, layout) ** 2
        total = squares.sum()
        shares = np.maximum(squares / total if total > 0 else np.ones_like(squares), _LEAST_SHARE)
        return (shares / shares.sum()) ** 0.5
