"""FedBABU with local noise: the head keeps its initial values; layers below train, are clipped, noised and averaged.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, without its last
step, in which each device continues training alone. The noise is the same as in DP-FedAvg. This is an example of a
method outside the package (docs/methods.md):

    hushfleet simulate examples/fedbabu.toml --method examples/fedbabu.py:fedbabu
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.methods.local import Sgd, SharedOnly
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.personal import Head
from hushfleet.schema import AtLeast1
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True, kw_only=True)
class FedBABUConfig(TrainingConfig):
    """Settings of FedBABU.

    :param head_layers: number of layers at the end that keep their initial values.
    """

    head_layers: AtLeast1 = 1


@published(
    "fedbabu",
    FedBABUConfig,
    source="Oh, Kim, Yun, ICLR 2022",
    summary="the last layers stay as they began; the rest trains, is clipped, noised and averaged",
)
def fedbabu(config: FedBABUConfig, privacy: PrivacySpec, rounds: int) -> Method:
    """Makes the head personal, so that it is not sent, and does not train personal layers."""
    return Method(Head(config.head_layers), Sgd(order=SharedOnly()), CLIP_AND_NOISE)
