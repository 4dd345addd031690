"""FedDPA: parameters with high Fisher values keep the device's own values; each part has a penalty of its own.

Yang, Huang, Ye: "Dynamic Personalized Federated Learning with Adaptive Differential Privacy", NeurIPS 2023, as its
public code has it (xiyuanyang45/DynamicPFL).

Each round the device computes the diagonal of the Fisher information at its own model, stretches it to 0..1 in each
tensor, and starts with its own values u where that is above `fisher_threshold`, with the global values v elsewhere. u
is trained with the penalty (lambda_1 / 2) sum_t |w_t - g_t| over the tensors t, where g is the global model, and v with
(lambda_2 / 2) | sum_t |w_t - g_t| - C |. Then the change of all parameters against the global model, u included, is
clipped as a whole to C and noised: sigma C / sqrt(n) on each. u stays free of noise on the device, and is not secret
from the server beyond what that noise does.

Reading: u is trained on all epochs first and v on all epochs after it, in the code. With one optimizer for each part,
`personal_epochs = 0` trains u and then v on each batch, as FedADDP's code does; so `local_epochs` means the same for
every method. For E epochs of each part one after the other give `personal_epochs = E`, `local_epochs = 2 E`.
Reading: the code holds still a trained entry whose value is exactly 0, and zeroes a tensor whose Fisher values are all
alike. Here the first is trained, and the second is taken from the global model.
Deviation: every device has the same weight. The code weighs by sample count, which is not sent.
Deviation: the code's accountant counts batches drawn from the pooled records, while noise is added once to each
device's update (`privacy.reading = "pooled-sampling"` finds its noise). The ledger charges the latter.
Deviation: noise is divided by the number of devices in the cohort, where the code takes all devices; under
`accounting = "strict"` it is not divided.
Deviation: with the unit `record`, squares of the device's last update, which is noised, stand for the Fisher values.

With the unit `device` all that the data decides lies before the clipping and the noise, and the charge covers it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hushfleet import array_api
from hushfleet.config.spec import require
from hushfleet.methods.base import Array, DeviceState, Method, OwnData, Release, RoundTerms, TrainingConfig
from hushfleet.methods.fisher import (
    GLOBAL,
    MOVED,
    PERSONAL,
    normalised,
    personal_of,
    squared_gradient,
    started,
    with_private,
)
from hushfleet.privacy.noise import NoiseSource


@dataclass(frozen=True, kw_only=True)
class FedDPAConfig(TrainingConfig):
    """Settings of the public code.

    :param fisher_threshold: above it a normalised Fisher value makes a parameter personal.
    :param lambda_1: pull of personal parameters towards the global model.
    :param lambda_2: pull of the whole change towards the length C, by the shared parameters.
    :param personal_epochs: how many of the local epochs train the personal part, before the others train the shared
        one; 0 trains one after the other on each batch.
    """

    fisher_threshold: float = 0.4
    lambda_1: float = 0.1
    lambda_2: float = 0.05
    personal_epochs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.fisher_threshold <= 1, "fisher_threshold", self.fisher_threshold, "in [0, 1]")
        require(0 <= self.lambda_1 <= 1000, "lambda_1", self.lambda_1, "in [0, 1000]")
        require(0 <= self.lambda_2 <= 1000, "lambda_2", self.lambda_2, "in [0, 1000]")
        require(
            self.personal_epochs == 0 or 0 < self.personal_epochs < self.local_epochs,
            "personal_epochs",
            self.personal_epochs,
            f"0, or below the {self.local_epochs} local epochs, since the shared part trains in the others",
        )


class FedDPA(Method):
    name = "feddpa"
    source = "Yang, Huang, Ye, NeurIPS 2023"
    summary = "parameters with high Fisher values start from the device's own; each part has its own penalty"
    config_class = FedDPAConfig
    config: FedDPAConfig

    def prepare(self, state: DeviceState, global_params: Array, data: OwnData) -> DeviceState:
        at = global_params if state.own is None else state.own
        fisher = squared_gradient(state, at, data, unit=self.privacy.unit)
        share = normalised(fisher, self.layout.slices.values(), "min-max")
        return with_private(state, **{PERSONAL: share > self.config.fisher_threshold, GLOBAL: global_params})

    def start(self, state: DeviceState, global_params: Array) -> Array:
        return started(state, global_params)

    def passes(self, state: DeviceState) -> Sequence[Array | None]:
        personal = personal_of(state, state.public.mask)
        return (personal, ~personal)

    def active_passes(self, epoch: int, passes: int) -> Sequence[int]:
        if self.config.personal_epochs == 0:
            return range(passes)
        return (0,) if epoch < self.config.personal_epochs else (1,)

    @classmethod
    def gradients_per_batch(cls, config: FedDPAConfig) -> int:
        return 2 if config.personal_epochs == 0 else 1

    def length(self, state: DeviceState) -> Array | float:
        """C of the second penalty, `[...]`."""
        return self.privacy.clip_norm

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        """Adds both penalties' gradients, each where its part is; a tensor that has not moved adds nothing.

        Without a clip norm there is no length to pull towards.
        """
        xp = array_api.array_namespace(params)
        anchor, personal = state.private.get(GLOBAL, start), personal_of(state, params)
        norms = []
        for part in self.layout.slices.values():
            moved = params[..., part] - anchor[..., part]
            norms.append(xp.vecdot(moved, moved) ** 0.5)
        total, wanted = sum(norms), self.length(state)
        pull = self.config.lambda_1 / 2
        push = self.config.lambda_2 / 2 * xp.sign(total - wanted) if _finite(wanted) else xp.zeros_like(total)
        for part, norm in zip(self.layout.slices.values(), norms, strict=True):
            inverse = xp.where(norm > 0, 1.0 / xp.where(norm > 0, norm, 1.0), 0.0)
            # chosen by multiplying, since choosing by the mask takes longer
            weight = personal[..., part] * ((pull - push) * inverse)[..., None] + (push * inverse)[..., None]
            gradient[..., part] += weight * (params[..., part] - anchor[..., part])

    def against_global(self, state: DeviceState, update: Array) -> Array:
        """Trained model minus global model, where `update` is trained model minus start."""
        anchor = state.private.get(GLOBAL)
        return update if anchor is None else update + (started(state, anchor) - anchor)

    @property
    def reach(self) -> float:
        """What is sent is more than a round's training: the device's own model lies anywhere."""
        return math.inf

    def release(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        return super().release(state, self.against_global(state, update), terms, noise)

    def advance(self, state: DeviceState, *, update: Array, trained: Array, sent: Array) -> DeviceState:
        private = {MOVED: update} if self.privacy.unit == "record" else {}
        return DeviceState(self.advance_public(state.public, sent), trained, private)


def _finite(length: Array | float) -> bool:
    return not isinstance(length, float) or math.isfinite(length)
