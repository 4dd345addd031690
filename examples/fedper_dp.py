"""FedPer with local noise: the last layers stay on the device, the others are clipped, noised and averaged.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019; the noise is that of
DP-FedAvg. An example of a method: copy it to hushfleet/methods/ and name it in METHODS there (docs/methods.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hushfleet.methods.base import DeviceState, Method, PublicState, TrainingConfig
from hushfleet.spec import require


@dataclass(frozen=True, kw_only=True)
class FedPerConfig(TrainingConfig):
    """:param personal_layers: K_P of the paper, how many layers at the end are personal."""

    personal_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.personal_layers >= 0, "personal_layers", self.personal_layers, "0 or more")


class FedPerDP(Method):
    name = "fedper-dp"
    source = "Arivazhagan et al., 2019"
    summary = "the last layers stay on the device; the rest is clipped, noised and averaged"
    config_class = FedPerConfig
    config: FedPerConfig

    def init_state(self) -> DeviceState:
        layers, mask = self.layout.layers, np.zeros(self.layout.size, dtype=bool)
        for layer in layers[max(0, len(layers) - self.config.personal_layers) :]:
            mask[layer.start : layer.stop] = True
        return DeviceState(PublicState(mask, 0))
