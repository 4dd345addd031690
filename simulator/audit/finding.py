"""Scores of a game against the claim: what is measured, with what confidence, and whether the claim holds.

Two thresholds are chosen on scores that are not counted afterwards: one where two normal distributions are told apart
best, one where the bound at the task's delta is expected to be largest. Both error rates at both are bounded by Clopper
and Pearson, each with a quarter of the risk, so that everything said here holds together at the stated confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from simulator.audit.bounds import (
    ErrorRates,
    epsilon_at_least,
    one_run_epsilon,
    rate_at_most,
    separation_at_least,
)
from simulator.audit.claims import Claim
from simulator.audit.device import Scores
from simulator.audit.record import OneRun

CONFIDENCE = 0.95
_TUNING_SHARE = 0.2
_LEAST_TUNING = 12
_CANDIDATES = 60
_GUESSES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

Verdict = Literal["holds", "VIOLATED", "no claim"]


@dataclass(frozen=True, eq=False)
class Finding:
    """One game's outcome.

    :param adversary: what it sees, in words.
    :param game: how it was played, in words.
    :param claimed_round: epsilon that the ledger charges for one round, :param claimed: for all of `rounds`.
    :param measured_round: lower bound for what was played, without any assumption.
    :param measured: lower bound for `rounds` rounds; for the one-run game without any assumption, else where each
        round's mechanism is of the claimed form, with as much noise as the errors allow at most.
    :param noise_claimed: the noise multiplier that is charged, :param noise_measured: what it is at most.
    :param refuted_at: a delta at which the measured errors contradict the ledger, if any.
    """

    unit: str
    adversary: str
    game: str
    trials: int
    confidence: float
    delta: float
    rounds: int
    claimed_round: float
    claimed: float
    measured_round: float | None
    measured: float
    noise_claimed: float
    noise_measured: float | None
    refuted_at: float | None
    raw: tuple[str, ...] = ()
    scores: Scores | None = None
    points: tuple[ErrorRates, ...] = ()
    claim: Claim | None = None

    @property
    def verdict(self) -> Verdict:
        if self.refuted_at is not None:
            return "VIOLATED"
        return "no claim" if math.isinf(self.claimed) else "holds"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an unbounded number is None."""
        left_out = ("scores", "points", "claim")
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        for name, value in plain.items():
            if isinstance(value, float) and not math.isfinite(value):
                plain[name] = None
        return {**plain, "raw": list(self.raw), "verdict": self.verdict}


def two_worlds(
    scores: Scores, claim: Claim, *, rounds: int, delta: float, unit: str, adversary: str, game: str
) -> Finding:
    """:param claim: of what one trial played; :param rounds: how many such trials a whole task is."""
    risk = (1 - CONFIDENCE) / 4
    tuning = max(_LEAST_TUNING, round(_TUNING_SHARE * len(scores.inside)))
    tuned, tested = (Scores(*(each[part] for each in scores)) for part in (slice(tuning), slice(tuning, None)))
    points = tuple(_rates(tested, threshold, risk) for threshold in _thresholds(tuned, len(tested.inside), delta, risk))
    whole = claim.over(claim.rounds * rounds)
    refuted = [found for point in points if (found := claim.refuted_at(point)) is not None]
    multiplier = min(claim.multiplier_at_most(point) for point in points)
    if claim.charge.sample_rate == 1 and claim.charge.mechanism == "gaussian" and not refuted and multiplier < _of(claim):
        refuted = [delta]  # the Gaussian trade-off curve itself, between the deltas that were looked at
    return Finding(
        unit=unit,
        adversary=adversary,
        game=game,
        trials=len(tested.inside),
        confidence=CONFIDENCE,
        delta=delta,
        rounds=whole.rounds,
        claimed_round=claim.epsilon(delta),
        claimed=whole.epsilon(delta),
        measured_round=max(epsilon_at_least(point, delta) for point in points),
        measured=max(claim.measured_epsilon(point, rounds=whole.rounds, delta=delta) for point in points),
        noise_claimed=claim.charge.noise_multiplier,
        noise_measured=multiplier,
        refuted_at=refuted[0] if refuted else None,
        raw=tuple(getattr(claim.charge, "raw", ())),
        scores=tested,
        points=points,
        claim=claim,
    )


def one_run(run: OneRun, *, delta: float, adversary: str, game: str) -> Finding:
    """The best of a few numbers of guesses, each at its share of the risk."""
    risk = (1 - CONFIDENCE) / len(_GUESSES)
    order = np.argsort(-run.scores, kind="stable")
    correct = run.included[order]
    bounds = []
    for share in _GUESSES:
        half = max(1, int(share * len(order) / 2))
        right = int(correct[:half].sum() + (~correct[-half:]).sum())
        bounds.append(one_run_epsilon(len(order), 2 * half, right, delta=delta, risk=risk))
    claim = Claim(run.charge, run.rounds)
    claimed, measured = claim.epsilon(delta), max(bounds)
    return Finding(
        unit="record",
        adversary=adversary,
        game=game,
        trials=len(order),
        confidence=CONFIDENCE,
        delta=delta,
        rounds=run.rounds,
        claimed_round=claim.over(1).epsilon(delta),
        claimed=claimed,
        measured_round=None,
        measured=measured,
        noise_claimed=run.charge.noise_multiplier,
        noise_measured=None,
        refuted_at=delta if measured > claimed else None,
        raw=tuple(getattr(run.charge, "raw", ())),
    )


def _of(claim: Claim) -> float:
    return claim.charge.noise_multiplier


def _rates(scores: Scores, threshold: float, risk: float) -> ErrorRates:
    trials = len(scores.inside)
    false_positives = int((scores.outside > threshold).sum())
    false_negatives = int((scores.inside <= threshold).sum())
    return ErrorRates(
        rate_at_most(false_positives, trials, risk=risk), rate_at_most(false_negatives, trials, risk=risk)
    )


def _thresholds(scores: Scores, trials: int, delta: float, risk: float) -> tuple[float, float]:
    """By normal distributions with the scores' means and variances: for the separation, and for epsilon at `delta`."""
    inside, outside = (NormalDist(float(s.mean()), max(float(s.std()), 1e-9)) for s in (scores.inside, scores.outside))
    low, high = sorted((outside.mean - 4 * outside.stdev, inside.mean + 4 * inside.stdev))
    best: dict[str, tuple[float, float]] = {}
    for threshold in np.linspace(low, high, _CANDIDATES):
        expected = ErrorRates(
            rate_at_most(round((1 - outside.cdf(threshold)) * trials), trials, risk=risk),
            rate_at_most(round(inside.cdf(threshold) * trials), trials, risk=risk),
        )
        for name, value in (
            ("separation", separation_at_least(expected)),
            ("epsilon", epsilon_at_least(expected, delta)),
        ):
            if name not in best or value > best[name][0]:
                best[name] = (value, float(threshold))
    return best["separation"][1], best["epsilon"][1]
