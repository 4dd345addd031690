"""What the network is trained on: the loss as data, which every runtime computes alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hushfleet.spec import require


@dataclass(frozen=True)
class Objective:
    """:param kind: `cross-entropy` with the labels, or that and a teacher's logits.
    :param temperature: of the distillation.
    :param non_target_weight: N of ACDP-pFSD's Eq. (8), for `decoupled-distillation`.
    """

    kind: Literal["cross-entropy", "distillation", "decoupled-distillation"] = "cross-entropy"
    temperature: float = 1.0
    non_target_weight: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.temperature <= 1000, "temperature", self.temperature, "in (0, 1000]")
        require(0 <= self.non_target_weight <= 1000, "non_target_weight", self.non_target_weight, "in [0, 1000]")

    @property
    def distills(self) -> bool:
        return self.kind != "cross-entropy"
