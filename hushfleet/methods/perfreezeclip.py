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
from hushfleet.array_api import Array
from hushfleet.config.spec import PrivacySpec
from hushfleet.methods.heads import HeadFirstConfig
from hushfleet.methods.local import MeanGradient, PersonalFirst, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, published, within
from hushfleet.methods.personal import Head
from hushfleet.methods.state import RoundContext, kept_count
from hushfleet.training.batch import Batch


@dataclass(frozen=True, kw_only=True)
class PerFreezeClipConfig(HeadFirstConfig):
    """The method's own settings are those of the paper's Section 5.1.2, for two classes a device; the paper trains with
    SGD of momentum 0.5 in batches of 10.

    :param freeze_ratio: tau, the share of the epochs in which the backbone is frozen.
    :param clipping: `adaptive` is adap_clip, `value` clips to psi, `none` not at all.
    :param max_norm: psi, the largest threshold.
    :param percentile: T of Eq. (6).
    """

    freeze_ratio: float = within("(0, 1)", 0.9)
    clipping: Literal["adaptive", "value", "none"] = "adaptive"
    max_norm: float = within("(0, inf)", 35.0)
    percentile: float = within("[0, 100]", 90.0)
    local_epochs: int = within("[2, 1000]", 10)


@dataclass(frozen=True)
class ClippedSamples(MeanGradient):
    """The mean of the samples' clipped gradients, Eq. (8), on the part that trains.

    :param max_norm: psi.
    :param percentile: T of Eq. (6); None clips to psi.
    """

    max_norm: float = math.inf
    percentile: float | None = None
    samples = True

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: tuple[Array, ...]
    ) -> tuple[Any, Array, tuple[Array, ...]]:
        """It remembers P_0, P_1, ..., `[..., t]`."""
        percent, after = self.percentile, memory
        if percent is None:
            return (*batch.clipped(params, lambda norms: self.max_norm), memory)

        def threshold(norms: Array) -> Array:
            """C_t, `[..., 1]`: Eqs. (5)-(7)."""
            nonlocal after
            xp = array_api.array_namespace(norms)
            mean = (xp.sum(norms, axis=-1) / batch.sizes)[..., None]
            after = (xp.concat((*memory, mean), axis=-1),)
            return xp.clip(percentile(after[0], percent), max=self.max_norm)

        loss, gradient = batch.clipped(params, threshold)
        return loss, gradient, after

    def by_record(self) -> MeanGradient:
        """A fixed threshold: norms of raw gradients may not steer what is sent."""
        return MeanGradient(record_bound=self.max_norm)


def percentile(values: Array, percent: float) -> Array:
    """Over the last axis, which is kept as one entry."""
    xp = array_api.array_namespace(values)
    ordered = xp.sort(values, axis=-1)
    place = (values.shape[-1] - 1) * percent / 100
    below = math.floor(place)
    above, share = min(below + 1, values.shape[-1] - 1), place - below
    return ordered[..., below : below + 1] * (1 - share) + ordered[..., above : above + 1] * share


def head_epochs(config: PerFreezeClipConfig) -> int:
    """In how many epochs the backbone is frozen."""
    return min(kept_count(config.freeze_ratio, config.local_epochs), config.local_epochs - 1)


@published(
    "perfreezeclip",
    PerFreezeClipConfig,
    source="Zhang, Liu, Electronics 2024",
    summary="head first, then the backbone, with adaptive clipping of each sample's gradient; the head stays",
)
def perfreezeclip(config: PerFreezeClipConfig, privacy: PrivacySpec, rounds: int) -> Method:
    gradient = {
        "adaptive": ClippedSamples(max_norm=config.max_norm, percentile=config.percentile),
        "value": ClippedSamples(max_norm=config.max_norm),
        "none": MeanGradient(),
    }[config.clipping]
    return Method(Head(config.head_layers), Sgd(gradient, order=PersonalFirst(head_epochs(config))), CLIP_AND_NOISE)
