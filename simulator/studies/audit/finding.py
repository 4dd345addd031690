"""Compares the scores of a game with the claim: what is measured, with what confidence, and whether the claim holds.

Two thresholds are chosen on scores that are not counted afterwards: one at which two normal distributions are separated
best, one at which the expected bound at the task's delta is largest. Both error rates at both thresholds are bounded by
Clopper and Pearson, each with a quarter of the risk, so that all statements hold together at the stated confidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from hushfleet.simulator.studies.audit.bounds import (
    ErrorRates,
    epsilon_at_least,
    one_run_epsilon,
    rate_at_most,
    separation_at_least,
)
from hushfleet.simulator.studies.audit.claims import Claim
from hushfleet.simulator.studies.audit.record import OneRun
from hushfleet.simulator.studies.audit.subject import Scores

CONFIDENCE = 0.95
_TUNING_SHARE = 0.2
_LEAST_TUNING = 12
_CANDIDATES = 60
_GUESSES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

FindingVerdict = Literal["holds", "VIOLATED", "no claim"]


@dataclass(frozen=True, eq=False)
class Finding:
    """One game's outcome.

    :param adversary: text that describes what the adversary sees.
    :param game: text that describes how the game was played.
    :param trials: number of counted trials in each world, or of canaries of one run.
    :param rounds: rounds of the whole task, or of the one run.
    :param claim: claim about one round.
    :param points: upper bounds on error rates, at some thresholds; empty for the one-run game.
    :param proven: lower bound on epsilon without any assumption: for one round, or for all rounds of the one run.
    :param refuted_at: a delta at which the measured errors contradict the ledger, if any.
    :param scores: scores of the counted trials.
    """

    adversary: str
    game: str
    trials: int
    delta: float
    rounds: int
    claim: Claim
    points: tuple[ErrorRates, ...]
    proven: float
    refuted_at: float | None
    scores: Scores | None = None
    confidence: float = CONFIDENCE

    @property
    def unit(self) -> str:
        return self.claim.charge.unit

    @property
    def verdict(self) -> FindingVerdict:
        if self.refuted_at is not None:
            return "VIOLATED"
        return "no claim" if math.isinf(self.claimed) else "holds"

    @cached_property
    def claimed_round(self) -> float:
        return self.claim.epsilon(self.delta)

    @cached_property
    def claimed(self) -> float:
        return self.claim.over(self.rounds).epsilon(self.delta)

    @property
    def noise_claimed(self) -> float:
        return self.claim.charge.noise_multiplier

    @cached_property
    def noise_measured(self) -> float | None:
        """The largest noise multiplier that a mechanism of the claimed form can have (Nasr et al. 2023, "Tight auditing
        of differentially private machine learning"); None for the one-run game."""
        return min((self.claim.multiplier_at_most(point) for point in self.points), default=None)

    @property
    def measured_round(self) -> float | None:
        """Lower bound for one round, without any assumption."""
        return self.proven if self.points else None

    @property
    def measured_round_of_form(self) -> float | None:
        """The same, if the mechanism has the charged form and as much noise as the errors allow."""
        return self._of_form(1) if self.points else None

    @property
    def measured(self) -> float:
        """Lower bound for `rounds` rounds, if the mechanism has that form; the one-run game assumes nothing."""
        return self._of_form(self.rounds)

    @property
    def raw(self) -> list[str]:
        """The names of the values that are sent without noise."""
        return list(self.claim.charge.raw)

    def _of_form(self, rounds: int) -> float:
        noise = self.noise_measured
        if noise is None or math.isinf(noise) or self.claim.charge.mechanism == "none":
            return self.proven
        return max(self.proven, self.claim.over(rounds).with_noise(noise).epsilon(self.delta))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; an unbounded number is None."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {name: None if value == math.inf else value for name, value in plain.items()}


_PLAIN = (
    *("unit", "adversary", "game", "trials", "confidence", "delta", "rounds", "claimed_round", "claimed"),
    *("measured_round", "measured_round_of_form", "measured", "noise_claimed", "noise_measured"),
    *("refuted_at", "raw", "verdict"),
)


def two_worlds(scores: Scores, claim: Claim, *, rounds: int, delta: float, adversary: str, game: str) -> Finding:
    """Tests a claim about one round by the scores of the game of two worlds; a trial is one round."""
    risk = (1 - CONFIDENCE) / 4
    tuning = max(_LEAST_TUNING, round(_TUNING_SHARE * len(scores.inside)))
    tuned, tested = (Scores(*(each[part] for each in scores)) for part in (slice(tuning), slice(tuning, None)))
    trials = len(tested.inside)
    points = tuple(
        ErrorRates(
            rate_at_most(int((tested.outside > threshold).sum()), trials, risk=risk),
            rate_at_most(int((tested.inside <= threshold).sum()), trials, risk=risk),
        )
        for threshold in _thresholds(tuned, trials, delta, risk)
    )
    refuted = (claim.refuted_at(point, delta) for point in points)
    return Finding(
        adversary=adversary,
        game=game,
        trials=trials,
        delta=delta,
        rounds=rounds,
        claim=claim,
        points=points,
        proven=max(epsilon_at_least(point, delta) for point in points),
        refuted_at=next((found for found in refuted if found is not None), None),
        scores=tested,
    )


def one_run(run: OneRun, claim: Claim, *, delta: float, adversary: str, game: str) -> Finding:
    """Returns the best bound over a few numbers of guesses, each with an equal part of the risk."""
    risk = (1 - CONFIDENCE) / len(_GUESSES)
    included = run.included[np.argsort(-run.scores, kind="stable")]
    canaries, measured = len(included), 0.0
    for share in _GUESSES:
        half = max(1, int(share * canaries / 2))
        right = int(included[:half].sum() + (~included[-half:]).sum())
        measured = max(measured, one_run_epsilon(canaries, 2 * half, right, delta=delta, risk=risk))
    return Finding(
        adversary=adversary,
        game=game,
        trials=canaries,
        delta=delta,
        rounds=run.rounds,
        claim=claim,
        points=(),
        proven=measured,
        refuted_at=delta if measured > claim.over(run.rounds).epsilon(delta) else None,
    )


def _thresholds(scores: Scores, trials: int, delta: float, risk: float) -> tuple[float, float]:
    """Returns thresholds with the best expected separation and epsilon at `delta`, for normally distributed scores."""
    inside, outside = (NormalDist(float(s.mean()), max(float(s.std()), 1e-9)) for s in (scores.inside, scores.outside))
    low, high = sorted((outside.mean - 4 * outside.stdev, inside.mean + 4 * inside.stdev))

    def expected(threshold: float) -> ErrorRates:
        wrong = (1 - outside.cdf(threshold), inside.cdf(threshold))
        return ErrorRates(*(rate_at_most(round(share * trials), trials, risk=risk) for share in wrong))

    candidates = [(float(each), expected(float(each))) for each in np.linspace(low, high, _CANDIDATES)]
    return (
        max(candidates, key=lambda each: separation_at_least(each[1]))[0],
        max(candidates, key=lambda each: epsilon_at_least(each[1], delta))[0],
    )
