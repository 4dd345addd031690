"""FedADDP: FedDPA's parts and penalties, with a clip threshold and noise for each parameter by itself.

Guo, Zhang, Mu, Li, Dong, Li: "FedADDP: Privacy-Preserving Personalized Federated Learning with Adaptive Dimensional
Differential Privacy", ICA3PP 2024. The paper's text was not at hand; this follows its authors' public code
(yyguo-xdu/FedADDP).

Parameter j of the trained model may lie at most q_j = (beta / 2) |w_j| away from where the round began with it, and
gets noise of standard deviation sqrt(M) sigma 2 q_j, where M is the number of tensors. The device sends its whole model
so, as its difference from the global one; personal parameters are among them. The length that FedDPA's second penalty
pulls towards is the sum over the tensors of the norms |2 q| of the device's last round, 0 in its first.

Reading: w_j is the trained model's. The code takes the model before the last batch, less the learning rate times the
last gradient, which under Adam is neither the model before that batch nor the one after it.
Reading: a parameter that is exactly 0 would have neither room nor noise; no q is below 1e-8.
Reading: noise is not divided among the devices, nor is it in the code.
Reading: the abstract's "global consistency regularization" is taken to be the second penalty, and its "GlobalRobust
Loss" cross-entropy, since the code has no other.
Reading: with `clip_norm = inf` nothing is clipped and the length is 0, as the code's `no_clip`; otherwise `clip_norm`
has no part as published.
Deviation: every device has the same weight. The code weighs by sample count, which is not sent.
Deviation: the code finds its noise by sigma = sqrt(T a / (2 (epsilon + ln(delta) / (a - 1)))) with
a = ceil(log2(1 / delta) / epsilon + 1); here `privacy` gives sigma.
As published, no epsilon holds. Where the noise is centred and how wide it is follow the device's own model, and so its
data; and d parameters, each bounded by its own q, make a sensitivity that grows with sqrt(d), which sqrt(M) does not
pay for. The ledger says that nothing is protected, although noise is added.
Deviation: `accounting = "strict"` takes the thresholds from the global model, which everybody has, and for layers,
since the codec's steps and the aggregator's checks are by layers: layer l of the change against the global model is
clipped to C_l = C |g_l| / |g|, with noise sqrt(L) sigma C_l. Its ledger holds with the multiplier sigma. The length of
the penalty is C.
Deviation: with the unit `record`, squares of the last update stand for the Fisher values, as in `feddpa`, and records
are clipped one by one instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hushfleet import array_api
from hushfleet.config.spec import require
from hushfleet.methods.base import Array, DeviceState, Release, RoundTerms
from hushfleet.methods.feddpa import FedDPA, FedDPAConfig
from hushfleet.methods.fisher import GLOBAL, started
from hushfleet.privacy.clipping import clip_layers, layer_norms
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import NoiseSource

_LEAST_ROOM = 1e-8
_LEAST_SHARE = 1e-3  # of a layer in the squared clip norm, before they are made to sum to 1
_LENGTH = "length"  # in `private`: float64 `[...]`, sum over the tensors of |2 q|


@dataclass(frozen=True, kw_only=True)
class FedADDPConfig(FedDPAConfig):
    """Settings of the public code; those of FedDPA, and:

    :param beta: room of a parameter for its change, both ways together, as a part of its own size.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.beta <= 100, "beta", self.beta, "in (0, 100]")


class FedADDP(FedDPA):
    name = "fedaddp"
    source = "Guo et al., ICA3PP 2024, by its public code"
    summary = "FedDPA with a clip threshold and noise for each parameter, by its own size"
    config_class = FedADDPConfig
    config: FedADDPConfig

    @property
    def exposed(self) -> bool:
        """Whether the code's noise is added, which protects nothing that could be charged for."""
        return self.privacy.unit == "device" and self.privacy.accounting == "as-published"

    @property
    def clips(self) -> bool:
        """Whether what is sent is bounded by the clip norm."""
        return not self.exposed

    def raw_values(self, terms: RoundTerms) -> tuple[str, ...]:
        noised = self.exposed and self.noise_multiplier(terms) > 0
        return ("bounds and noise that follow the own model",) if noised else ()

    def room(self, trained: Array) -> Array:
        """q of each parameter, `[..., d]`."""
        xp = array_api.array_namespace(trained)
        return xp.clip(self.config.beta / 2 * xp.abs(trained), min=_LEAST_ROOM)

    def length(self, state: DeviceState) -> Array | float:
        return state.private.get(_LENGTH, 0.0) if self.exposed else super().length(state)

    def mechanism(self, terms: RoundTerms) -> GaussianMechanism:
        """What is charged for: nothing as published."""
        return GaussianMechanism(0.0 if self.exposed else self.noise_multiplier(terms))

    def protect(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        """:param update: trained model minus global model, as `release` of FedDPA hands it on."""
        if not self.exposed:
            return self._by_layers(state, update, terms, noise)
        xp = array_api.array_namespace(update)
        values = update
        if math.isfinite(self.privacy.clip_norm):
            anchor = state.private.get(GLOBAL, xp.zeros_like(update))
            room = self.room(anchor + update)
            moved_before = started(state, anchor) - anchor if GLOBAL in state.private else xp.zeros_like(update)
            values = moved_before + xp.minimum(xp.maximum(update - moved_before, -room), room)
            added = GaussianMechanism(self.noise_multiplier(terms))
            stds = 2 * math.sqrt(len(self.layout.sizes)) * added.noise_multiplier * xp.astype(room, xp.float64)
            values = added.add_noise(values, stds, noise)
        norms = layer_norms(values, self.layout)
        return Release(values, xp.full_like(norms, math.inf), xp.zeros_like(norms), self.charge(terms))

    def advance(self, state: DeviceState, *, update: Array, trained: Array, sent: Array) -> DeviceState:
        after = super().advance(state, update=update, trained=trained, sent=sent)
        if not self.exposed or math.isinf(self.privacy.clip_norm):
            return after
        xp = array_api.array_namespace(trained)
        room = self.room(trained)
        norms = [xp.vecdot(room[..., part], room[..., part]) ** 0.5 for part in self.layout.slices.values()]
        length = xp.asarray(2 * sum(norms))  # a scalar of NumPy is no array
        return replace(after, private=dict(after.private, **{_LENGTH: xp.astype(length, xp.float64)}))

    def _by_layers(self, state: DeviceState, change: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        xp = array_api.array_namespace(change)
        squares = layer_norms(state.private.get(GLOBAL, xp.ones_like(change)), self.layout) ** 2
        total = xp.sum(squares, axis=-1, keepdims=True)
        shares = xp.where(total > 0, squares / xp.where(total > 0, total, 1.0), xp.ones_like(squares))
        shares = xp.clip(shares, min=_LEAST_SHARE)
        bounds = self.clip_norm(terms) * (shares / xp.sum(shares, axis=-1, keepdims=True)) ** 0.5
        mechanism = self.mechanism(terms)
        stds = mechanism.layer_stds(bounds)
        values = mechanism.add_noise(clip_layers(change, self.layout, bounds), stds, noise, layout=self.layout)
        return Release(values, bounds, stds, self.charge(terms))
