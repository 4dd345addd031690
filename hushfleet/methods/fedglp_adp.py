"""FedGLP-ADP: parameters that move most become personal, layer clip norms follow the trend of the updates.

Xiao, Jiang, Li: "FedGLP-ADP: Federated Learning with Gradient-Based Layer-Wise Personalization and Adaptive
Differential Privacy", 2026. Equations (7)-(16), Algorithms 1 and 2.

GLP (layer-wise personalization): each round the share p = beta / T of a layer's parameters with the largest
noised values turns from shared to personal, until the share beta is reached. ACNDP (adaptive clipping and
noising): layer l is clipped to C_l = C sqrt(tw_l) and each shared coordinate gets noise of standard deviation
sqrt(L) sigma C_l / sqrt(n).

Reading: the trend of Algorithm 1 needs a previous round, so a device's first round leaves the weights alone.
Reading: p grows with the device's own participations, so a device that misses rounds falls behind evenly.
Reading: gamma is not stated for Table 1; 0.2 is the value of Table 4 closest to it.
Deviation: one gradient serves Eqs. (9) and (10); `sequential` takes a second one for the shared part, after the
personal part has moved, as Algorithm 2, lines 6-7, has it.
Deviation: the next mask comes from the values as sent, after the codec, so that both sides can compute it.
Deviation: `accounting = "strict"` compares norms of the noised values in Algorithm 1, and does not divide the
noise by n; its ledger then holds without trust in the server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hushfleet import array_api
from hushfleet.blocks import blocks
from hushfleet.config.spec import require
from hushfleet.methods.base import Array, DeviceState, Method, PublicState, Release, RoundTerms, TrainingConfig
from hushfleet.privacy.clipping import clip_layers, layer_norms
from hushfleet.privacy.noise import NoiseSource


@dataclass(frozen=True, kw_only=True)
class FedGLPADPConfig(TrainingConfig):
    """Settings of the paper's Section 5.2 by default.

    :param glp: layer-wise personalization; off leaves every parameter shared (Table 5).
    :param acndp: adaptive clipping and noising; off clips the whole update to C, as DP-FedAvg (Table 5).
    :param dynamic_beta: beta follows the noise by Eq. (11); off keeps beta_0 (Table 3).
    :param beta_0: share of each layer that is personal in the end, at the noise sigma_0.
    :param beta_growth: a of Eq. (11).
    :param sigma_0: the moderate noise of Eq. (11); the paper takes the multiplier of its epsilon = 6.
    :param gamma: step of the log-odds in Algorithm 1.
    :param sequential: update the personal part first, then the shared part by a gradient at the new point: twice the
        computing.
    :param lambda_1: pull of the personal part towards where it was, Eq. (9).
    :param lambda_2: pull of the shared part's change towards the clip norm, Eq. (10).
    """

    glp: bool = True
    acndp: bool = True
    dynamic_beta: bool = True
    sequential: bool = False
    beta_0: float = 0.3
    beta_growth: float = 0.2
    sigma_0: float = 1.965
    gamma: float = 0.2
    lambda_1: float = 0.1
    lambda_2: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.beta_0 <= 1, "beta_0", self.beta_0, "in [0, 1]")
        require(abs(self.beta_growth) <= 100, "beta_growth", self.beta_growth, "in [-100, 100]")
        require(0 <= self.sigma_0 <= 1000, "sigma_0", self.sigma_0, "in [0, 1000]")
        require(0 <= self.gamma <= 100, "gamma", self.gamma, "in [0, 100]")
        require(0 <= self.lambda_1 <= 1000, "lambda_1", self.lambda_1, "in [0, 1000]")
        require(0 <= self.lambda_2 <= 1000, "lambda_2", self.lambda_2, "in [0, 1000]")


class FedGLPADP(Method):
    name = "fedglp-adp"
    source = "Xiao, Jiang, Li, 2026"
    summary = "gradient-based layer-wise personalization, adaptive clipping and noising"
    config_class = FedGLPADPConfig
    config: FedGLPADPConfig

    @property
    def beta(self) -> float:
        """The final personal share of each layer, Eq. (11)."""
        if not self.config.glp:
            return 0.0
        if not self.config.dynamic_beta:
            return self.config.beta_0
        exponent = self.config.beta_growth * (self.privacy.noise_multiplier - self.config.sigma_0)
        return min(1.0, self.config.beta_0 * math.exp(min(exponent, 50.0)))

    def init_state(self) -> DeviceState:
        sizes = np.array([span.size for span in self.layout.layers], dtype=np.float64)
        share = np.clip(sizes / sizes.sum(), 1e-12, 1 - 1e-12)
        private = {"log_odds": np.log(share / (1 - share)), "norms": np.full(len(sizes), np.nan)}
        return replace(super().init_state(), private=private)

    def clip_weights(self, state: DeviceState) -> Array:
        """tw, float64 `[..., L]`: each layer's part of the squared clip norm; they sum to 1."""
        xp = array_api.array_namespace(state.private["log_odds"])
        weights = 1 / (1 + xp.exp(-state.private["log_odds"]))
        return weights / xp.sum(weights, axis=-1, keepdims=True)

    def passes(self, state: DeviceState) -> Sequence[Array | None]:
        xp = array_api.array_namespace(state.public.mask)
        if not self.config.sequential or not bool(xp.any(state.public.mask)):
            return (None,)
        return (state.public.mask, ~state.public.mask)

    def local_gradient(self, state: DeviceState, start: Array, params: Array, gradient: Array) -> None:
        """Adds the gradients of the penalties: (9) on personal entries, (10) on shared ones.

        Both are norms, not squares: d/dv (lambda_1/2) |v - v0| = (lambda_1/2) (v - v0) / |v - v0|, and the
        second changes sign where the shared part has moved by C. At a norm of zero the gradient is zero.
        """
        xp = array_api.array_namespace(params)
        mask = state.public.mask
        personal_sq, shared_sq = 0.0, 0.0
        for part in blocks(params):
            moved = params[..., part] - start[..., part]
            personal = xp.vecdot(moved * mask[..., part], moved)
            shared_sq = shared_sq + xp.vecdot(moved, moved) - personal
            personal_sq = personal_sq + personal
        pull = _divided(self.config.lambda_1 / 2, personal_sq**0.5, xp)
        shared_norm = xp.clip(shared_sq, min=0.0) ** 0.5
        push = _divided(self.config.lambda_2 / 2, shared_norm, xp)
        push = xp.where(shared_norm > self.privacy.clip_norm, push, -push)
        push, more = push[..., None], (pull - push)[..., None]
        for part in blocks(params):
            weight = mask[..., part] * more  # choosing by the mask takes ten times as long as multiplying by it
            weight += push
            weight *= params[..., part] - start[..., part]
            gradient[..., part] += weight

    @classmethod
    def gradients_per_batch(cls, config: FedGLPADPConfig) -> int:
        return 2 if config.sequential else 1

    def raw_values(self, terms: RoundTerms) -> tuple[str, ...]:
        raw = (
            self.privacy.accounting == "as-published"
            and self.privacy.unit == "device"
            and self.config.acndp
            and self.config.gamma > 0
            and math.isfinite(self.privacy.clip_norm)
        )
        return ("clip norms that follow the norms of raw updates",) if raw else ()

    def protect(self, state: DeviceState, update: Array, terms: RoundTerms, noise: NoiseSource) -> Release:
        if not self.config.acndp:
            return super().protect(state, update, terms, noise)
        mechanism, shared = self.mechanism(terms), self.shared(state, update)
        bounds = self.clip_norm(terms) * self.clip_weights(state) ** 0.5
        clipped = clip_layers(shared, self.layout, bounds)
        stds = mechanism.layer_stds(bounds)
        values = mechanism.add_noise(clipped, stds, noise, where=~state.public.mask, layout=self.layout)
        return Release(values, bounds, stds, self.charge(terms))

    def advance(self, state: DeviceState, *, update: Array, trained: Array, sent: Array) -> DeviceState:
        """Algorithm 1 on the norms of this and the last round, and the next mask."""
        xp = array_api.array_namespace(update)
        seen = sent if self.privacy.accounting == "strict" else self.shared(state, update)
        norms, before = layer_norms(seen, self.layout), state.private["norms"]
        direction = 2 * xp.astype(norms > before, norms.dtype) - 1
        direction = xp.where(xp.isnan(before), xp.zeros_like(norms), direction)
        log_odds = state.private["log_odds"] + self.config.gamma * direction
        public = self.advance_public(state.public, sent)
        return DeviceState(public, trained, {"log_odds": log_odds, "norms": norms})

    def advance_public(self, public: PublicState, sent: Array) -> PublicState:
        """Turns the largest sent values of each layer personal; ties go to the lower index."""
        taken = public.participations + 1
        xp = array_api.array_namespace(sent)
        grown = xp.asarray(public.mask, copy=True)
        for layer in self.layout.layers:
            part = slice(layer.start, layer.stop)
            mask = public.mask[..., part]
            target = int(self.beta * layer.size * min(taken / self.rounds, 1.0))
            missing = target - xp.count_nonzero(mask, axis=-1)
            if not bool(xp.any(missing > 0)):
                continue
            magnitude = xp.where(mask, -1.0, xp.abs(sent[..., part]))
            ordered = xp.sort(magnitude, axis=-1)  # not argsort: four times as long, twice the room
            for row in np.ndindex(missing.shape):  # one, unless many clients are computed at once
                count = int(missing[row])
                if count <= 0:
                    continue
                least = ordered[row][layer.size - count]
                (above,) = xp.nonzero(magnitude[row] > least)
                (equal,) = xp.nonzero(magnitude[row] == least)
                grown[..., part][row][above] = True
                grown[..., part][row][equal[: count - len(above)]] = True
        return PublicState(grown, taken)

    def multiplier_release(self, terms: RoundTerms, *, participants: int) -> float:
        """`strict` claims no more than each device's own noise: a coordinate may have one sender only."""
        if self.privacy.accounting == "strict":
            return self.charge(terms).noise_multiplier
        return super().multiplier_release(terms, participants=participants)


def _divided(weight: float, norm: Array, xp: object) -> Array:
    """weight / norm, and 0 for a norm of 0."""
    return xp.where(norm > 0, weight / xp.where(norm > 0, norm, 1.0), 0.0)
