"""Computes lower bounds on epsilon from counts of an adversary's errors, independent of the mechanism.

A test between two worlds has a false positive rate a (it says "in", and it was out) and a false negative rate b. Each
(epsilon, delta)-private mechanism satisfies `a + e^epsilon b >= 1 - delta` and `b + e^epsilon a >= 1 - delta` (Kairouz,
Oh and Viswanath 2015, Theorem 2.1), so upper bounds on a and b give a lower bound on epsilon.

Even n trials without an error only show that a rate is below about 3.7 / n: no audit of n trials can certify more than
about log(n / 4). So claims of 1 to 3 can be measured, and claims of 8 cannot.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

_LARGEST_EPSILON = 700.0


class ErrorRates(NamedTuple):
    """Upper bounds on two error rates that hold together, at the confidence for which they were computed."""

    false_positive: float
    false_negative: float


def rate_at_most(errors: int, trials: int, *, risk: float) -> float:
    """Returns the bound of Clopper and Pearson 1934: the rate is above it with a probability of at most `risk`.

    It is the largest rate at which `errors` or fewer errors still have the probability `risk`.
    """
    if not 0 <= errors <= trials or trials < 1 or not 0 < risk < 1:
        raise ValueError(f"{errors} errors in {trials} trials at risk {risk}")
    return 1.0 if errors == trials else float(special.betaincinv(errors + 1, trials - errors, 1 - risk))


def epsilon_at_least(rates: ErrorRates, delta: float) -> float:
    """Returns the least epsilon at `delta` of a mechanism with errors below `rates`; 0 if the rates show nothing."""
    ratios = [(1 - delta - kept) / given for given, kept in (rates, (rates.false_negative, rates.false_positive))]
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0), 0.0)


def separation_at_least(rates: ErrorRates) -> float:
    """Returns mu of Gaussian differential privacy (Dong, Roth and Su 2022): the least distance, in standard deviations,
    of two normal distributions that can be distinguished with such errors. Negative if the rates show nothing."""
    return -sum(float(special.ndtri(min(max(rate, 1e-300), 1 - 1e-16))) for rate in rates)


def one_run_epsilon(canaries: int, guesses: int, correct: int, *, delta: float, risk: float) -> float:
    """Returns the largest epsilon that one run's guesses reject at `risk`.

    Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2: each of `canaries` was
    inserted by its own fair coin into the same run; the adversary guessed `guesses` coins, `correct` of them correctly.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} correct of {guesses} guesses at {canaries} canaries")

    def excess(epsilon: float) -> float:
        return _one_run_p_value(canaries, guesses, correct, epsilon, delta) - risk

    if guesses == 0 or excess(0.0) >= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, _LARGEST_EPSILON, xtol=1e-12))


def _one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Returns the p-value of Theorem 5.2, computed as in the paper's Appendix D: beta + 2 m delta alpha.

    beta = P[B >= v] and alpha = max over i of P[v > B >= v - i] / i, with B binomial of `guesses` and the accuracy
    e^epsilon / (1 + e^epsilon) of randomised response.
    """
    if correct == 0:
        return 1.0
    accuracy, hits = 1 / (1 + math.exp(-epsilon)), np.arange(guesses + 1)
    choices = special.gammaln(guesses + 1) - special.gammaln(hits + 1) - special.gammaln(guesses - hits + 1)
    mass = np.exp(choices + special.xlogy(hits, accuracy) + special.xlog1py(guesses - hits, -accuracy))
    below = np.cumsum(mass[:correct][::-1])
    alpha = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, float(mass[correct:].sum()) + 2 * canaries * delta * alpha)
