"""ACDP-pFSD: self-decoupled distillation, and a clip norm that an agent on the server chooses for each round.

"ACDP-pFSD: A Personalized Federated Self-Decoupled Distillation Framework with User-level Differential Privacy based
Adaptive Clipping". Equations (5) to (14), Algorithms 1 and 2.

Local training starts from the global model, with the loss alpha CE + (1 - alpha) (KL of target and rest + N KL of the
rest) against the device's own last model; what it ends with is the personal model. The update is clipped to C^t as a
whole and noised with (sigma C^t)^2 / |P|. `clipping` says who chooses C^t: `ppo` the paper's agent
(`hushfleet.methods.clip_agent`), which learns from the devices' accuracies and losses; `fixed` nobody (DP-pFSD);
`quantile` the AQC baseline of Table 3 (Andrew, Thakkar, McMahan, Ramaswamy: "Differentially Private Learning with
Adaptive Clipping", NeurIPS 2021, Algorithm 1; Theorem 1 splits the charge). Without noise and with `clip_norm = inf` it
is pFSD.

Reading: alpha is not stated; 1/2. KT is stated for pFedSD only, as 3, and taken here too.
Reading: "Q = 5 local training iterations" are five batches in Algorithm 2 (`local_steps = 5`) and five passes over the
data in "Local epochs Q" of its input (`local_epochs = 5`). Both can be run.
Reading: the range of the agent's clip norms is not printed (`clip_range`). The recipe of Table 3 takes up to the fixed
clip norm by default, half of it as `clip_norm` with a factor of 2, since a larger one only adds noise there.
Reading: AQC's first clip norm C_0 is not stated; it is the task's clip norm here, as that of the other rows.
Reading: the update is what all Q steps change; theta^{t,1} in line 16 would leave the first one out.
Reading: accuracies and losses are those of the personal model, as Section 4.3 says; line 20 has the noised one.
Deviation: they are taken on the device's training samples. A device has no others: in a simulation its test set is for
what is printed, and steers nothing.
Under `as-published` these two numbers leave each device in the clear, as in the paper, but for a loss above
`loss_bound`, which counts as that: the ledger charges infinity, and keeps the cost of the update's noise beside it.
They also decide C^t, so readers of the plan learn from them too.
Deviation: under `strict` they are noised as well, within the charge: a share of `report_share` of 1/sigma^2 is theirs,
and the update's noise grows by it. The means over the cohort then still are Algorithm 2's state and reward. A state of
noised norms alone would cost nothing, but would not know whether the models get better, which is what the agent is for.
Deviation: with the privacy unit `record`, and without a finite clip norm, C stays as it is: a report would need a
charge of a kind of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hushfleet.array_api import Array
from hushfleet.config.spec import PrivacySpec
from hushfleet.methods.clip_agent import AgentState, ClipAgent, trimmed_mean
from hushfleet.methods.local import SelfDistillation, Sgd
from hushfleet.methods.method import CLIP_AND_NOISE, Method, TrainingConfig, published, within
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.methods.stages import ClipWhole, Gaussian, NumberReport, Stage
from hushfleet.methods.state import RoundContext, RoundSetting
from hushfleet.objectives import Objective
from hushfleet.privacy.clipping import layer_norms

Clipping = Literal["ppo", "fixed", "quantile"]
_LEAST_SHARE = 0.05  # of the devices: the deviation of the noise on the sum of bits, Andrew et al., Section 3.1


@dataclass(frozen=True, kw_only=True)
class ACDPpFSDConfig(TrainingConfig):
    """Settings of the paper's Section 5.1 by default, where it has them.

    :param clipping: who chooses the clip norm.
    :param self_distillation: off trains on labels alone.
    :param distillation_weight: 1 - alpha of Eq. (9).
    :param temperature: KT.
    :param non_target_weight: N of Eq. (8).
    :param clip_range: k: the agent's clip norms are between the task's over k and the task's times k.
    :param agent_buffer: |D_P|, rounds between two updates of the agent.
    :param loss_bound: what losses are clipped to in reports, nats.
    :param report_share: under `strict`, the share of 1/sigma^2 that accuracies and losses are noised for.
    :param quantile: gamma of Andrew et al..
    :param quantile_step: their eta_C.
    """

    clipping: Clipping = "ppo"
    self_distillation: bool = True
    distillation_weight: float = within("[0, 1]", 0.5)
    temperature: float = within("(0, 1000]", 3.0)
    non_target_weight: float = within("[0, 1000]", 0.25)
    clip_range: float = within("(1, 1e6]", 4.0)
    agent_buffer: int = within("[2, 10000]", 5)
    loss_bound: float = within("(0, 1000]", 10.0)
    report_share: float = within("(0, 1)", 0.1)
    quantile: float = within("(0, 1)", 0.5)
    quantile_step: float = within("(0, 10]", 0.2)


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
    """Whether the update's norm is within C, as 1/2 or -1/2."""
    norm = math.hypot(*(float(each) for each in layer_norms(update, context.layout)))
    return (0.5 if norm <= context.setting.clip_norm else -0.5,)


def bit_multiplier(setting: RoundSetting) -> float:
    """Noise over sensitivity of the sum of bits, `2 sigma_b`, so that something of the charge is left for the values.

    Reading: sigma_b is a twentieth of the devices. Where these are so few that the bits alone would cost more than a
    quarter of the charge, sigma_b is the noise multiplier: then they cost just that.
    """
    return max(2 * _LEAST_SHARE * setting.terms.noise_split, 2 * setting.noise_multiplier)


@dataclass(frozen=True)
class QuantileClip(ServerHalf):
    """C <- C exp(-eta (b - gamma)), with b the share of the updates that are within C, by noised bits.

    Deviation: the share is clipped to [0, 1], so that no report moves C by more than exp(eta).
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
    """Lets an agent choose C by the devices' accuracies and losses, as published."""
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
    """C^t is the agent's action; it learns from trimmed means of what the devices report."""

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
        # noise and liars may not take a mean out of [0, 1]
        shares = (trimmed_mean(column) + 0.5 for column in zip(*reports, strict=True))
        accuracy, loss = (min(max(share, 0.0), 1.0) for share in shares)
        return self.agent.observe(AgentState.from_arrays(state), accuracy, loss * self.loss_bound).to_arrays()
