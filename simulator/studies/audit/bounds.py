"""From counts of an adversary's errors to lower bounds, by arithmetic that knows no mechanism.

A test between two worlds errs at a false positive rate a (it says "in", and it was out) and a false negative rate b.
Any (epsilon, delta)-private mechanism keeps `a + e^epsilon b >= 1 - delta` and `b + e^epsilon a >= 1 - delta` (Kairouz,
Oh and Viswanath 2015, Theorem 2.1), so upper bounds on a and b give a lower bound on epsilon.

With n trials without an error a rate is known to be below some 3.7 / n at best: no audit of n trials can certify more
than about log(n / 4). That is why claims of 1 to 3 can be measured, and claims of 8 cannot.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

_BISECTIONS = 50
_NORMAL = NormalDist()


class ErrorRates(NamedTuple):
    """Upper bounds that hold together, at the confidence that they were made for."""

    false_positive: float
    false_negative: float


def rate_at_most(errors: int, trials: int, *, risk: float) -> float:
    """Clopper and Pearson 1934: the rate is below this, but for a probability of at most `risk`.

    The largest rate at which so few errors, or fewer, still have the probability `risk`.
    """
    if not 0 <= errors <= trials or trials < 1 or not 0 < risk < 1:
        raise ValueError(f"{errors} errors in {trials} trials at risk {risk}")
    if errors == trials:
        return 1.0
    low, high = errors / trials, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _log_at_most(errors, trials, middle) > math.log(risk):
            low = middle
        else:
            high = middle
    return high


def epsilon_at_least(rates: ErrorRates, delta: float) -> float:
    """What any mechanism with errors below `rates` has at `delta`; 0 where nothing is shown."""
    ratios = [
        (1 - delta - kept) / given
        for given, kept in (rates, (rates.false_negative, rates.false_positive))
    ]
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0), 0.0)


def separation_at_least(rates: ErrorRates) -> float:
    """mu of Gaussian differential privacy (Dong, Roth and Su 2022): how many standard deviations lie between two
    normal distributions that can be told apart with such errors, at least. Negative where nothing is shown."""
    limits = [min(max(rate, 1e-300), 1 - 1e-16) for rate in rates]
    return -sum(_NORMAL.inv_cdf(rate) for rate in limits)


def one_run_epsilon(canaries: int, guesses: int, correct: int, *, delta: float, risk: float) -> float:
    """Steinke, Nasr and Jagielski 2023, "Privacy auditing with one (1) training run", Theorem 5.2.

    Each of `canaries` was put in by a fair coin of its own, into one and the same run; the adversary guessed at
    `guesses` of the coins, and at so many correctly. The largest epsilon that such a result rejects at `risk`.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"{correct} correct of {guesses} guesses at {canaries} canaries")

    def rejected(epsilon: float) -> bool:
        return _one_run_p_value(canaries, guesses, correct, epsilon, delta) < risk

    if guesses == 0 or not rejected(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while rejected(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


def _one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 as their Appendix D computes it: beta + 2 m delta alpha.

    beta = P[B >= v] and alpha = max over i of P[v > B >= v - i] / i, with B binomial of `guesses` and the accuracy
    e^epsilon / (1 + e^epsilon) that randomised response has.
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    mass = np.exp(_log_masses(guesses, accuracy))
    beta = float(mass[correct:].sum())
    if correct == 0:
        return 1.0
    below = np.cumsum(mass[:correct][::-1])
    alpha = float((below / np.arange(1, correct + 1)).max())
    return min(1.0, beta + 2 * canaries * delta * alpha)


def _log_at_most(errors: int, trials: int, rate: float) -> float:
    if rate >= 1:
        return -math.inf
    logs = _log_masses(trials, rate)[: errors + 1]
    largest = float(logs.max())
    return largest + math.log(float(np.exp(logs - largest).sum()))


def _log_masses(trials: int, rate: float) -> np.ndarray:
    """log P[B = k] for k = 0 ... trials, float64."""
    if rate >= 1 - 1e-16:
        return np.where(np.arange(trials + 1) == trials, 0.0, -np.inf)
    hits = np.arange(trials + 1)
    return _log_binomials(trials) + hits * math.log(max(rate, 1e-300)) + (trials - hits) * math.log1p(-rate)


@lru_cache(maxsize=64)
def _log_binomials(trials: int) -> np.ndarray:
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, trials + 1)))))
    return factorials[-1] - factorials - factorials[::-1]
