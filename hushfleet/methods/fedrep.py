"""FedRep: each round trains the personal head first, then the shared backbone below it.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021, Algorithm 1: tau updates of the head with the representation held fixed, then of the representation with the
head held fixed. Clip and noise of `[privacy]` are those of DP-FedAvg, on the backbone alone.

Reading: an update is an epoch, as in the paper's experiments (10 epochs of the head, then 1 or 5 of the backbone).
Reading: the device's own model is its head and the backbone that it trained in the same round, so the head has not
seen that backbone's last step. What it predicts with after aggregation is its head on the new global backbone.
Deviation: every device has the same weight. The paper's is 1/n of the cohort too, but its code weighs by sample count.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.config.spec import require
from hushfleet.methods.heads import HeadFirst, HeadFirstConfig


@dataclass(frozen=True, kw_only=True)
class FedRepConfig(HeadFirstConfig):
    """:param head_epochs: how many of the local epochs train the head; the others, the backbone."""

    head_epochs: int = 1
    local_epochs: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            1 <= self.head_epochs < self.local_epochs,
            "head_epochs",
            self.head_epochs,
            f"1 or more, and below the {self.local_epochs} local epochs, since the backbone trains in the others",
        )


class FedRep(HeadFirst):
    name = "fedrep"
    source = "Collins et al., ICML 2021"
    summary = "the last layers stay on the device and train first; the others follow and are averaged"
    config_class = FedRepConfig
    config: FedRepConfig

    @property
    def head_epochs(self) -> int:
        return self.config.head_epochs
