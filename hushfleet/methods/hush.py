"""Hush: trains a small shared head on public features, for many devices with few images each.

The features are fixed and need no private data (`models/features`), so only one linear layer is learned. In each round
a device takes a few steps of plain gradient descent on all its images, from the global head and with the logarithm of
its own label shares as bias. It sends the difference, scaled to norm exactly C, with noise. The server adds up; the
task ends with the mean of the last third of the iterates. C falls in that third, because later rounds weigh less there.

Fixed features and a linear head: Tramèr, Boneh: "Differentially Private Learning Needs Better Features (or Much More
Data)", ICLR 2021. Noised sums: McMahan et al., ICLR 2018. Sums of masked integers: Bell et al.: "Secure Single-Server
Aggregation with (Poly)Logarithmic Overhead", CCS 2020, and Kairouz, Liu, Steinke: "The Distributed Discrete Gaussian
Mechanism", ICML 2021. A device can adapt the head for itself at no privacy cost: Jain et al.: "Differentially Private
Model Personalization", NeurIPS 2021; Liu, Hu, Wu, Smith: "On Privacy and Personalization in Cross-Silo Federated
Learning", NeurIPS 2022.

The steps, their rate, the scaling, the label prior and the rule for rounds and clip norm (`hush_rule`) are Hushfleet's
own, measured by `benchmarks/private_gain.py`.

With `privacy.unit = "record"` each image's gradient is clipped and noised instead, and label counts are not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hushfleet.array_api import Array, array_namespace, np
from hushfleet.errors import Malformed, PrivacyError
from hushfleet.methods.hush_rule import falling, rule
from hushfleet.methods.local import Sgd, SharedOnly
from hushfleet.methods.method import BatchSize, Epochs, LearningRate, Method, Momentum, TrainingConfig, published
from hushfleet.methods.personal import Personal
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.stages import Gaussian, ScaleWhole
from hushfleet.params import ParamLayout
from hushfleet.wire.format.spec import UNIT_NORM, PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.own_samples import OwnSamples
    from hushfleet.methods.state import DeviceState

SMOOTHING = 1.0  # samples that are added to each class before the logarithm is taken


@dataclass(frozen=True, kw_only=True)
class HushConfig(TrainingConfig):
    """Settings of Hush: full-batch gradient descent on features of norm 1.

    :param batch_size: larger than the number of a device's images, so that a step uses all of them.
    :param momentum_server: of Nesterov's velocity on the server, for many small steps with the unit `record`.
    """

    optimizer: Literal["adam", "sgd"] = "sgd"
    learning_rate: LearningRate = 16.0
    batch_size: BatchSize = 2048
    local_epochs: Epochs = 5
    momentum_server: Momentum = 0.0


@published(
    "hush",
    HushConfig,
    source="Hushfleet; Tramèr and Boneh, ICLR 2021",
    summary="a linear head on public features: own label prior, update scaled to the clip norm, mean of late iterates",
    steps=rule,
    features=UNIT_NORM,
)
def hush(config: HushConfig, privacy: PrivacySpec, rounds: int) -> Method:
    if math.isinf(privacy.clip_norm):
        raise PrivacyError('method.name = "hush" scales updates to privacy.clip_norm, which must be finite')
    noise_multiplier = privacy.noise_multiplier if privacy.unit == "device" else 0.0
    return Method(
        OwnPrior(),
        Sgd(order=SharedOnly()),
        (ScaleWhole(), Gaussian()),
        TailMean(rounds, config.momentum_server, privacy.clip_norm, noise_multiplier),
        takes_empty=True,
    )


@dataclass(frozen=True)
class OwnPrior(Personal):
    """The last tensor, the bias of the logits, is the device's own: the logarithm of its smoothed label shares."""

    of_classes, reads_own = True, False

    def check(self, layout: ParamLayout) -> None:
        """Raises `Malformed` if the network does not end with a bias."""
        if len(layout.shapes[-1]) != 1:
            raise Malformed(
                f'method.name = "hush" needs a network that ends with one bias for each class, and '
                f'{layout.names[-1]!r} has the shape {list(layout.shapes[-1])}; take model.name = "linear"'
            )

    def kept(self, layout: ParamLayout) -> tuple[slice, ...]:
        """Returns the entries of the last bias."""
        self.check(layout)
        return (layout.slices[layout.names[-1]],)

    def start(
        self, state: DeviceState, global_params: Array, chosen: Array | None, samples: OwnSamples, layout: ParamLayout
    ) -> Array:
        begin: np.ndarray = global_params.copy()
        prior = begin[layout.slices[layout.names[-1]]]
        shares = samples.label_counts(len(prior)) + SMOOTHING
        prior[...] = np.log(shares / shares.sum())
        return begin

    def by_record(self) -> Personal:
        return FirstPrior()


class FirstPrior(OwnPrior):
    """The last tensor stays as in the first model, because label counts may not be used."""

    begins_alike, reads_own = True, False

    def start(
        self, state: DeviceState, global_params: Array, chosen: Array | None, samples: OwnSamples, layout: ParamLayout
    ) -> Array:
        return global_params


@dataclass(frozen=True)
class TailMean(ServerHalf):
    """The mean of the sent values; at the end, the mean of the global vectors of the last third of the rounds.

    :param rounds: of the task.
    :param momentum: of the server's steps, in Nesterov's form as in PyTorch: v <- m v + g, w <- w + g + m v for
        the mean g of the sent values.
    :param clip_norm: of the task.
    :param noise_multiplier: of the task, for updates; 0: the clip norm does not fall.
    """

    rounds: int
    momentum: float = 0.0
    clip_norm: float = math.inf
    noise_multiplier: float = 0.0

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        """Returns the round's clip norm and noise multiplier. All rounds together cost as much as with the task's own
        numbers."""
        if self.noise_multiplier == 0:
            return {}
        clip_norm, noise_multiplier = falling(self.rounds)[round - 1]
        return {"clip_norm": self.clip_norm * clip_norm, "noise_multiplier": self.noise_multiplier * noise_multiplier}

    def aggregate(self, state: ServerArrays, global_params: Array, sums: Array, weights: Array) -> Array:
        after = super().aggregate(state, global_params, sums, weights)
        if self.momentum == 0:
            return after
        velocity = after - global_params
        if "velocity" in state:
            xp = array_namespace(after)
            velocity = velocity + self.momentum * xp.asarray(state["velocity"], dtype=after.dtype, device=after.device)
        return after + self.momentum * velocity

    @property
    def averages_periods(self) -> bool:
        return self.noise_multiplier > 0

    def final(self, state: ServerArrays, last: np.ndarray) -> np.ndarray:
        mean: np.ndarray = (state.get("sum", 0.0) + last.astype(np.float64)) / (state.get("count", 0) + 1)
        return mean.astype(np.float32)

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        after = closed.after.astype(np.float64)
        if self.momentum:
            before, m = state.get("velocity", 0.0), self.momentum
            sent = (after - closed.before - m**2 * before) / (1 + m)  # from the rounded model, as devices have it
            state = {**state, "velocity": m * before + sent}
        if closed.round > self.rounds - math.ceil(self.rounds / 3):
            state = {**state, "sum": state.get("sum", 0.0) + after, "count": np.asarray(state.get("count", 0) + 1)}
        return state
