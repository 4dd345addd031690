"""Epsilon of composed Gaussian mechanisms in which every unit takes part: the exact value, not a bound.

Gaussian mechanisms with multipliers sigma_i compose to one with mean shift mu = sqrt(sum 1 / sigma_i^2) (Dong, Roth
and Su 2019), whose curve is delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) (Balle and
Wang 2018). Written with a = epsilon/mu - mu/2 and Mills' ratio R(x) = Phi(-x) / phi(x) it is
phi(a) (R(a) - R(a + mu)): nothing overflows, and no small number is the difference of large ones.
"""

from __future__ import annotations

import math

_LOG_SQRT_2PI = math.log(2 * math.pi) / 2
# Mills' ratio is computed to about 1e-14; all rounding goes to the side that makes epsilon larger.
_ROUNDING = 1e-13


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Returns the smallest epsilon at `delta`, rounded up by about 1e-12 relative; inf for a `mu` of inf.

    >>> round(epsilon_of_gaussian(1.0, 1e-5), 3)
    4.377
    """
    if mu == 0:
        return 0.0
    if mu > 1e150:  # its square, half of epsilon, overflows a float
        return math.inf
    log_delta = math.log(delta)
    low, high = -mu / 2, 1.0  # epsilon = 0, and where the curve is below delta
    if log_delta_of(low, mu) <= log_delta:
        return 0.0
    while log_delta_of(high, mu) > log_delta:
        high *= 2
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        if log_delta_of(middle, mu) > log_delta:
            low = middle
        else:
            high = middle
    return max(0.0, mu * (high + mu / 2) + 1e-12 * mu * (abs(high) + mu))


def log_delta_of(a: float, mu: float) -> float:
    """Returns log delta at epsilon = mu (a + mu/2), rounded up."""
    if a < 0:
        above = math.erfc(a / math.sqrt(2)) / 2
        return math.log(max(above * (1 + _ROUNDING) - _density(a) * _mills(a + mu) * (1 - _ROUNDING), 5e-324))
    difference = _mills(a) * (1 + _ROUNDING) - _mills(a + mu) * (1 - _ROUNDING)
    return -a * a / 2 - _LOG_SQRT_2PI + math.log(difference)


def _density(x: float) -> float:
    return math.exp(-x * x / 2 - _LOG_SQRT_2PI)


def _mills(x: float) -> float:
    """Returns Phi(-x) / phi(x), to 1e-13 relative, for x >= 0 and for negative x where it is finite."""
    if x < 10:
        return math.erfc(x / math.sqrt(2)) / 2 / _density(x)
    # 1/x (1 - 1/x^2 + 3/x^4 - 15/x^6 ...): at x = 10 the twelfth term is below 1e-13 and the error below it
    total, term, square = 1.0, 1.0, x * x
    for odd in range(1, 25, 2):
        term *= -odd / square
        total += term
    return total / x
