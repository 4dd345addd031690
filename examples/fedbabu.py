"""FedBABU with local noise: the head stays as it began; the layers below train, are clipped, noised and averaged.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, without its last
step, in which each device trains on for itself. The noise is that of DP-FedAvg. An example of a method: copy it to
hushfleet/methods/ and name it in METHODS there (docs/methods.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hushfleet.array_api import Array
from hushfleet.config.spec import require
from hushfleet.methods.method import TaskMethod, TrainingConfig
from hushfleet.methods.state import DeviceState, PublicState


@dataclass(frozen=True, kw_only=True)
class FedBABUConfig(TrainingConfig):
    """:param head_layers: how many layers at the end stay as they began."""

    head_layers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.head_layers >= 0, "head_layers", self.head_layers, "0 or more")


class FedBABU(TaskMethod):
    name = "fedbabu"
    source = "Oh, Kim, Yun, ICLR 2022"
    summary = "the last layers stay as they began; the rest trains, is clipped, noised and averaged"
    config_class = FedBABUConfig
    config: FedBABUConfig

    def init_state(self) -> DeviceState:
        """The head counts as personal, so that it is not sent."""
        layers, mask = self.layout.layers, np.zeros(self.layout.size, dtype=bool)
        for layer in layers[max(0, len(layers) - self.config.head_layers) :]:
            mask[layer.start : layer.stop] = True
        return DeviceState(PublicState(mask, 0))

    def passes(self, state: DeviceState) -> Sequence[Array | None]:
        """One, of all but the head."""
        return (~state.public.mask,)
