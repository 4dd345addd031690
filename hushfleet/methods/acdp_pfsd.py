"""ACDP-pFSD: self-decoupled distillation, and a clip norm that an agent on the server chooses for each round.

"ACDP-pFSD: A Personalized Federated Self-Decoupled Distillation Framework with User-level Differential Privacy based
Adaptive Clipping". Equations (5) to (14), Algorithms 1 and 2.

Local training starts from the global model, with the loss alpha CE + (1 - alpha) (KL of target and rest + N KL of the
rest) against the device's own last model; what it ends with is the personal model. The update is clipped to C^t as a
whole and noised with (sigma C^t)^2 / |P|. `clipping` says who chooses C^t: `ppo` the paper's agent
(`hushfleet.methods.clip_agent`), which learns from the devices' accuracies and losses; `fixed` nobody (DP-pFSD);
`quantile` Andrew et al. (AQC, `hushfleet.methods.quantile_clip`). Without noise and with `clip_norm = inf` it is pFSD.

Reading: alpha is not stated; 1/2. KT is stated for pFedSD only, as 3, and taken here too.
Reading: "Q = 5 local training iterations" are five batches in Algorithm 2 (`local_steps = 5`) and five passes over the
data in "Local epochs Q" of its input (`local_epochs = 5`). Both can be run.
Reading: the update is what all Q steps change; theta^{t,1} in line 16 would leave the first one out.
Reading: accuracies and losses are those of the personal model, as Section 4.3 says; line 20 has the noised one.
Deviation: they are taken on the device's training samples. A device has no others: in a simulation its test set is for
what is printed, and steers nothing.
Under `as-published` these two numbers leave each device in the clear, as in the paper: the ledger charges infinity,
and keeps the cost of the noise on the update beside it. They also decide C^t, so readers of the plan learn from them
too.
Deviation: under `strict` they are clipped (the loss to `loss_bound`) and noised, within the charge: a share of
`report_share` of 1/sigma^2 is theirs, and the update's noise grows by it. The means over the cohort then still are
Algorithm 2's state and reward. A state from noised norms alone would cost nothing, but would not know whether the
models get better, which is what the agent is for.
Deviation: with the privacy unit `record`, and without a finite clip norm, C stays as it is: a report would need a
charge of a kind of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from hushfleet.config.spec import require
from hushfleet.methods.base import (
    Array,
    DeviceState,
    Method,
    OwnData,
    Release,
    RoundOutcome,
    RoundTerms,
    ServerState,
    Teacher,
    TrainingConfig,
)
from hushfleet.methods.clip_agent import ClipAgent, trimmed_mean
from hushfleet.methods.quantile_clip import BIT_BOUND, bit_multiplier, followed
from hushfleet.model.objectives import Objective
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise import NoiseSource

Clipping = Literal["ppo", "fixed", "quantile"]

_MEASURED = ("accuracy", "loss")


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
    :param quantile: gamma of Andrew et al.; :param quantile_step: their eta_C.
    """

    clipping: Clipping = "ppo"
    self_distillation: bool = True
    distillation_weight: float = 0.5
    temperature: float = 3.0
    non_target_weight: float = 0.25
    clip_range: float = 4.0
    agent_buffer: int = 5
    loss_bound: float = 10.0
    report_share: float = 0.1
    quantile: float = 0.5
    quantile_step: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.clipping in get_args(Clipping), "clipping", self.clipping, f"one of {get_args(Clipping)}")
        require(0 <= self.distillation_weight <= 1, "distillation_weight", self.distillation_weight, "in [0, 1]")
        require(0 < self.temperature <= 1000, "temperature", self.temperature, "in (0, 1000]")
        require(0 <= self.non_target_weight <= 1000, "non_target_weight", self.non_target_weight, "in [0, 1000]")
        require(1 < self.clip_range <= 1e6, "clip_range", self.clip_range, "above 1, at most 1e6")
        require(2 <= self.agent_buffer <= 10_000, "agent_buffer", self.agent_buffer, "2 to 10000")
        require(0 < self.loss_bound <= 1000, "loss_bound", self.loss_bound, "in (0, 1000]")
        require(0 < self.report_share < 1, "report_share", self.report_share, "in (0, 1)")
        require(0 < self.quantile < 1, "quantile", self.quantile, "in (0, 1)")
        require(0 < self.quantile_step <= 10, "quantile_step", self.quantile_step, "in (0, 10]")


class ACDPpFSD(Method):
    name = "acdp-pfsd"
    source = "ACDP-pFSD: self-decoupled distillation with user-level DP based adaptive clipping"
    summary = "self-decoupled distillation; an agent chooses the clip norm, as published from raw accuracies and losses"
    config_class = ACDPpFSDConfig
    config: ACDPpFSDConfig

    @property
    def clipping(self) -> Clipping:
        """Who chooses the clip norm in this task."""
        adaptive = self.privacy.unit == "device" and math.isfinite(self.privacy.clip_norm)
        return self.config.clipping if adaptive else "fixed"

    # the device half

    def init_state(self) -> DeviceState:
        state = super().init_state()
        if self.clipping != "ppo":
            return state
        return replace(state, private={name: np.full((), np.nan) for name in _MEASURED})

    @property
    def objective(self) -> Objective:
        if not self.config.self_distillation:
            return super().objective
        config = self.config
        return Objective("decoupled-distillation", config.temperature, config.non_target_weight)

    def teacher(self, state: DeviceState, data: OwnData) -> Teacher | None:
        if state.own is None or not self.config.self_distillation:
            return None
        return Teacher(data.logits(state.own), self.config.distillation_weight)

    def measure(self, state: DeviceState, own: Array, data: OwnData) -> DeviceState:
        if self.clipping != "ppo":
            return state
        found = data.evaluate(own)
        return replace(state, private={name: np.array(getattr(found, name)) for name in _MEASURED})

    def protect(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        release = super().protect(state, update, terms, noise)
        return replace(release, report=self._report(state, update, terms, noise))

    def _report(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> tuple[float, ...]:
        """Bounded numbers about 0, as `report_bound` says, with noise where they are charged."""
        if self.clipping == "fixed" or update.ndim > 1:
            return ()
        if self.clipping == "quantile":
            norm = math.hypot(*(float(each) for each in layer_norms(update, self.layout)))
            numbers = np.array([BIT_BOUND if norm <= self.clip_norm(terms) else -BIT_BOUND])
        else:
            accuracy, loss = (float(state.private[name]) for name in _MEASURED)
            bounded = np.clip(np.nan_to_num([accuracy, loss / self.config.loss_bound], nan=0.0, posinf=1.0), 0, 1)
            numbers = bounded - 0.5
        multiplier = self._report_multiplier(terms)
        if multiplier is not None:
            mechanism = GaussianMechanism(multiplier, self.mechanism(terms).noise_split)
            numbers = mechanism.add_noise(numbers, mechanism.vector_stds([self._report_bound])[0], noise)
        return tuple(map(float, numbers))

    # both halves

    @property
    def _report_bound(self) -> float:
        """Norm of a report's numbers: of one or two, each within 1/2 of 0."""
        return BIT_BOUND if self.clipping == "quantile" else math.sqrt(0.5)

    def report_limit(self, terms: RoundTerms) -> float:
        """Half, and eight deviations of the noise: without it one device could lead the clip norm wherever it likes."""
        multiplier = self._report_multiplier(terms)
        if multiplier is None:
            return 0.5
        mechanism = GaussianMechanism(multiplier, self.mechanism(terms).noise_split)
        return 0.5 + 8 * float(mechanism.vector_stds([self._report_bound])[0])

    def _report_multiplier(self, terms: RoundTerms) -> float | None:
        """Noise multiplier of the reports' sum; None where they are not noised."""
        multiplier = self.noise_multiplier(terms)
        if multiplier == 0:
            return None
        if self.clipping == "quantile":
            return bit_multiplier(multiplier, devices=terms.noise_split)
        if self.clipping == "ppo" and self.privacy.accounting == "strict":
            return multiplier / math.sqrt(self.config.report_share)
        return None

    def raw_values(self, terms: RoundTerms) -> tuple[str, ...]:
        if self.clipping == "fixed" or self._report_multiplier(terms) is not None:
            return ()
        what = {"ppo": "accuracy and loss on the own samples", "quantile": "whether the update is within the clip norm"}
        return (what[self.clipping],)

    def charged_mechanism(self, terms: RoundTerms) -> GaussianMechanism:
        """The task's."""
        return super().mechanism(terms)

    def mechanism(self, terms: RoundTerms) -> GaussianMechanism:
        """The noise of the values: 1/z_values^2 = 1/z^2 - 1/z_report^2 (Andrew et al., Theorem 1)."""
        whole, report = self.charged_mechanism(terms), self._report_multiplier(terms)
        if report is None:
            return whole
        return replace(whole, noise_multiplier=_without(whole.noise_multiplier, report))

    def mechanism_multiplier(self, terms: RoundTerms, charged: float) -> float:
        report = self._report_multiplier(terms)
        return charged if report is None else self.mechanism(terms).multiplier_server

    def multiplier_release(self, terms: RoundTerms, *, participants: int) -> float:
        """The bits' noise adds up as the values' does. A trimmed mean is no sum: reports protect by their own noise."""
        report = self._report_multiplier(terms)
        if report is None or self.privacy.unit == "record":
            return super().multiplier_release(terms, participants=participants)
        if self.clipping == "quantile":
            return self.charged_mechanism(terms).multiplier_release(participants)
        values = self.mechanism(terms).multiplier_release(participants)
        return 1 / math.hypot(1 / values, 1 / report)

    # the server half

    @property
    def _agent(self) -> ClipAgent:
        return ClipAgent(self.privacy.clip_norm, self.config.clip_range, self.config.agent_buffer)

    def init_server(self, seed: int) -> ServerState:
        if self.clipping == "ppo":
            return self._agent.begin(seed)
        return {"clip_norm": np.float64(self.privacy.clip_norm)} if self.clipping == "quantile" else {}

    def controls(self, server: ServerState, round: int) -> dict[str, float]:
        if self.clipping == "ppo":
            return {"clip_norm": self._agent.clip_norm_of(server)}
        return {"clip_norm": float(server["clip_norm"])} if self.clipping == "quantile" else {}

    def advance_server(self, server: ServerState, outcome: RoundOutcome) -> ServerState:
        length = {"ppo": 2, "quantile": 1, "fixed": 0}[self.clipping]
        reports = [report for report in outcome.reports if len(report) == length]
        if not reports or not length:
            return server
        if self.clipping == "quantile":
            (bits,) = zip(*reports, strict=True)
            config, before = self.config, float(server["clip_norm"])
            clip_norm = followed(before, bits, step=config.quantile_step, quantile=config.quantile)
            return {"clip_norm": np.float64(clip_norm)}
        accuracy, loss = (_mean_share(column) for column in zip(*reports, strict=True))
        return self._agent.observe(server, accuracy, loss * self.config.loss_bound)


def _without(whole: float, report: float) -> float:
    """What is left of a noise multiplier when a report has cost its part."""
    return (whole**-2 - report**-2) ** -0.5


def _mean_share(column: Sequence[float]) -> float:
    """A mean of accuracies, or of losses over their bound; noise and liars may not take it out of [0, 1]."""
    return min(max(trimmed_mean(column) + 0.5, 0.0), 1.0)
