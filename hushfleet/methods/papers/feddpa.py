"""FedDPA: parameters with high Fisher values keep the device's own values; each part has a separate penalty.

Yang, Huang, Ye: "Dynamic Personalized Federated Learning with Adaptive Differential Privacy", NeurIPS 2023, as in its
public code (xiyuanyang45/DynamicPFL).

Each round the device computes the diagonal of the Fisher information at its personalized model and stretches it to 0..1
in each tensor. Parameters above `fisher_threshold` start with the device's own values u, the others with the global
values v. u is trained with the penalty (lambda_1 / 2) sum_t |w_t - g_t| over the tensors t, where g is the global
model, and v with (lambda_2 / 2) | sum_t |w_t - g_t| - C |. Then the change of all parameters against the global model,
including u, is clipped as a whole to C and gets noise sigma C / sqrt(n) on each. On the device u has no noise; only the
noise of the sent values hides u from the server.

Reading: the code first trains u on all epochs and then v on all epochs. With one optimizer for each part,
`personal_epochs = 0` trains u and then v on each batch, as FedADDP's code does; so `local_epochs` means the same for
every method. For E epochs of u followed by E epochs of v, set `personal_epochs = E`, `local_epochs = 2 E`.
Reading: the code does not train an entry whose value is exactly 0, and zeroes a tensor whose Fisher values are all
equal. Here the first is trained, and the second is taken from the global model.
Deviation: every device has the same weight. The code weighs by sample count, which is not sent.
Deviation: the code's accountant counts batches drawn from the pooled records, while noise is added once to each
device's update (`privacy.reading = "pooled-sampling"` finds its noise). The ledger charges the latter.
Deviation: noise is divided by the number of devices in the cohort, while the code takes all devices; under
`accounting = "strict"` it is not divided.
Deviation: with the unit `record`, squares of the device's last update, which is noised, replace the Fisher values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hushfleet import array_api
from hushfleet.array_api import Array
from hushfleet.methods.local import Penalty, PersonalFirst, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, Weight, published
from hushfleet.methods.papers.fisher import ByFisher
from hushfleet.methods.stages import Transform
from hushfleet.methods.state import RoundContext, divided
from hushfleet.schema import Fraction
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.privacy.noise import NoiseSource


@dataclass(frozen=True, kw_only=True)
class FedDPAConfig(TrainingConfig):
    """Settings of the public code.

    :param fisher_threshold: a parameter with a normalised Fisher value above it is personal.
    :param lambda_1: pull of personal parameters towards the global model.
    :param lambda_2: pull of the whole change towards the length C, by the shared parameters.
    :param personal_epochs: number of local epochs that train the personal part, before the others train the shared
        part; 0 trains both parts, one after the other, on each batch.
    """

    fisher_threshold: Fraction = 0.4
    lambda_1: Weight = 0.1
    lambda_2: Weight = 0.05
    personal_epochs: Annotated[int, Meta(ge=0, lt=1000)] = 0

    rules = {
        **TrainingConfig.rules,
        "method.personal-epochs-below-local": (
            lambda config: config.personal_epochs >= config.local_epochs,
            "personal_epochs = {personal_epochs}: must be 0, or below the {local_epochs} local epochs, since the "
            "shared part trains in the others",
        ),
    }


@published(
    "feddpa",
    FedDPAConfig,
    source="Yang, Huang, Ye, NeurIPS 2023",
    summary="parameters with high Fisher values start from the device's own; each part has its own penalty",
    epoch=1,
)
def feddpa(config: FedDPAConfig, privacy: PrivacySpec, rounds: int) -> Method:
    penalties = LengthPenalties(config.lambda_1, config.lambda_2)
    return Method(
        ByFisher(config.fisher_threshold),
        Sgd(penalties=(penalties,), order=PersonalFirst(config.personal_epochs)),
        (AgainstGlobal(), *CLIP_AND_NOISE),
    )


@dataclass(frozen=True)
class LengthPenalties(Penalty):
    """The gradients of both penalties, each on its own part; a tensor that has not moved adds nothing.

    Without a clip norm there is no length to pull towards.
    """

    lambda_1: float
    lambda_2: float

    def length(self, context: RoundContext) -> Array | float:
        """Returns C of the second penalty, `[...]`."""
        return context.setting.privacy.clip_norm

    def add(self, context: RoundContext, params: Array, gradient: Array) -> None:
        xp = array_api.array_namespace(params)
        anchor, personal, tensors = context.global_params, context.personal, context.layout.slices.values()
        moved = params - anchor
        norms = [xp.vecdot(moved[..., part], moved[..., part]) ** 0.5 for part in tensors]
        total, wanted = sum(norms), self.length(context)
        unbounded = isinstance(wanted, float) and math.isinf(wanted)
        pull = self.lambda_1 / 2
        push = xp.zeros_like(total) if unbounded else self.lambda_2 / 2 * xp.sign(total - wanted)
        for part, norm in zip(tensors, norms, strict=True):
            inverse = divided(1.0, norm)
            # multiplying by the mask is faster than indexing by it
            weight = personal[..., part] * ((pull - push) * inverse)[..., None]
            weight += (push * inverse)[..., None]
            weight *= moved[..., part]
            gradient[..., part] += weight


@dataclass(frozen=True)
class AgainstGlobal(Transform):
    """Converts the update, which is relative to the start, into the change against the global model."""

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Adds the start's difference from the global model to the update, `[d]`."""
        return update + (context.start - context.global_params)
