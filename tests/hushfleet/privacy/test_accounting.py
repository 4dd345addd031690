"""Rényi accounting (`accountant = "rdp"`) against Opacus, against what the papers print, and against slow integrals."""

from __future__ import annotations

import itertools
import math
import warnings
from functools import lru_cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import rdp as opacus_analysis
from scipy import special  # comes with Opacus

from hushfleet.durations import Period
from hushfleet.errors import PrivacyError
from hushfleet.privacy import accountant as accounting
from hushfleet.privacy import noise_for
from hushfleet.privacy.accountant import Step
from hushfleet.privacy.charge import RECORD_ADJACENCY, Charge
from hushfleet.privacy.ledger import LedgerEntry, epsilon_server_of
from hushfleet.privacy.noise_for import check_delta
from hushfleet.privacy.renyi import DEFAULT_ORDERS, _log_erfc, rdp
from hushfleet.privacy.spending import charges_on

epsilon = partial(accounting.epsilon, accountant="rdp")
noise_multiplier_for = partial(noise_for.noise_multiplier_for, accountant="rdp")

RATES = (1e-4, 1e-3, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0)
MULTIPLIERS = (0.3, 0.5, 0.8, 1.0, 2.0, 5.0, 20.0)


@lru_cache
def opacus_rdp_of_a_step(noise_multiplier: float, rate: float) -> np.ndarray:
    """Opacus needs most of the time of these tests, and its curve is linear in the steps."""
    return opacus_analysis.compute_rdp(
        q=rate, noise_multiplier=noise_multiplier, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS
    )


def opacus_epsilon(history: list[Step], delta: float) -> float:
    curve = sum(step.steps * opacus_rdp_of_a_step(step.noise_multiplier, step.sample_rate) for step in history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where the best order is the first or the last
        return opacus_analysis.get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=curve, delta=delta)[0]


def slow_log_moment(q: float, sigma: float, order: float) -> float:
    """log A by the midpoint rule on the definition: E over N(0, s^2) of ((1-q) + q exp((2z-1)/(2s^2)))^order."""
    z = np.linspace(-40 * sigma, 40 * sigma + order * 2, 400_001)
    log_density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
    log_terms = log_density + order * log_ratio
    top = log_terms.max()
    return top + math.log(np.exp(log_terms - top).sum() * (z[1] - z[0]))


def test_the_oracle_is_the_accountant_itself():
    accountant = RDPAccountant()
    accountant.history = [(1.1, 0.01, 500), (2.0, 1.0, 3)]
    history = [Step(1.1, 0.01, 500), Step(2.0, 1.0, 3)]
    assert opacus_epsilon(history, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)


def test_default_orders_are_those_of_opacus():
    assert list(DEFAULT_ORDERS) == RDPAccountant.DEFAULT_ALPHAS


@pytest.mark.parametrize("rate", RATES)
def test_epsilon_equals_opacus_over_the_grid(rate):
    compared = 0
    for multiplier in MULTIPLIERS:
        for steps, delta in itertools.product((1, 100, 100_000), (1e-6, 1e-2)):
            expected = max(0.0, opacus_epsilon([Step(multiplier, rate, steps)], delta))
            got = epsilon([Step(multiplier, rate, steps)], delta=delta)
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-9), (multiplier, steps, delta)
            compared += 1
    assert compared == len(MULTIPLIERS) * 6


@settings(max_examples=15)
@given(
    history=st.lists(
        st.builds(
            Step,
            st.floats(0.3, 20),
            st.one_of(st.just(1.0), st.floats(1e-4, 1.0)),
            st.integers(1, 100_000),
        ),
        min_size=1,
        max_size=2,
    ),
    delta=st.floats(1e-9, 0.5),
)
def test_composition_equals_opacus(history, delta):
    expected = max(0.0, opacus_epsilon(history, delta))
    assert epsilon(history, delta=delta) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("q", "sigma", "order"), [(0.01, 1.0, 2.5), (0.2, 0.7, 1.1), (0.5, 2.0, 7.3), (0.9, 4.0, 3.0), (0.001, 0.5, 11.0)]
)
def test_rdp_equals_the_integral_it_stands_for(q, sigma, order):
    expected = slow_log_moment(q, sigma, order) / (order - 1)
    assert rdp(Step(sigma, q, 1), [order])[0] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_rdp_of_the_plain_gaussian_by_hand():
    # order / (2 sigma^2) a step: 3 / (2 * 4) = 0.375, five times
    assert rdp(Step(2.0, 1.0, 5), [3.0]).tolist() == [1.875]


def test_rdp_at_order_two_by_hand():
    # A(2) = 1 + q^2 (exp(1 / sigma^2) - 1): q = 0.1, sigma = 1
    assert rdp(Step(1.0, 0.1, 1), [2.0])[0] == pytest.approx(math.log1p(0.01 * (math.e - 1)), rel=1e-13)


def test_tiny_rates_keep_their_digits():
    # 1 + 1e-8 * (e - 1) would lose half its digits before the logarithm
    assert rdp(Step(1.0, 1e-7, 1), [2.0])[0] == pytest.approx(1e-14 * (math.e - 1), rel=1e-12)


@pytest.mark.parametrize(
    ("multiplier", "printed", "server"),
    [(3.975, 2, 12.2), (2.549, 4, 25.2), (1.965, 6, 39.0), (1.636, 8, 53.6), (1.062, 16, 115.2)],
)
def test_fedglp_adp(multiplier, printed, server):
    """20 rounds, delta 0.1: what the paper prints holds for the sum; one client's own bytes cost `server`."""
    assert epsilon([Step(multiplier, 1.0, 20)], delta=0.1) == pytest.approx(printed, abs=0.01)
    assert epsilon([Step(multiplier / math.sqrt(10), 1.0, 20)], delta=0.1) == pytest.approx(server, abs=0.05)


def test_fedglp_adp_cifar():
    assert epsilon([Step(0.3, 1.0, 40)], delta=0.1) == pytest.approx(264, abs=0.5)
    assert epsilon([Step(0.3 / math.sqrt(10), 1.0, 40)], delta=0.1) == pytest.approx(2464, abs=0.5)


@pytest.mark.parametrize(("multiplier", "theorem_1"), [(3.975, 3.05), (1.965, 7.47), (1.062, 17.9)])
def test_fedglp_adp_theorem_1_is_looser(multiplier, theorem_1):
    """Its own conversion: the least of T a / (2 sigma^2) + log(1 / delta) / (a - 1)."""
    orders = np.array(DEFAULT_ORDERS)
    bounds = rdp(Step(multiplier, 1.0, 20), DEFAULT_ORDERS) + math.log(10) / (orders - 1)
    assert bounds.min() == pytest.approx(theorem_1, rel=3e-3)


@pytest.mark.parametrize(
    ("multiplier", "expected"), [(0.8, 112.56), (1.0, 77.0), (1.3, 50.08), (1.5, 39.78), (2.1, 23.55)]
)
def test_acdp_pfsd(multiplier, expected):
    assert epsilon([Step(multiplier, 1.0, 100)], delta=50**-1.1) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("multiplier", "printed"), [(2.432, 2), (1.482, 4), (0.994, 8)])
def test_dp_fedsim(multiplier, printed):
    assert epsilon([Step(multiplier, 0.1, 100)], delta=1e-5) == pytest.approx(printed, rel=0.01)


@pytest.mark.parametrize(("target", "multiplier"), [(2, 0.433), (4, 0.390), (6, 0.366), (8, 0.350), (16, 0.311)])
def test_feddpa_pooled_accountant(target, multiplier):
    found = noise_multiplier_for(epsilon=target, delta=0.1, steps=75_000, sample_rate=16 / 60_000)
    assert found == pytest.approx(multiplier, abs=0.0011)


def test_no_noise_is_no_privacy_and_nothing_released_costs_nothing():
    assert epsilon([Step(0.0, 1.0, 1)], delta=0.1) == math.inf
    assert epsilon([Step(5.0, 0.5, 10), Step(0.0, 0.01, 1)], delta=0.1) == math.inf
    assert epsilon([], delta=0.1) == 0.0
    assert epsilon([Step(0.0, 1.0, 0), Step(0.0, 0.0, 100)], delta=0.1) == 0.0


def test_epsilon_is_never_negative():
    assert opacus_epsilon([Step(1000.0, 1.0, 1)], 0.5) < 0
    assert epsilon([Step(1000.0, 1.0, 1)], delta=0.5) == 0.0


def test_no_warning_where_the_best_order_is_the_last():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate, multiplier in itertools.product((1e-4, 0.5, 1.0), (0.05, 1.0, 1000.0)):
            assert epsilon([Step(multiplier, rate, 3)], delta=1e-5) >= 0


@settings(max_examples=15)
@given(multiplier=st.floats(0.5, 10), rate=st.floats(0.001, 1), steps=st.integers(1, 1000), delta=st.floats(1e-8, 0.1))
def test_more_noise_and_less_sampling_never_cost_more(multiplier, rate, steps, delta):
    base = epsilon([Step(multiplier, rate, steps)], delta=delta)
    assert epsilon([Step(multiplier * 1.1, rate, steps)], delta=delta) <= base * (1 + 1e-9)
    assert epsilon([Step(multiplier, rate * 0.9, steps)], delta=delta) <= base * (1 + 1e-9)
    assert epsilon([Step(multiplier, rate, steps + 1)], delta=delta) >= base * (1 - 1e-9)


@pytest.mark.parametrize(
    ("target", "delta", "steps", "rate"), [(2, 0.1, 20, 1.0), (8, 1e-5, 1000, 0.01), (500, 1e-3, 3, 1)]
)
def test_noise_multiplier_for_is_the_smallest_that_reaches(target, delta, steps, rate):
    found = noise_multiplier_for(epsilon=target, delta=delta, steps=steps, sample_rate=rate)
    assert epsilon([Step(found, rate, steps)], delta=delta) <= target
    assert epsilon([Step(found * (1 - 1e-8), rate, steps)], delta=delta) > target


def test_an_unreachable_target_is_refused_with_its_floor():
    # the conversion alone costs about (ln 1e5 - ln 63) / 62 - 1/63 = 0.1029 at the highest order
    with pytest.raises(PrivacyError, match=r"no noise multiplier reaches epsilon 0\.05 .* 0\.1029"):
        noise_multiplier_for(epsilon=0.05, delta=1e-5, steps=1)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
def test_targets_must_be_positive_and_finite(bad):
    with pytest.raises(PrivacyError, match="target epsilon"):
        noise_multiplier_for(epsilon=bad, delta=0.1, steps=1)


@pytest.mark.parametrize(("steps", "rate"), [(0, 1.0), (1, 0.0), (1, 1.5), (1, math.nan)])
def test_a_multiplier_needs_steps(steps, rate):
    with pytest.raises(PrivacyError, match="at least one step"):
        noise_multiplier_for(epsilon=1.0, delta=0.1, steps=steps, sample_rate=rate)


@pytest.mark.parametrize(
    "step",
    [
        Step(-1.0, 1.0, 1),
        Step(math.nan, 1.0, 1),
        Step(math.inf, 1.0, 1),
        Step(1.0, -0.1, 1),
        Step(1.0, 1.1, 1),
        Step(1.0, math.nan, 1),
        Step(1.0, 1.0, -1),
        Step(1.0, 1.0, 1.5),
    ],
)
def test_steps_outside_their_range_are_refused(step):
    with pytest.raises(PrivacyError):
        epsilon([step], delta=0.1)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, math.nan])
def test_delta_outside_its_range_is_refused(delta):
    with pytest.raises(PrivacyError, match="delta must lie"):
        epsilon([Step(1.0, 1.0, 1)], delta=delta)
    with pytest.raises(PrivacyError, match="delta must lie"):
        check_delta(delta, 10)


def test_check_delta():
    assert check_delta(0.01, 10) == []
    assert len(check_delta(0.011, 10)) == 1
    assert len(check_delta(0.1, 10)) == 1
    with pytest.raises(PrivacyError, match=r"above 1/10 = 0\.1"):
        check_delta(0.11, 10)
    assert len(check_delta(0.11, 10, as_published=True)) == 1
    with pytest.raises(PrivacyError, match="at least one unit"):
        check_delta(0.1, 0)


def test_log_erfc_against_scipy():
    x = np.concatenate([np.linspace(-30, 30, 2001), np.geomspace(20, 1e6, 200)])
    expected = math.log(2) + special.log_ndtr(-x * math.sqrt(2))
    np.testing.assert_allclose(_log_erfc(x), expected, rtol=1e-12, atol=1e-15)


def test_windows_of_records_cost_no_more_than_opacus_says() -> None:
    first, second = Period(0, 10), Period(10, 20)
    entries = [
        LedgerEntry("t", round, Charge("record", RECORD_ADJACENCY, "gaussian", z, 1, 0.01, steps), b"", 1, window)
        for round, (window, z, steps) in enumerate([(first, 1.1, 200), (first, 0.9, 100), (second, 1.3, 300)])
    ]
    for charges in (charges_on(first, entries), charges_on(second, entries), [entry.charge for entry in entries]):
        asked = RDPAccountant()
        asked.history = [(charge.noise_multiplier, charge.sample_rate, charge.steps) for charge in charges]
        said = asked.get_epsilon(1e-5)
        assert 0.6 * said < epsilon_server_of(charges, delta=1e-5) < said
