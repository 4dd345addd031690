"""PerFreezeClip: the head trains first and then the backbone, each sample's gradient clipped to a moving threshold.

Zhang, Liu: "PerFreezeClip: Personalized Federated Learning Based on Adaptive Clipping", Electronics 13 (2024) 2739.
Freezing: Eqs. (2)-(4) and (10)-(11), Algorithm 1. adap_clip: Eqs. (5)-(8). Only the backbone is sent, Eq. (12). The
paper clips for stability and claims no privacy: that is `noise_multiplier = 0` with `clip_norm = inf`.

Reading: the head stays on the device from round to round, as in FedRep, on which the paper builds; line 4 of
Algorithm 2 says that training begins with the global model, of which Eq. (12) makes no head.
Reading: the backbone is frozen in the epochs e = 0, 1, ... below tau times their number, but never in the last one: the
paper's Figure 7 has tau = 0.9 with 2 epochs, where it would not train at all.
Reading: norms are those of the part that trains, as a framework gives no gradient for frozen parameters.
Reading: the history P_0, P_1, ... begins anew with each local training, where Algorithm 2 has it, and runs on when the
backbone takes over from the head.
Reading: the percentile interpolates linearly between the two nearest values, as in AutoClip (Seetharaman et al., 2020),
from which the paper takes it.
Deviation: with privacy unit `record` the threshold is fixed, the smaller of `privacy.clip_norm` and psi, since norms of
raw gradients may not steer what is sent; norms are then those of the whole gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from hushfleet import array_api
from hushfleet.config.spec import require
from hushfleet.methods.base import Array, BatchGradient, DeviceState, RoundTerms
from hushfleet.methods.heads import HeadFirst, HeadFirstConfig

_NORMS = "norms"  # in the batch's memory: P_0, P_1, ..., `[..., t]`


@dataclass(frozen=True, kw_only=True)
class PerFreezeClipConfig(HeadFirstConfig):
    """The method's own settings are those of the paper's Section 5.1.2, for two classes a device; the paper trains with
    SGD of momentum 0.5 in batches of 10.

    :param freeze_ratio: tau, the share of the epochs in which the backbone is frozen.
    :param clipping: `adaptive` is adap_clip, `value` clips to psi, `none` not at all.
    :param max_norm: psi, the largest threshold.
    :param percentile: T of Eq. (6).
    """

    freeze_ratio: float = 0.9
    clipping: Literal["adaptive", "value", "none"] = "adaptive"
    max_norm: float = 35.0
    percentile: float = 90.0
    local_epochs: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.freeze_ratio < 1, "freeze_ratio", self.freeze_ratio, "in (0, 1)")
        require(self.max_norm > 0, "max_norm", self.max_norm, "positive")
        require(0 <= self.percentile <= 100, "percentile", self.percentile, "in [0, 100]")
        require(self.local_epochs >= 2, "local_epochs", self.local_epochs, "2 or more: the head's and the backbone's")


class PerFreezeClip(HeadFirst):
    name = "perfreezeclip"
    source = "Zhang, Liu, Electronics 2024"
    summary = "head first, then the backbone, with adaptive clipping of each sample's gradient; the head stays"
    config_class = PerFreezeClipConfig
    config: PerFreezeClipConfig

    @property
    def head_epochs(self) -> int:
        epochs = self.config.local_epochs
        frozen = math.ceil(self.config.freeze_ratio * epochs - 1e-9)  # 0.07 * 100 is above 7
        return min(frozen, epochs - 1)

    def clip_norm(self, terms: RoundTerms) -> float:
        bound = super().clip_norm(terms)
        if self.privacy.unit == "record" and self.config.clipping != "none":
            return min(bound, self.config.max_norm)
        return bound

    def gradient(self, state: DeviceState, start: Array, params: Array, batch: BatchGradient) -> tuple[Any, Array]:
        """The mean of the samples' clipped gradients, Eq. (8), on the part that trains."""
        if self.config.clipping == "none" or self.privacy.unit == "record":
            return batch.mean(params)
        return batch.clipped(params, lambda norms: self._threshold(norms, batch))

    def _threshold(self, norms: Array, batch: BatchGradient) -> Array | float:
        """C_t, `[..., 1]`: Eqs. (5)-(7)."""
        if self.config.clipping == "value":
            return self.config.max_norm
        xp = array_api.array_namespace(norms)
        history = (xp.sum(norms, axis=-1) / batch.sizes)[..., None]
        if _NORMS in batch.memory:
            history = xp.concat((batch.memory[_NORMS], history), axis=-1)
        batch.memory[_NORMS] = history
        return xp.clip(_percentile(history, self.config.percentile, xp), max=self.config.max_norm)


def _percentile(values: Array, percent: float, xp: Any) -> Array:
    """Over the last axis, which is kept as one entry."""
    ordered = xp.sort(values, axis=-1)
    place = (values.shape[-1] - 1) * percent / 100
    below = math.floor(place)
    above, share = min(below + 1, values.shape[-1] - 1), place - below
    return ordered[..., below : below + 1] * (1 - share) + ordered[..., above : above + 1] * share
