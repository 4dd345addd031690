"""Second moments: one noised sum tells a fleet in which directions its normal samples vary.

Each device sends an update once: one step of gradient descent on all of its samples, from which their mean is
subtracted, scaled to norm C and noised like any other. If a network's gradient at its start is minus a statistic of a
sample, the mean of the updates is the fleet's mean of that statistic, with the whole budget in one sum. The model
`second-moments` (`models/second_moments.py`) is such a network: its statistic are the second moments. Scaled to one
norm, they tell the directions and not the size, so no bound has to be known. Another statistic takes a network of its
own, and this method with it.

The task ends with the projector onto the leading directions of the sum: it is computed from what was noised, so it
costs no more. A device judges its samples by its own ones, which it does not send (`hushfleet.learning.own_variation`).

Noised sums of second moments: Dwork, Talwar, Thakurta, Zhang: "Analyze Gauss: Optimal Bounds for Privacy-Preserving
Principal Component Analysis", STOC 2014. A sum over boards of moments by frequency, about each board's own mean, is
Hushfleet's own, measured by `benchmarks/machines.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from hushfleet.array_api import np
from hushfleet.errors import PrivacyError
from hushfleet.methods.local import Sgd
from hushfleet.methods.method import BatchSize, LearningRate, Method, PlainSgdConfig, published
from hushfleet.methods.server import ServerArrays, ServerHalf
from hushfleet.methods.stages import Gaussian, ScaleWhole
from hushfleet.params import ParamLayout, is_moments
from hushfleet.wire.format.spec import PrivacySpec

GAIN = 16
"""The model's output is divided by it, so the projector's values are this large, and the rounding of the published
model, whose steps follow from the noise of the sum, hardly changes it."""


@dataclass(frozen=True, kw_only=True)
class SecondMomentsConfig(PlainSgdConfig):
    """Settings of one step on all samples.

    :param batch_size: larger than the number of a device's samples, so that the step uses all of them.
    :param directions: number of leading directions that count as normal.
    """

    learning_rate: LearningRate = 1.0
    batch_size: BatchSize = 2048
    local_steps: Annotated[int, Meta(ge=0, le=1000000)] = 1
    directions: Annotated[int, Meta(ge=1, le=1000)] = 4


@published(
    "second-moments",
    SecondMomentsConfig,
    source="Hushfleet; Dwork et al., STOC 2014",
    summary="one noised sum of second moments, for anomalies; the model is its leading directions",
)
def second_moments(config: SecondMomentsConfig, privacy: PrivacySpec, rounds: int) -> Method:
    if math.isinf(privacy.clip_norm):
        raise PrivacyError('method.name = "second-moments" scales updates to privacy.clip_norm, which must be finite')
    stages = (ScaleWhole(), Gaussian())
    return Method(training=Sgd(centred=True), stages=stages, server=LeadingDirections(config.directions))


@dataclass(frozen=True)
class LeadingDirections(ServerHalf):
    """The mean of the sent values; at the end, the projector onto its leading directions, if the values are moments.

    :param count: of the directions, over all frequencies; those without a positive moment are left out.
    """

    count: int
    layout: ParamLayout | None = None

    def of_layout(self, layout: ParamLayout) -> LeadingDirections:
        return replace(self, layout=layout) if is_moments(layout) else self

    def final(self, state: ServerArrays, last: np.ndarray) -> np.ndarray:
        if self.layout is None:
            return last
        (moments,) = self.layout.unflatten(last.astype(np.float64)).values()
        sizes, directions = np.linalg.eigh((moments + moments.swapaxes(1, 2)) / 2)
        least = np.sort(sizes, axis=None)[-self.count :][0]
        kept = directions * ((sizes >= least) & (sizes > 0))[:, None]
        projector: np.ndarray = GAIN * (kept @ directions.swapaxes(1, 2))
        return projector.astype(np.float32).ravel()
