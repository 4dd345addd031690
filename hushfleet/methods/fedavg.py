"""FedAvg: the mean of the devices' updates, without clipping or noise.

McMahan, Moore, Ramage, Hampson, Agueera y Arcas: "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017, Algorithm 1.

Deviation: every device has the same weight. The paper weighs by sample count, which is a function of
private data and is not sent.
"""

from __future__ import annotations

from hushfleet import array_api
from hushfleet.methods.base import Array, DeviceState, Method, Release, RoundTerms
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.noise import NoiseSource


class FedAvg(Method):
    name = "fedavg"
    source = "McMahan et al., AISTATS 2017"
    summary = "mean of the updates; no clipping, no noise, no privacy"
    clips = False

    def noise_multiplier(self, terms: RoundTerms) -> float:
        return 0.0 if self.privacy.unit == "device" else super().noise_multiplier(terms)

    def protect(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        xp = array_api.array_namespace(update)
        norms = layer_norms(update, self.layout)
        unbounded = xp.full_like(norms, float("inf"))
        return Release(update, unbounded, xp.zeros_like(norms), self.charge(terms))
