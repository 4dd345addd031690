"""FedBABU with local noise: the head stays as it began; the layers below train, are clipped, noised and averaged.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, without its last
step, in which each device trains on for itself. The noise is that of DP-FedAvg. An example of a method outside of the
package (docs/methods.md):

    hushfleet simulate examples/fedbabu.toml --method examples/fedbabu.py:fedbabu
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.config.spec import PrivacySpec
from hushfleet.methods.local import Sgd, SharedOnly
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published, within
from hushfleet.methods.personal import Head


@dataclass(frozen=True, kw_only=True)
class FedBABUConfig(TrainingConfig):
    """Settings of FedBABU.

    :param head_layers: how many layers at the end stay as they began.
    """

    head_layers: int = within("[1, inf)", 1)


@published(
    "fedbabu",
    FedBABUConfig,
    source="Oh, Kim, Yun, ICLR 2022",
    summary="the last layers stay as they began; the rest trains, is clipped, noised and averaged",
)
def fedbabu(config: FedBABUConfig, privacy: PrivacySpec, rounds: int) -> Method:
    """The head counts as personal, so that it is not sent; and what is personal does not train."""
    return Method(Head(config.head_layers), Sgd(order=SharedOnly()), CLIP_AND_NOISE)
