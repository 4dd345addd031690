"""Bounds from counts, against SciPy, closed forms and mechanisms whose epsilon is known."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from hushfleet.privacy.accountant import Step
from hushfleet.privacy.accountant import epsilon as composed
from hushfleet.privacy.charge import RECORD_ADJACENCY, Charge
from hushfleet.simulator.studies.audit.bounds import (
    ErrorRates,
    epsilon_at_least,
    rate_at_most,
    separation_at_least,
)
from hushfleet.simulator.studies.audit.claims import Claim, least_misses
from hushfleet.simulator.studies.audit.record import log_ratio


@pytest.mark.parametrize("trials", [1, 7, 400, 5000])
@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.97, 1])
@pytest.mark.parametrize("risk", [0.05, 0.0125])
def test_rates_are_those_of_clopper_and_pearson(trials: int, share: float, risk: float) -> None:
    errors = round(share * trials)
    expected = 1.0 if errors == trials else stats.beta.ppf(1 - risk, errors + 1, trials - errors)
    assert rate_at_most(errors, trials, risk=risk) == pytest.approx(expected, rel=1e-9)


def test_a_rate_is_above_its_bound_as_rarely_as_is_said() -> None:
    rng = np.random.default_rng(0)
    bounds = {count: rate_at_most(count, 50, risk=0.05) for count in range(51)}
    above = np.mean([bounds[count] < 0.1 for count in rng.binomial(50, 0.1, 4000).tolist()])
    assert above <= 0.055


def test_epsilon_of_randomised_response_is_found_and_not_exceeded() -> None:
    """Its errors are both 1 / (1 + e^epsilon)."""
    for epsilon in (0.5, 2.0, 4.0):
        wrong = 1 / (1 + math.exp(epsilon))
        assert epsilon_at_least(ErrorRates(wrong, wrong), 0.0) == pytest.approx(epsilon)
        assert epsilon_at_least(ErrorRates(wrong, wrong), 0.01) < epsilon
    assert epsilon_at_least(ErrorRates(0.5, 0.5), 0.0) == 0
    assert epsilon_at_least(ErrorRates(1.0, 0.2), 0.3) == 0


def test_separation_of_two_normal_distributions() -> None:
    errors = NormalDist().cdf(-0.6), NormalDist().cdf(-1.1)
    assert separation_at_least(ErrorRates(*errors)) == pytest.approx(1.7)
    assert separation_at_least(ErrorRates(0.6, 0.5)) < 0
    assert math.isfinite(separation_at_least(ErrorRates(0.0, 1.0)))


def test_a_claims_own_mechanism_does_not_contradict_it() -> None:
    """The best test between the two worlds, at its true error rates; with less noise it does."""
    claim = Claim((Charge("device", "", "gaussian", 1.0),))
    for threshold in np.linspace(-3, 4, 40):

        def errors(separation: float, threshold: float = threshold) -> ErrorRates:
            return ErrorRates(1 - NormalDist().cdf(threshold), NormalDist(separation).cdf(threshold))

        assert claim.refuted_at(errors(1.0), 1e-3) is None
        assert claim.multiplier_at_most(errors(1.0)) == pytest.approx(1.0, rel=1e-6)
        assert claim.refuted_at(errors(1.05), 1e-3) is not None
    assert claim.multiplier_at_most(errors(2.0)) == pytest.approx(0.5, rel=1e-6)


def charges_of(*multipliers: float) -> tuple[Charge, ...]:
    return tuple(Charge("device", "", "gaussian", each) for each in multipliers)


@pytest.mark.parametrize("false_positive", [1e-4, 0.02, 0.3, 0.8])
def test_the_fewest_misses_are_those_of_the_best_test(false_positive: float) -> None:
    """Against the likelihood ratios of a million rounds; with rounds alike, against the closed form."""
    multipliers, shares = np.array([0.5, 1.0, 4.0]), np.array([0.5, 0.3, 0.2])
    rng, trials = np.random.default_rng(0), 1_000_000
    of_round = rng.choice(multipliers, trials, p=shares)
    outside, inside = ((2 * (mean + of_round * rng.normal(size=trials)) - 1) / (2 * of_round**2) for mean in (0.0, 1.0))
    threshold = np.quantile(outside, 1 - false_positive)
    missed = float((inside <= threshold).mean())
    assert least_misses(multipliers, shares, false_positive) == pytest.approx(missed, abs=3e-3)
    alone = NormalDist().cdf(NormalDist().inv_cdf(1 - false_positive) - 1 / 0.7)
    for alike in (np.array([0.7]), np.array([0.7, 0.7])):
        assert least_misses(alike, np.full(len(alike), 1 / len(alike)), false_positive) == pytest.approx(alone)


def test_rounds_with_different_noise_are_one_claim() -> None:
    """All rounds with the noise of the costliest one contradict it, though they do not contradict that round's own."""
    claim, costliest = Claim(charges_of(1.0, 1.0, 3.0)), Claim(charges_of(1.0))
    assert claim.epsilon_round(1e-3) == costliest.epsilon(1e-3)
    assert claim.epsilon(1e-3) == composed([Step(1.0, 1.0, 2), Step(3.0, 1.0, 1)], delta=1e-3)
    for a in (0.001, 0.05, 0.4):
        own = ErrorRates(a, least_misses(np.array([1.0, 3.0]), np.array([2 / 3, 1 / 3]), a) * (1 + 1e-7))
        less = ErrorRates(a, least_misses(np.array([1.0]), np.array([1.0]), a) * (1 + 1e-7))
        assert claim.refuted_at(own, 1e-3) is None
        assert claim.multiplier_at_most(own) == pytest.approx(1.0, rel=1e-5)
        assert claim.refuted_at(less, 1e-3) is not None
        assert claim.multiplier_at_most(less) < 0.96
        assert costliest.refuted_at(less, 1e-3) is None
    noised = [charge.noise_multiplier for charge in claim.with_noise(0.5).charges]
    assert noised == [0.5, 0.5, 1.5]


def test_a_sampled_claims_own_mechanism_does_not_contradict_it() -> None:
    rate, sigma, batches, trials = 0.2, 1.0, 5, 40_000
    claim = Claim((Charge("record", RECORD_ADJACENCY, "gaussian", sigma, sample_rate=rate, steps=batches),))
    rng = np.random.default_rng(0)

    def scores(inside: bool) -> np.ndarray:
        taken = [(rng.random(trials) < rate) & inside for _ in range(batches)]
        return log_ratio([rng.normal(0, sigma, (1, trials)) + each for each in taken], rate, sigma)

    inside, outside = scores(True), scores(False)
    for threshold in np.quantile(outside, (0.3, 0.9)):
        wrong = int((outside > threshold).sum()), int((inside <= threshold).sum())
        rates = ErrorRates(*(rate_at_most(count, trials, risk=0.0125) for count in wrong))
        assert claim.refuted_at(rates, 1e-3) is None
