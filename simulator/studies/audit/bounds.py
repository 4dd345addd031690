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

from scipy import special


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
