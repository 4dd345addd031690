"""From counts of an adversary's errors to lower bounds, by arithmetic that knows no mechanism.

A test between two worlds errs at a false positive rate a (it says "in", and it was out) and a false negative rate b.
Any (epsilon, delta)-private mechanism keeps `a + e^epsilon b >= 1 - delta` and `b + e^epsilon a >= 1 - delta` (Kairouz,
Oh and Viswanath 2015, Theorem 2.1), so upper bounds on a and b give a lower bound on epsilon.

With n trials without an error a rate is known to be below some 3.7 / n at best: no audit of n trials can certify more
than about log(n / 4). That is why claims of 1 to 3 can be measured, and claims of 8 cannot.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from scipy import special


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
    return 1.0 if errors == trials else float(special.betaincinv(errors + 1, trials - errors, 1 - risk))


def epsilon_at_least(rates: ErrorRates, delta: float) -> float:
    """What any mechanism with errors below `rates` has at `delta`; 0 where nothing is shown."""
    ratios = [(1 - delta - kept) / given for given, kept in (rates, (rates.false_negative, rates.false_positive))]
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0), 0.0)


def separation_at_least(rates: ErrorRates) -> float:
    """mu of Gaussian differential privacy (Dong, Roth and Su 2022): how many standard deviations lie between two
    normal distributions that can be told apart with such errors, at least. Negative where nothing is shown."""
    return -sum(float(special.ndtri(min(max(rate, 1e-300), 1 - 1e-16))) for rate in rates)
