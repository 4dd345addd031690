"""Compares the scores of a game with the claim: what is measured, with what confidence, and whether the claim holds.

Two thresholds are chosen on scores that are not counted afterwards: one at which two normal distributions are separated
best, one at which the expected bound at the task's delta is largest. Both error rates at both thresholds are bounded by
Clopper and Pearson, each with a quarter of the risk, so that all statements hold together at the stated confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np

from hushfleet.simulator.studies.audit.bounds import ErrorRates, epsilon_at_least, rate_at_most, separation_at_least
from hushfleet.simulator.studies.audit.claims import Claim
from hushfleet.simulator.studies.audit.game import Scores

CONFIDENCE = 0.95
_TUNING_SHARE = 0.2
_LEAST_TUNING = 12
_CANDIDATES = 60

FindingVerdict = Literal["holds", "VIOLATED", "no claim"]


@dataclass(frozen=True, eq=False)
class Finding:
    """One game's outcome.

    :param adversary: text that describes what the adversary sees.
    :param game: text that describes how the game was played.
    :param delta: the task's.
    :param claim: claim about the rounds that were played: all of the task that train, or that ask.
    :param asks: whether they ask.
    :param points: upper bounds on error rates, at some thresholds.
    :param scores: scores of the counted trials.
    """

    adversary: str
    game: str
    delta: float
    claim: Claim
    asks: bool
    points: tuple[ErrorRates, ...]
    scores: Scores
    confidence: float = CONFIDENCE

    @property
    def trials(self) -> int:
        """The number of counted trials in each world."""
        return len(self.scores.inside)

    @property
    def unit(self) -> str:
        return self.claim.costliest.unit

    @property
    def rounds(self) -> int:
        return len(self.claim.charges)

    @cached_property
    def refuted_at(self) -> float | None:
        """A delta at which the measured errors contradict the ledger, if any."""
        refuted = (self.claim.refuted_at(point, self.delta) for point in self.points)
        return next((found for found in refuted if found is not None), None)

    @property
    def verdict(self) -> FindingVerdict:
        if self.refuted_at is not None:
            return "VIOLATED"
        return "no claim" if math.isinf(self.claimed) else "holds"

    @cached_property
    def claimed_round(self) -> float:
        """The claim about the costliest round."""
        return self.claim.epsilon_round(self.delta)

    @cached_property
    def claimed(self) -> float:
        """The claim about all `rounds`."""
        return self.claim.epsilon(self.delta)

    @property
    def noise_claimed(self) -> float:
        """The noise multiplier of the costliest round."""
        return self.claim.costliest.noise_multiplier

    @cached_property
    def noise_measured(self) -> float:
        """The largest noise multiplier of the costliest round, for a mechanism of the claimed form (Nasr et al. 2023,
        "Tight auditing of differentially private machine learning")."""
        return min(self.claim.multiplier_at_most(point) for point in self.points)

    @property
    def measured_round(self) -> float:
        """Lower bound for one round, without any assumption."""
        return max(epsilon_at_least(point, self.delta) for point in self.points)

    @property
    def measured_round_of_form(self) -> float:
        """The same, if the mechanism has the charged form and as much noise as the errors allow."""
        form = self.claim_of_form
        return max(self.measured_round, 0.0 if form is None else form.epsilon_round(self.delta))

    @property
    def measured(self) -> float:
        """Lower bound for `rounds` rounds, if the mechanism has that form."""
        form = self.claim_of_form
        return max(self.measured_round, 0.0 if form is None else form.epsilon(self.delta))

    @cached_property
    def claim_of_form(self) -> Claim | None:
        """The claim of the mechanism of that form, with as much noise as the errors allow; None if it is not known."""
        if math.isinf(self.noise_measured) or self.claim.costliest.mechanism == "none":
            return None
        return self.claim.with_noise(self.noise_measured)

    @property
    def raw(self) -> list[str]:
        """The names of the values that are sent without noise."""
        return list(self.claim.costliest.raw)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; an unbounded number is None."""
        return _bounded({name: getattr(self, name) for name in _PLAIN})


_PLAIN = (
    *("unit", "adversary", "game", "trials", "confidence", "delta", "rounds", "claimed_round", "claimed"),
    *("measured_round", "measured_round_of_form", "measured", "noise_claimed", "noise_measured"),
    *("refuted_at", "raw", "verdict"),
)


class WholeTask(NamedTuple):
    """All rounds of a task together: those that train, and those that ask.

    :param claimed: the ledger's epsilon after all of them.
    :param measured: its lower bound, under the same assumption as `Finding.measured`.
    """

    rounds: int
    claimed: float
    measured: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON; an unbounded number is None."""
        return _bounded(self._asdict())


def whole_task(findings: Sequence[Finding]) -> WholeTask:
    """Composes the findings of the strongest adversary for each kind of rounds: the first of each kind."""
    parts = list({each.asks: each for each in reversed(findings)}.values())
    delta, accountant = parts[0].delta, parts[0].claim.accountant
    charges = [charge for part in parts for charge in part.claim.charges]
    shown = [charge for part in parts if part.claim_of_form is not None for charge in part.claim_of_form.charges]
    claimed = Claim(tuple(charges), accountant).epsilon(delta)
    measured = max(Claim(tuple(shown)).epsilon(delta), *(part.measured for part in parts))
    return WholeTask(len(charges), claimed, measured)


def _bounded(plain: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in plain.items()}


def two_worlds(scores: Scores, claim: Claim, *, delta: float, adversary: str, game: str, asks: bool) -> Finding:
    """Tests a claim by the scores of the game of two worlds; a trial is one of the rounds, in turn."""
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
    return Finding(adversary, game, delta, claim, asks, points, tested)


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
