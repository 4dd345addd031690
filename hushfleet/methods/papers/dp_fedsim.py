"""DP-FedSim: Fisher values choose the start, each layer's spread sets its clip norm, similarity weighs the mean.

"Efficient Personalized Federated Learning Method with Adaptive Differential Privacy and Similarity Model
Aggregation". Equations (5)-(17), Algorithm 1.

Fisher: each round the device starts with its own values if their normalised Fisher value reaches `fisher_threshold`,
and with the global values otherwise; all parameters are trained and sent. AGC (adaptive gradient clipping): layer s is
clipped to T_s = b (1 + std_s / (|mean_s| + delta)), b = privacy.clip_norm, with noise sigma b / sqrt(N) on each
parameter. MSA: the weight of an update is the similarity of the client's model to the global model.

Reading: Eq. (5) is taken at the device's personalized model of its last round, as in FedDPA's public code (the same
scheme). Reading: Eq. (6) divides by a layer's sum; then at most two values of a layer can reach the paper's threshold
of 0.4, and almost nothing is personal. FedDPA's code, with the same threshold, stretches a layer to 0..1 (`min-max`,
the default here); `sum` is the equation as printed.
Reading: Eq. (8) sets the start of a round. Algorithm 1 has it in its loop over local epochs: `masks = "epoch"` sets
the values of low Fisher value back to the global ones before each further epoch, so that only the last one moves them.
Reading: the gradient g of Eqs. (9)-(12) is the update of the round, Delta w of Algorithm 1.
If it is the gradient, which moves a model by the learning rate times as much, b and the noise of Eq. (14) shrink with
it: this is a `privacy.clip_norm` of learning rate x b, and otherwise the same mechanism.
Reading: N of Eq. (13), "the number of clients participating in federated learning", is the cohort; if it is all
clients, the multiplier is smaller by the root of their ratio, 0.766 instead of 2.4224, and is charged as such.
Reading: delta of Eq. (9) is not stated; it is 1e-8 here. Eq. (10) needs no delta: a zero update is not scaled.
Reading: without AGC the whole update is clipped, to c = privacy.clip_norm.
Reading: similarity compares models, Eq. (15) and Algorithm 1. The server computes the client's model as the global one
plus the noised update. Section IV.C mentions update directions: `similarity = "directions"` compares the update with
the global model's last step, because the step of the current round depends on the weights. In the first round all
weights are equal.
Reading: Eq. (16) needs positive similarities; one below 0.001 counts as 0.001.
Deviation: T_s has no bound, and without a bound no charge can be computed. Under `accounting = "as-published"` no T_s
exceeds b times `max_stretch`, and the charge is for this bound: noise sigma b / sqrt(N) against L layers of up to
b max_stretch has the multiplier sigma / (max_stretch sqrt(L N)). The multiplier sigma that the paper accounts for
would need T_s = b and one layer.
Deviation: `accounting = "strict"` caps T_s at b times `strict_stretch`, scales the noise to this bound, and does not
divide the noise: its multiplier against the server is sigma.
Deviation: with MSA the guarantee of the aggregate is only the one from a device's own noise. The device's weight may be
the largest, and weights follow the noised values, so the noise of others does not add up as in a plain mean.
Deviation: with the unit `record`, Fisher values of raw data would be an uncharged use of the data. They are replaced by
squares of the device's last update, which has noise from DP-SGD, and AGC is not used: records are clipped one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from hushfleet.array_api import Array, array_namespace, blocks, np
from hushfleet.methods.local import PartOrder, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published
from hushfleet.methods.papers.fisher import ByFisher, Normalisation
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.stages import ClipLayers, EvenBounds, Gaussian, Transform
from hushfleet.params import ParamLayout
from hushfleet.privacy.clipping import clip_layers, layer_norms
from hushfleet.schema import Share
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.methods.state import PrivateArrays, RoundContext
    from hushfleet.privacy.noise import NoiseSource

LARGEST_STRETCH = "largest_stretch"
"""The private array with the largest T_s / b of the device so far, before the cap; it never leaves the device."""
Similarity = Literal["models", "directions"]
_STEP = "step"  # float32 `[d]`, the global model's in the last round
_DELTA = 1e-8
_LEAST_WEIGHT = 1e-3


@dataclass(frozen=True, kw_only=True)
class DPFedSimConfig(TrainingConfig):
    """Settings of the paper's Section V.

    :param fisher_threshold: lambda of Eq. (7).
    :param normalisation: of the Fisher values of a layer: `min-max` or `sum`.
    :param masks: whether Eq. (8) is applied once per `round`, or in each local `epoch`.
    :param agc: adaptive clipping; off clips the whole update to the clip norm (Table II).
    :param msa: weigh updates by similarity; off takes the plain mean (Table II).
    :param similarity: between a client's and the global model, or between the directions in which both moved.
    :param max_stretch: under `as-published`, the largest clip norm of a layer in units of the base clip norm.
    :param strict_stretch: the same under strict accounting, where the noise grows with it.
    """

    fisher_threshold: Share = 0.4
    normalisation: Normalisation = "min-max"
    masks: Literal["round", "epoch"] = "round"
    agc: bool = True
    msa: bool = True
    similarity: Similarity = "models"
    max_stretch: Annotated[float, Meta(ge=1, le=1000000)] = 1000.0
    strict_stretch: Annotated[float, Meta(ge=1, le=1000000)] = 2.0


@published(
    "dp-fedsim",
    DPFedSimConfig,
    source="DP-FedSim: adaptive differential privacy and similarity model aggregation",
    summary="start kept by Fisher values, clip norms by each layer's spread, mean weighed by similarity",
    epoch=1,
)
def dp_fedsim(config: DPFedSimConfig, privacy: PrivacySpec, rounds: int) -> Method:
    stretch = config.max_stretch if privacy.as_published else config.strict_stretch
    # The cap is declared, not T_s, because T_s is a function of the data.
    adaptive = (
        ClipBySpread(stretch),
        ClipLayers(EvenBounds(stretch)),
        Gaussian(scaled_to_clip_norm=privacy.as_published),
    )
    return Method(
        # Eqs. (5)-(8)
        ByFisher(config.fisher_threshold, "layer", config.normalisation, inclusive=True, newcomers=False),
        Sgd(order=BackToGlobal() if config.masks == "epoch" else PartOrder()),
        stages=adaptive if config.agc else CLIP_AND_NOISE,
        server=SimilarityMean(config.similarity) if config.msa else ServerHalf(),
    )


@dataclass(frozen=True)
class BackToGlobal(PartOrder):
    """Applies Eq. (8) at the start of each local epoch; not for a new device, which has no Fisher values."""

    @property
    def resets(self) -> bool:
        return True

    def reset(self, context: RoundContext, params: Array) -> None:
        if context.chosen is not None:
            xp = array_namespace(params)
            params[...] = xp.where(context.chosen, params, context.global_params)


@dataclass(frozen=True)
class ClipBySpread(Transform):
    """AGC, Eqs. (9)-(12): layer s of the update is clipped to T_s, capped.

    :param stretch: the largest T_s / b.
    """

    stretch: float

    def change(self, context: RoundContext, update: Array, noise: NoiseSource) -> Array:
        """Clips each layer of the update, `[d]`, to its threshold."""
        return clip_layers(update, context.layout, self.thresholds(context, update))

    def thresholds(self, context: RoundContext, update: Array) -> Array:
        """Returns T_s of Eq. (9), capped, float64 `[L]`."""
        return context.setting.privacy.clip_norm * np.minimum(_stretches(context.layout, update), self.stretch)

    def remember(self, context: RoundContext, *, update: Array, trained: Array, sent: Array) -> PrivateArrays:
        """Returns the largest T_s / b so far, to show how large the thresholds really became."""
        before = context.state.private.get(LARGEST_STRETCH, np.zeros(1))
        return {LARGEST_STRETCH: np.maximum(before, _stretches(context.layout, update).max())}

    def by_record(self) -> None:
        return None


def _stretches(layout: ParamLayout, update: Array) -> np.ndarray:
    """Returns T_s / b of Eq. (9), without a cap, float64 `[L]`."""
    stretches = np.empty(len(layout.layers))
    for index, (layer, norm) in enumerate(zip(layout.layers, layer_norms(update, layout), strict=True)):
        values = update[layer.start : layer.stop]
        mean = sum(np.sum(values[part].astype(np.float64)) for part in blocks(values)) / layer.size
        std = max(norm**2 / layer.size - mean**2, 0.0) ** 0.5
        stretches[index] = 1 + std / (abs(mean) + _DELTA)
    return stretches


@dataclass(frozen=True)
class SimilarityMean(ServerHalf):
    """MSA: the weight of an update is the similarity of the client's model to the global one.

    :param similarity: with `directions`, the similarity of the update to the global model's step in the last round.
    """

    similarity: Similarity = "models"

    @property
    def weighs(self) -> bool:
        return True

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        return {_STEP: closed.after - closed.before} if self.similarity == "directions" else state

    def weight(self, state: ServerArrays, global_params: np.ndarray, sent: np.ndarray, layout: ParamLayout) -> float:
        """Returns Eq. (15): the mean over the layers of the cosine of the global and the client's model, or step."""
        directions = self.similarity == "directions"
        if directions and _STEP not in state:
            return 1.0
        cosines, whole = [], state[_STEP] if directions else global_params
        for layer in layout.layers:
            part = slice(layer.start, layer.stop)
            theirs = whole[part].astype(np.float64)
            client = sent[part].astype(np.float64) if directions else theirs + sent[part]
            norms = math.sqrt(theirs @ theirs) * math.sqrt(client @ client)
            cosines.append(float(theirs @ client) / norms if norms > 0 else 0.0)
        return min(1.0, max(_LEAST_WEIGHT, math.fsum(cosines) / len(cosines)))
