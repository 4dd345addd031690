"""ACDP-pFSD: self-decoupled distillation, and a clip norm that an agent on the server chooses for each round.

"ACDP-pFSD: A Personalized Federated Self-Decoupled Distillation Framework with User-level Differential Privacy based
Adaptive Clipping". Equations (5) to (14), Algorithms 1 and 2.

Local training starts from the global model, with the loss alpha CE + (1 - alpha) (KL of target and rest + N KL of the
rest) against the device's own last model; the result is the personal model. The update is clipped to C^t as a whole and
gets noise of variance (sigma C^t)^2 / |P|. `clipping` says how C^t is chosen: `ppo` by the paper's agent
(`hushfleet.methods.papers.clip_agent`), which learns from the devices' accuracies and losses; `fixed` not at all (DP-
pFSD); `quantile` by the AQC baseline of Table 3 (Andrew, Thakkar, McMahan, Ramaswamy: "Differentially Private Learning
with Adaptive Clipping", NeurIPS 2021, Algorithm 1; Theorem 1 splits the charge). Without noise and with `clip_norm =
inf` it is pFSD.

Reading: alpha is not stated; here it is 1/2. KT is stated for pFedSD only, as 3; the same value is used here.
Reading: "Q = 5 local training iterations" are five batches in Algorithm 2 (`local_steps = 5`) and five passes over the
data in "Local epochs Q" of its input (`local_epochs = 5`). Both can be run.
Reading: the range of the agent's clip norms is not printed (`clip_range`). The recipe of Table 3 goes up to the fixed
clip norm by default: `clip_norm` is half of it and the factor is 2, because a larger one only adds noise there.
Reading: AQC's first clip norm C_0 is not stated; here it is the task's clip norm, as in the other rows.
Reading: the update is the change by all Q steps; theta^{t,1} in line 16 would leave out the first step.
Reading: accuracies and losses are measured on the personal model, as Section 4.3 says; line 20 uses the noised model.
Deviation: they are measured on the device's training samples. A device has no other samples: in a simulation its test
set is only for printed results, and controls nothing.
Under `as-published` these two numbers leave each device without noise, as in the paper, except that a loss above
`loss_bound` counts as `loss_bound`. The ledger charges infinity, and also keeps the cost of the update's noise.
The two numbers also decide C^t, so readers of the plan learn from them too.
Deviation: under `strict` they also get noise, within the charge: they use the share `report_share` of 1/sigma^2, and
the update's noise grows accordingly. The means over the cohort are still Algorithm 2's state and reward. A state of
noised norms alone would cost nothing, but would not show whether the models get better, which the agent needs.
Deviation: with the privacy unit `record`, or without a finite clip norm, C stays constant: a report would need a
separate kind of charge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from hushfleet.array_api import Array, np
from hushfleet.methods.cost import RoundSetting
from hushfleet.methods.local import SelfDistillation, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, Temperature, TrainingConfig, Weight, published
from hushfleet.methods.papers.clip_agent import AgentState, ClipAgent, trimmed_mean
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.stages import ClipWhole, Gaussian, NumberReport, Stage
from hushfleet.objectives import Objective
from hushfleet.privacy.clipping import layer_norms
from hushfleet.schema import Fraction, Probability
from hushfleet.wire.format.spec import PrivacySpec

if TYPE_CHECKING:
    from hushfleet.methods.state import RoundContext

Clipping = Literal["ppo", "fixed", "quantile"]
_LEAST_SHARE = 0.05  # noise deviation on the sum of bits, as a share of the devices; Andrew et al., Section 3.1


@dataclass(frozen=True, kw_only=True)
class ACDPpFSDConfig(TrainingConfig):
    """The settings; defaults are from the paper's Section 5.1 if it has them.

    :param clipping: how the clip norm is chosen.
    :param self_distillation: if off, training uses labels alone.
    :param distillation_weight: 1 - alpha of Eq. (9).
    :param temperature: KT.
    :param non_target_weight: N of Eq. (8).
    :param clip_range: k: the agent's clip norms are between the task's divided by k and the task's times k.
    :param agent_buffer: |D_P|, rounds between two updates of the agent.
    :param loss_bound: upper bound of the losses in reports, nats.
    :param report_share: under `strict`, the share of 1/sigma^2 that the noise on accuracies and losses uses.
    :param quantile: gamma of Andrew et al.
    :param quantile_step: their eta_C.
    """

    clipping: Clipping = "ppo"
    self_distillation: bool = True
    distillation_weight: Fraction = 0.5
    temperature: Temperature = 3.0
    non_target_weight: Weight = 0.25
    clip_range: Annotated[float, Meta(gt=1, le=1e6)] = 4.0
    agent_buffer: Annotated[int, Meta(ge=2, le=10000)] = 5
    loss_bound: Annotated[float, Meta(gt=0, le=1000)] = 10.0
    report_share: Probability = 0.1
    quantile: Probability = 0.5
    quantile_step: Annotated[float, Meta(gt=0, le=10)] = 0.2


@published(
    "acdp-pfsd",
    ACDPpFSDConfig,
    source="ACDP-pFSD: self-decoupled distillation with user-level DP based adaptive clipping",
    summary="self-decoupled distillation; an agent chooses the clip norm, as published from raw accuracies and losses",
)
def acdp_pfsd(config: ACDPpFSDConfig, privacy: PrivacySpec, rounds: int) -> Method:
    objective = Objective("decoupled-distillation", config.temperature, config.non_target_weight)
    distillation = SelfDistillation(objective, config.distillation_weight) if config.self_distillation else None
    adaptive = privacy.unit == "device" and math.isfinite(privacy.clip_norm)
    stages, server = {"ppo": by_agent, "quantile": by_quantile, "fixed": fixed}[
        config.clipping if adaptive else "fixed"
    ](config, privacy)
    return Method(training=Sgd(distillation=distillation), stages=stages, server=server)


# `clipping = "fixed"`: DP-pFSD


def fixed(config: ACDPpFSDConfig, privacy: PrivacySpec) -> tuple[tuple[Stage, ...], ServerHalf]:
    """Keeps the clip norm C of the task (DP-pFSD)."""
    return CLIP_AND_NOISE, ServerHalf()


# `clipping = "quantile"`: Andrew et al.


def by_quantile(config: ACDPpFSDConfig, privacy: PrivacySpec) -> tuple[tuple[Stage, ...], ServerHalf]:
    """Moves C to a quantile of the norms of the updates (Andrew et al., NeurIPS 2021)."""
    what = "whether the update is within the clip norm"
    bit = NumberReport(1, what, is_within, multiplier=bit_multiplier, adds_up=True)
    server = QuantileClip(privacy.clip_norm, config.quantile, config.quantile_step)
    return (ClipWhole(), Gaussian(beside=bit), bit), server


def is_within(context: RoundContext, update: Array) -> Sequence[float]:
    """Returns 1/2 if the update's norm is within C, else -1/2."""
    norm = math.hypot(*(float(each) for each in layer_norms(update, context.layout)))
    return (0.5 if norm <= context.setting.clip_norm else -0.5,)


def bit_multiplier(setting: RoundSetting) -> float:
    """Returns noise over sensitivity of the sum of bits, `2 sigma_b`, and leaves a part of the charge for the values.

    Reading: sigma_b is a twentieth of the devices. If there are so few devices that the bits alone would cost more than
    a quarter of the charge, sigma_b is the noise multiplier: then they cost exactly a quarter.
    """
    return max(2 * _LEAST_SHARE * setting.terms.noise_split, 2 * setting.noise_multiplier)


@dataclass(frozen=True)
class QuantileClip(ServerHalf):
    """C <- C exp(-eta (b - gamma)), where b is the share of the updates within C, from noised bits.

    Deviation: the share is clipped to [0, 1], so that no report changes C by more than the factor exp(eta).
    """

    clip_norm: float
    quantile: float
    step: float

    def initial(self, seed: int) -> ServerArrays:
        return {"clip_norm": np.array(self.clip_norm)}

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        return {"clip_norm": float(state["clip_norm"])}

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        bits = [report[0] for report in closed.reports if len(report) == 1]
        if not bits:
            return state
        share = min(max(float(np.mean(bits)) + 0.5, 0.0), 1.0)
        return {"clip_norm": np.array(float(state["clip_norm"]) * math.exp(-self.step * (share - self.quantile)))}


# `clipping = "ppo"`: the paper's agent


def by_agent(config: ACDPpFSDConfig, privacy: PrivacySpec) -> tuple[tuple[Stage, ...], ServerHalf]:
    """Lets an agent choose C from the devices' accuracies and losses, as published."""
    what = "accuracy and loss on the own samples"

    def measure(context: RoundContext, update: Array) -> Sequence[float]:
        found = context.measured
        assert found is not None
        shares = np.nan_to_num([found.accuracy, found.loss / config.loss_bound], nan=0.0, posinf=1.0)
        return [float(each) - 0.5 for each in np.clip(shares, 0, 1)]

    def multiplier(setting: RoundSetting) -> float:
        return setting.noise_multiplier / math.sqrt(config.report_share)

    report = NumberReport(2, what, measure, multiplier=None if privacy.as_published else multiplier, evaluates=True)
    agent = ClipAgent(privacy.clip_norm, config.clip_range, config.agent_buffer)
    return (ClipWhole(), Gaussian(beside=report), report), AgentClip(agent, config.loss_bound)


@dataclass(frozen=True)
class AgentClip(ServerHalf):
    """C^t is the agent's action; the agent learns from trimmed means of the devices' reports."""

    agent: ClipAgent
    loss_bound: float

    def initial(self, seed: int) -> ServerArrays:
        return self.agent.begin(seed).to_arrays()

    def controls(self, state: ServerArrays, round: int) -> dict[str, float]:
        return {"clip_norm": self.agent.clip_norm_of(AgentState.from_arrays(state))}

    def advance(self, state: ServerArrays, closed: ClosedRound) -> ServerArrays:
        reports = [report for report in closed.reports if len(report) == 2]
        if not reports:
            return state
        # noise and malicious devices cannot move a mean out of [0, 1]
        shares = (trimmed_mean(column) + 0.5 for column in zip(*reports, strict=True))
        accuracy, loss = (min(max(share, 0.0), 1.0) for share in shares)
        return self.agent.observe(AgentState.from_arrays(state), accuracy, loss * self.loss_bound).to_arrays()
