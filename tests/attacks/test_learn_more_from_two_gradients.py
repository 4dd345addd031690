"""Wanted: more about a record than the ledger says, from two gradients of the same Poisson batch.

A record is in both gradients or in none, so the pair tells more than two steps with batches of their own. The ledger
once charged two such steps; here an attacker who sees both noised gradients of each batch beats that charge, and does
not beat the charge of today.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import beta

from hushfleet.aggregator.config.task import parse_task
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.params import ParamLayout
from hushfleet.privacy.accountant import Step, epsilon
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.record import RecordMechanism
from hushfleet.wire.format.spec import PrivacySpec
from support.methods import WITH_RECORDS

SIGMA, RATE, BATCHES, DELTA = 0.6, 0.02, 150, 0.05
TRIALS = 100_000
MECHANISM = RecordMechanism(1.0, SIGMA, sample_rate=RATE, batches=BATCHES, gradients_per_batch=2, batch_size=1)
TWO_GRADIENTS = {
    "dp-fedsam": {},
    "feddpa": {},
    "fedaddp": {},
    "fedglp-adp": {"sequential": True},
    "apfl": {},
    "pfedme": {"own_steps": 2},
}


def evidence(*, record_is_there: bool) -> np.ndarray:
    """What an attacker computes of both noised gradients of all batches: log-likelihood ratios `[TRIALS]`.

    Each coordinate is a trial of its own, with the worst gradient that a record can have: C, in both gradients.
    """
    rng, noise = np.random.default_rng(4), SeededNoise(1, int(record_is_there), 0)
    total = np.zeros(TRIALS)
    for _ in range(BATCHES):
        drawn = rng.random(TRIALS) < RATE
        sums = (drawn & record_is_there).astype(np.float32)
        pair = sum(MECHANISM.noised_mean(sums.copy(), noise).astype(np.float64) for _ in range(2))
        total += np.log1p(RATE * np.expm1((pair - 1) / SIGMA**2))
    return total


def measured_epsilon() -> float:
    """A lower bound, wrong with a probability below 0.1 %: by Clopper and Pearson at each threshold."""
    absent, present = evidence(record_is_there=False), evidence(record_is_there=True)
    bounds = []
    for threshold in np.quantile(absent, (0.99, 0.998, 0.9995)):
        false, true = int((absent > threshold).sum()), int((present > threshold).sum())
        most_false = beta.ppf(1 - 1e-4, false + 1, TRIALS - false)
        least_true = beta.ppf(1e-4, true, TRIALS - true + 1)
        bounds.append(math.log((least_true - DELTA) / most_false))
    return max(bounds)


def test_the_pair_of_gradients_does_not_beat_its_charge() -> None:
    charge, measured = MECHANISM.charge(), measured_epsilon()
    as_independent = epsilon([Step(SIGMA, RATE, 2 * BATCHES)], delta=DELTA)
    charged = epsilon([Step(charge.noise_multiplier, charge.sample_rate, charge.steps)], delta=DELTA)
    assert measured > as_independent, "the attack works: independent steps would be too small a charge"
    assert measured < charged


@pytest.mark.parametrize(
    ("name", "settings"), [*TWO_GRADIENTS.items(), *((name, {}) for name in WITH_RECORDS if name not in TWO_GRADIENTS)]
)
def test_no_method_is_charged_less_than_its_gradients_of_one_batch_cost(name: str, settings: dict[str, bool]) -> None:
    privacy = PrivacySpec("record", "strict", 1.0, 0.8, 1e-5, sample_rate=0.01, batches=30)
    method = make_method(name, settings, privacy, ParamLayout(("a.weight", "norm.weight"), ((2, 1), (2,))), rounds=2)
    gradients = method.training.gradients_per_batch
    assert gradients == (2 if name in TWO_GRADIENTS else 1)
    charge = method.charge(RoundTerms())
    assert (charge.steps, charge.sample_rate) == (30, 0.01)
    assert charge.noise_multiplier == pytest.approx(0.8 / math.sqrt(gradients), rel=1e-12)


@pytest.mark.parametrize("name", sorted(TWO_GRADIENTS))
def test_noise_for_an_epsilon_is_sized_by_what_is_charged(name: str) -> None:
    task = parse_task(
        {
            "name": "sized",
            "model": {"name": "digits-cnn"},
            "method": {"name": name, "batch_size": 16, **TWO_GRADIENTS[name]},
            "privacy": {"unit": "record", "accounting": "strict", "epsilon": 3.0, "delta": 1e-5, "sample_rate": 0.05},
            "data": {"name": "digits", "devices": 4},
            "round": {"rounds": 3},
        }
    )
    privacy = task.privacy_spec()
    layout = ParamLayout(("a", "b"), ((2,), (2,)))
    charge = make_method(name, task.method.settings, privacy, layout, rounds=3).charge(RoundTerms())
    spent = epsilon([Step(charge.noise_multiplier, charge.sample_rate, 3 * charge.steps)], delta=1e-5)
    assert spent == pytest.approx(3.0, rel=1e-3)
    assert spent <= 3.0 * (1 + 1e-9)
