"""Parameters that are important for a device's own data: the diagonal of the Fisher information, normalised by parts.

FedDPA, FedADDP and DP-FedSim start a parameter from the device's own value where its normalised value is high. With the
unit `device` all that this decides lies before the clipping and the noise, and the charge covers it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hushfleet.array_api import Array
from hushfleet.gradients.own_samples import OwnSamples
from hushfleet.methods.personal import Personal
from hushfleet.methods.state import DeviceState, PrivateArrays, RoundContext
from hushfleet.params import ParamLayout

Normalisation = Literal["min-max", "sum"]
MOVED = "moved"  # the last update, float32 `[d]`, in the private arrays


@dataclass(frozen=True)
class ByFisher(Personal):
    """All entries are shared; in each round those of high Fisher values start from the device's own.

    :param threshold: from which normalised value on.
    :param by: each tensor or each layer is normalised by itself.
    :param how: of `normalised`.
    :param inclusive: whether the threshold itself is enough.
    :param newcomers: whether a device without a model of its own chooses too, on the global one.
    :param from_updates: squares of the last update stand for Fisher values.
    """

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
        """Fisher values of raw data would be an uncharged look at them; the last update is noised already."""
        return ByFisher(self.threshold, self.by, self.how, self.inclusive, self.newcomers, from_updates=True)


def normalised(fisher: Array, parts: Iterable[slice], how: Normalisation) -> Array:
    """Each part of `fisher [d]`, which is not negative, on a scale of its own.

    :param parts: layers or tensors; together they cover the vector.
    :param how: `min-max` sends a part's smallest value to 0 and its largest to 1; `sum` divides by the part's sum.
        A part whose values are all alike, or all zero, becomes 0 by the first; by the second only the latter does.
    """
    out = np.empty_like(fisher)
    for part in parts:
        values = fisher[part] - fisher[part].min() if how == "min-max" else fisher[part]
        scale = values.max() if how == "min-max" else values.sum()
        out[part] = values / scale if scale > 0 else values
    return out
