"""Finds parameters that are important for a device's own data: normalised diagonal of the Fisher information.

FedDPA, FedADDP and DP-FedSim start a parameter from the device's own value if its normalised Fisher value is high. With
the unit `device` this decision comes before the clipping and the noise, so the charge covers it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hushfleet.array_api import Array, np
from hushfleet.methods.personal import Personal
from hushfleet.params import ParamLayout

if TYPE_CHECKING:
    from hushfleet.learning.own_samples import OwnSamples
    from hushfleet.methods.state import DeviceState, PrivateArrays, RoundContext

Normalisation = Literal["min-max", "sum"]
MOVED = "moved"  # the last update, float32 `[d]`, in the private arrays


@dataclass(frozen=True)
class ByFisher(Personal):
    """All entries are shared; in each round, entries with high Fisher values start from the device's own values.

    :param threshold: the smallest normalised value that counts as high.
    :param by: each tensor or each layer is normalised separately.
    :param how: as in `normalised`.
    :param inclusive: whether the threshold itself is high enough.
    :param newcomers: whether a device without its personalized model chooses too, based on the global one.
    :param from_updates: squares of the last update replace Fisher values.
    """

    remembers_sent = False
    threshold: float
    by: Literal["tensor", "layer"] = "tensor"
    how: Normalisation = "min-max"
    inclusive: bool = False
    newcomers: bool = True
    from_updates: bool = False

    def choose(
        self, state: DeviceState, global_params: Array, samples: OwnSamples, layout: ParamLayout
    ) -> Array | None:
        if state.own is None and not self.newcomers:
            return None
        at = global_params if state.own is None else state.own
        moved = state.private.get(MOVED, np.zeros_like(at))
        fisher = moved**2 if self.from_updates else samples.squared_gradient(at)
        tensors, layers = layout.slices.values(), [slice(layer.start, layer.stop) for layer in layout.layers]
        share = normalised(fisher, tensors if self.by == "tensor" else layers, self.how)
        return share >= self.threshold if self.inclusive else share > self.threshold

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        return {MOVED: update} if self.from_updates else {}

    def by_record(self) -> ByFisher:
        """Returns the choice by the last update, which has noise; Fisher values of raw data would not be charged."""
        return ByFisher(self.threshold, self.by, self.how, self.inclusive, self.newcomers, from_updates=True)


def normalised(fisher: Array, parts: Iterable[slice], how: Normalisation) -> Array:
    """Returns `fisher [d]`, which is not negative, with each part normalised separately.

    :param parts: layers or tensors; together they cover the vector.
    :param how: `min-max` maps a part's smallest value to 0 and its largest to 1; `sum` divides by the part's sum.
        With `min-max` a part with equal values becomes 0; with `sum` only a part of zeros does.
    """
    out = np.empty_like(fisher)
    for part in parts:
        values = fisher[part] - fisher[part].min() if how == "min-max" else fisher[part]
        scale = values.max() if how == "min-max" else values.sum()
        out[part] = values / scale if scale > 0 else values
    return out
