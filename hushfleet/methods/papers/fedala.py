"""FedALA: a device starts between its own model and the global one, by weights that it learns on its own samples.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023, Algorithm 1, as in its public code (TsingZ0/FedALA). With the global model g and the device's last model u:

    lower layers           start = g
    last `layers` layers   start = u + (g - u) W,    W <- clip(W - eta (g - u) gradient(start), 0, 1)    for each batch

W begins with ones and is kept. When W is first learned, passes are repeated until the loss of their last batches stands
still; later there is one pass. Then the device trains all of the start, and sends its change against the global model,
clipped as a whole and noised. W and u stay on the device.

Reading: a pass takes the share `share` of the samples, in their order and from another place in each round. The code
draws the place at random.
Deviation: the passes of the first time end after `first_passes` in any case.
Deviation: every device has the same weight. The code weighs by sample count, which is not sent.
Not with the unit `record`: W is learned by gradients without noise, and what is sent depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hushfleet.array_api import Array, np
from hushfleet.errors import PrivacyError
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.papers.feddpa import AgainstGlobal
from hushfleet.methods.personal import Personal
from hushfleet.params import ParamLayout
from hushfleet.schema import AtLeast1, Share
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.learning.own_samples import OwnSamples
    from hushfleet.methods.state import DeviceState, PrivateArrays

_WEIGHTS = "weights"
_LAST, _STILL = 10, 0.1


@dataclass(frozen=True, kw_only=True)
class FedALAConfig(TrainingConfig):
    """Settings of the public code.

    :param layers: p, the number of last layers whose start is weighed.
    :param weights_learning_rate: eta.
    :param share: s, the share of the samples in a pass.
    :param first_passes: the largest number of passes when the weights are first learned.
    """

    layers: AtLeast1 = 1
    weights_learning_rate: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    share: Share = 0.8
    first_passes: Annotated[int, Meta(ge=1, le=1000)] = 50


@published(
    "fedala",
    FedALAConfig,
    source="Zhang et al., AAAI 2023",
    summary="starts between the own model and the global one, by weights learned on the own samples",
)
def fedala(config: FedALAConfig, privacy: PrivacySpec, rounds: int) -> Method:
    how = config.weights_learning_rate, config.share, config.batch_size, config.first_passes
    return Method(LearnedStart(config.layers, *how), stages=(AgainstGlobal(), *CLIP_AND_NOISE))


@dataclass(frozen=True)
class LearnedStart(Personal):
    """All entries are shared; the start of the last layers lies between the own and the global values."""

    layers: int
    learning_rate: float
    share: float
    batch_size: int
    first_passes: int

    def begin(
        self, state: DeviceState, global_params: Array, chosen: Array | None, samples: OwnSamples, layout: ParamLayout
    ) -> tuple[Array, PrivateArrays]:
        if state.own is None:
            return global_params, {}
        weighed = slice(layout.layers[-min(self.layers, len(layout.layers))].start, layout.size)
        own, start = state.own[weighed], global_params.copy()
        apart = global_params[weighed] - own
        weights, losses = state.private.get(_WEIGHTS, np.ones_like(apart)), list[float]()
        start[weighed] = own + apart * weights
        while len(losses) < (1 if _WEIGHTS in state.private else self.first_passes) and not _stands_still(losses):
            for indices in self._batches(samples.count, state.public.participations):
                loss, gradient = samples.gradient(start, indices)
                weights = np.clip(weights - self.learning_rate * gradient[weighed] * apart, 0, 1)
                start[weighed] = own + apart * weights
            losses.append(loss)
        return start, {_WEIGHTS: weights}

    def by_record(self) -> Personal:
        raise PrivacyError(
            'method "fedala" learns its start by gradients without noise, and with privacy.unit = "record" samples are '
            'used in noised gradients only; take privacy.unit = "device"'
        )

    def _batches(self, count: int, round: int) -> Sequence[np.ndarray]:
        taken = max(1, int(self.share * count))
        places = (round * taken + np.arange(taken)) % count
        return [places[first : first + self.batch_size] for first in range(0, taken, self.batch_size)]


def _stands_still(losses: Sequence[float]) -> bool:
    return len(losses) > _LAST and float(np.std(losses[-_LAST:])) < _STILL
