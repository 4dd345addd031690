"""PerFreezeClip: the head trains first, then the backbone; each sample's gradient is clipped to a moving threshold.

Zhang, Liu: "PerFreezeClip: Personalized Federated Learning Based on Adaptive Clipping", Electronics 13 (2024) 2739.
Freezing: Eqs. (2)-(4) and (10)-(11), Algorithm 1. adap_clip: Eqs. (5)-(8). Only the backbone is sent, Eq. (12). The
paper clips for stability and claims no privacy: this is `noise_multiplier = 0` with `clip_norm = inf`.

Privacy: with the unit `device` thresholds follow raw gradients, and so does a history with `history = "life"`. This is
not post-processing but part of the training, like the data and the personalized head. It costs nothing, because the
result of the training is clipped to C and noised as a whole afterwards, and the history itself never leaves the device.

Reading: the head stays on the device from round to round, as in FedRep, on which the paper builds; line 4 of
Algorithm 2 says that training begins with the global model, but Eq. (12) gives that model no head.
Reading: epochs count from 1 (Algorithm 2, line 5), and the backbone is frozen in epochs below tau times their number
(Algorithm 1, line 1): 8 of 10 at tau = 0.9. So the last epoch always trains the backbone, as Figure 7 needs, which has
tau = 0.9 with 2 epochs. Counted from 0 it would be 9 of 10: `freeze_ratio = 0.95` here.
Reading: norms are taken over the whole gradient: Eqs. (5) and (8) and line 9 of Algorithm 2 name no part, nor does
AutoClip (Seetharaman et al., 2020), from which the paper takes the percentile. A framework gives no gradient for frozen
parameters: `norms = "part"` follows this, with a history for each part, because the head's norms do not predict the
backbone's; `"mixed"` has one history for both, the head's steps before the backbone's.
Reading: the history P_0, P_1, ... starts again with each local training, because Eq. (5) counts iterations from 0;
`history = "life"` continues from round to round, as "historical gradient trends" may mean.
Reading: the percentile interpolates linearly between the two nearest values, as in AutoClip.
Deviation: with privacy unit `record` the threshold is fixed, the smaller of `privacy.clip_norm` and psi, because norms
of raw gradients may not influence what is sent; norms are then taken over the part that trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.learning.entries import ALL, Entries
from hushfleet.methods.heads import HeadFirstConfig
from hushfleet.methods.local import GradientRule, PersonalFirst, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, published
from hushfleet.methods.personal import Head
from hushfleet.methods.sparse import kept_count
from hushfleet.schema import Positive, Probability
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.batch import Batch
    from hushfleet.methods.state import PrivateArrays, RoundContext


@dataclass(frozen=True, kw_only=True)
class PerFreezeClipConfig(HeadFirstConfig):
    """The settings; the method's own defaults are from the paper's Section 5.1.2, for two classes per device. The paper
    trains with SGD of momentum 0.5 in batches of 10.

    :param freeze_ratio: tau: the backbone is frozen in the epochs 1, 2, ... below tau times their number.
    :param clipping: `adaptive` is adap_clip, `value` clips to psi, `none` does not clip.
    :param norms: which gradient is clipped, and measured by P_t of Eq. (5): the `whole` one; the `part` that trains,
        with a history for each part; `mixed`: the same with one history for both.
    :param history: `round`: P_0, P_1, ... starts again each round; `life`: the device keeps it, 8 bytes per batch.
    :param max_norm: psi, the largest threshold.
    :param percentile: T of Eq. (6).
    """

    freeze_ratio: Probability = 0.9
    clipping: Literal["adaptive", "value", "none"] = "adaptive"
    norms: Literal["whole", "part", "mixed"] = "whole"
    history: Literal["round", "life"] = "round"
    max_norm: Positive = 35.0
    percentile: Annotated[float, Meta(ge=0, le=100)] = 90.0
    local_epochs: Annotated[int, Meta(ge=2, le=1000)] = 10

    rules = {
        **HeadFirstConfig.rules,
        "method.freeze-ratio-trains-head": (
            lambda config: config.head_epochs <= 0,
            "freeze_ratio = {freeze_ratio!r}: must be above 1/{local_epochs} of the local epochs, since the head "
            "trains in those before",
        ),
    }

    @property
    def head_epochs(self) -> int:
        """The number of epochs in which the backbone is frozen."""
        return kept_count(self.freeze_ratio, self.local_epochs) - 1


@dataclass(frozen=True)
class ClippedSamples(GradientRule):
    """The mean of the samples' gradients, each clipped to psi, Eq. (8).

    :param max_norm: psi.
    :param whole: whether norms are taken over the whole gradient; else over the part that trains.
    """

    max_norm: float = math.inf
    whole: bool = True
    samples = True

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: PrivateArrays
    ) -> tuple[Any, Array, PrivateArrays]:
        return (*batch.clipped(params, self.max_norm, self.normed(batch)), memory)

    def normed(self, batch: Batch) -> Entries:
        """Returns the entries that count in a sample's norm: all, or the entries of the trained part."""
        return ALL if self.whole else batch.entries

    def by_record(self) -> GradientRule:
        """Returns a rule with a fixed threshold, because norms of raw gradients may not influence what is sent."""
        return GradientRule(record_bound=self.max_norm)


@dataclass(frozen=True)
class AdaptivelyClipped(ClippedSamples):
    """`ClippedSamples` with a threshold that follows the history of mean norms P_0, P_1, ..., Eqs. (5)-(7).

    :param percentile: T of Eq. (6).
    :param by_part: whether each part has a history of its own.
    :param lasts: whether the history continues from round to round.
    """

    percentile: float = 90.0
    by_part: bool = False
    lasts: bool = False

    @property
    def lasting(self) -> tuple[str, ...]:
        return tuple(f"norm_history_{part}" for part in range(2)) if self.lasts else ()

    def __call__(
        self, context: RoundContext, params: Array, batch: Batch, memory: PrivateArrays
    ) -> tuple[Any, Array, PrivateArrays]:
        """Returns the loss, the gradient and the history, `[..., t]`."""
        after, name = dict(memory), f"norm_history_{batch.part if self.by_part else 0}"

        def threshold(norms: Array) -> Array:
            """Returns C_t, `[..., 1]`."""
            xp = array_api.array_namespace(norms)
            mean = (xp.sum(norms, axis=-1) / batch.sizes)[..., None]
            after[name] = xp.concat((memory[name], mean), axis=-1) if name in memory else mean
            return xp.clip(percentile(after[name], self.percentile), max=self.max_norm)

        return (*batch.clipped(params, threshold, self.normed(batch)), after)


def percentile(values: Array, percent: float) -> Array:
    """Returns the percentile over the last axis, which is kept with one entry."""
    xp = array_api.array_namespace(values)
    ordered = xp.sort(values, axis=-1)
    place = (values.shape[-1] - 1) * percent / 100
    below = math.floor(place)
    above, share = min(below + 1, values.shape[-1] - 1), place - below
    return ordered[..., below : below + 1] * (1 - share) + ordered[..., above : above + 1] * share


@published(
    "perfreezeclip",
    PerFreezeClipConfig,
    source="Zhang, Liu, Electronics 2024",
    summary="head first, then the backbone, with adaptive clipping of each sample's gradient; the head stays",
)
def perfreezeclip(config: PerFreezeClipConfig, privacy: PrivacySpec, rounds: int) -> Method:
    psi, whole, gradient = config.max_norm, config.norms == "whole", GradientRule()
    if config.clipping == "value":
        gradient = ClippedSamples(max_norm=psi, whole=whole)
    elif config.clipping == "adaptive":
        parts, lasts = config.norms == "part", config.history == "life"
        gradient = AdaptivelyClipped(
            max_norm=psi, whole=whole, percentile=config.percentile, by_part=parts, lasts=lasts
        )
    return Method(Head(config.head_layers), Sgd(gradient, order=PersonalFirst(config.head_epochs)), CLIP_AND_NOISE)
