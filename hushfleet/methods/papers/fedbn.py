"""FedBN: the normalisation layers stay on the device; all other layers are averaged.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1: as FedAvg, but parameters of BatchNorm layers are neither sent nor replaced.

Clipping and noise of `[privacy]` are the same as in DP-FedAvg, on the shared layers only.

Reading: every device begins with the same normalisation layers, those of the initial global model. The global model
keeps them, because nobody sends any, so its accuracy says little: a device predicts with its own.
Reading: a normalisation layer is a layer whose `weight` has one dimension (a factor for each channel), or the shape of
its `bias` (LayerNorm over several dimensions): no linear, convolutional or recurrent layer and no embedding has either.
Deviation: they are GroupNorm, LayerNorm, RMSNorm or InstanceNorm. BatchNorm does not exist here, because its statistics
are a function of other samples; so there are no running statistics to keep.
Deviation: every device has the same weight. The paper weighs by sample count, which is a function of private data.
"""

from __future__ import annotations

from dataclasses import dataclass

from hushfleet.errors import Malformed
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.personal import Personal
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import PrivacySpec


@published(
    "fedbn",
    TrainingConfig,
    source="Li et al., ICLR 2021",
    summary="the normalisation layers stay on the device; the others are averaged",
)
def fedbn(config: TrainingConfig, privacy: PrivacySpec, rounds: int) -> Method:
    return Method(NormLayers(), stages=CLIP_AND_NOISE)


@dataclass(frozen=True)
class NormLayers(Personal):
    """The normalisation layers always stay the device's own."""

    def check(self, layout: ParamLayout) -> None:
        """Raises `Malformed` for a network without such a layer, or without any other."""
        found = len(self.kept(layout))
        if found in (0, len(layout.layers)):
            raise Malformed(
                f"method.name = 'fedbn': must be used with a network that has normalisation layers and others, such as "
                f"resnet8-gn; this one has {found} among its {len(layout.layers)} layers"
            )

    def kept(self, layout: ParamLayout) -> tuple[slice, ...]:
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        return tuple(slice(layer.start, layer.stop) for layer in layout.layers if _normalises(layer.name, shapes))


def _normalises(layer: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    weight, bias = shapes.get(f"{layer}.weight", ()), shapes.get(f"{layer}.bias")
    return len(weight) == 1 or weight == bias
