"""The privacy loss of one Poisson-subsampled Gaussian step, on a grid.

A step is a pair of distributions of one number z: with the unit, P = (1-q) N(0, s^2) + q N(1, s^2), and without it,
Q = N(0, s^2). Its loss log(P/Q) rises with z, so a cell of the grid of losses is an interval of z. The P-mass and the
Q-mass of a cell are divided between its two ends so that both masses are preserved. The true pair is a post-processing
of the pair on the grid, so the grid dominates it (Doroshenko et al. 2022, "connect the dots"), and the excess is of
second order in the grid's step. A loss above the grid becomes infinite, a loss below it becomes the smallest loss of
the grid, and each mass is increased by a bound on its rounding error.

Replacing one unit by another is the pair P = (1-q) N(0, s^2) + q N(1, s^2), Q = (1-q) N(0, s^2) + q N(-1, s^2). It
dominates all replacements: for units that move the sum by x and by y, at most 1 each, and b = e^epsilon >= 1, the curve
P - b Q is q times the mean under N(x) of max(0, 1 - k e^U - b e^V), where k = (1-q) (b-1) / q >= 0, and U and V are
the log ratios of N(0) and N(y) to N(x). U and V are jointly Gaussian, e^U and e^V have mean 1, and the covariances are
x.x, x.(x-y) and (x-y).(x-y), over s^2. The mean of a convex function of a sum of positive multiples of such factors
rises with every covariance (Slepian's argument: its derivative is the derivative of a convex function of the sum), and
all three covariances are largest at y = -x, |x| = 1. For b < 1, P and Q change places.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

ULP = 2.0**-53


class Pair(NamedTuple):
    """The two cases that an adversary distinguishes in one step: one unit or another (`replaces`), else one or none."""

    noise_multiplier: float
    sample_rate: float
    replaces: bool = False


class Losses(NamedTuple):
    """Mass of the loss `(first + i) * h` for each i, and of an infinite loss."""

    first: int
    mass: np.ndarray
    infinite: float


def loss_of(pair: Pair, z: np.ndarray) -> np.ndarray:
    """Returns log(P/Q) at each z."""
    s2, q = pair.noise_multiplier**2, pair.sample_rate
    if q == 1:
        return 2 * z / s2 if pair.replaces else (2 * z - 1) / (2 * s2)
    log_rest, log_q = math.log1p(-q), math.log(q)
    loss = np.logaddexp(log_rest, log_q + (2 * z - 1) / (2 * s2))
    return loss - np.logaddexp(log_rest, log_q + (-2 * z - 1) / (2 * s2)) if pair.replaces else loss


def z_of(pair: Pair, loss: np.ndarray) -> np.ndarray:
    """Returns the inverse of `loss_of`; -inf below the smallest loss, log(1 - q)."""
    s2, q = pair.noise_multiplier**2, pair.sample_rate
    if q == 1:
        return s2 * loss / 2 if pair.replaces else s2 * loss + 0.5
    with np.errstate(divide="ignore", over="ignore"):
        if pair.replaces:
            # With u = e^(z / s2) and c = q e^(-1 / (2 s2)): c u^2 - (1-q) (e^loss - 1) u - c e^loss = 0 for loss >= 0;
            # all terms of its root are positive. The pair is symmetric.
            size = np.abs(loss)
            log_c = math.log(q) - 1 / (2 * s2)
            log_b = math.log1p(-q) + size + np.log(-np.expm1(-size))
            log_root = np.logaddexp(2 * log_b, math.log(4) + 2 * log_c + size) / 2
            return np.asarray(np.copysign(s2 * (np.logaddexp(log_b, log_root) - math.log(2) - log_c), loss))
        # e^loss = 1 - q + q e^y, solved for y without subtracting nearly equal numbers
        high = loss + np.log1p(-(1 - q) * np.exp(-np.maximum(loss, 0))) - math.log(q)
        middle = np.log1p(np.maximum(np.expm1(np.clip(loss, -1, 1)) / q, -1))
        low = np.log(np.maximum(np.exp(np.minimum(loss, 0)) - (1 - q), 0) / q)
        return np.asarray(s2 * np.where(loss > 1, high, np.where(loss < -0.7, low, middle)) + 0.5)


@lru_cache(maxsize=64)
def losses_on_grid(pair: Pair, h: float, ends: tuple[float, float], reverse: bool) -> Losses:
    """Returns the loss of P against Q under P, or with `reverse` the loss of Q against P under Q.

    :param h: the grid's step, a power of two, so that points and their sums are exact.
    :param ends: the grid covers the losses of all z between these two.
    """
    lowest, highest = loss_of(pair, np.array(ends))
    first, last = math.floor(lowest / h), math.ceil(highest / h)
    last = max(last, first + 1)
    points = np.arange(first, last + 1) * h
    z, q, s = z_of(pair, points), pair.sample_rate, pair.noise_multiplier
    absent = _cells(z, 0.0, s)
    seen = _mixed(q, _cells(z, 1.0, s), absent)
    against = _mixed(q, _cells(z, -1.0, s), absent) if pair.replaces else absent
    if reverse:  # the loss changes its sign, so the order is reversed
        points, first = -points[::-1], -last
        seen, against = against.turned(), seen.turned()
    # A cell's mass is divided: b to its upper end, a to its lower end; a + b = mass and a + b e^-h = against e^lower.
    scale = np.exp(np.minimum(points[:-1], 700.0))
    with np.errstate(over="ignore", invalid="ignore"):
        upper = seen.mass - against.mass * scale + (seen.error + against.error * scale + 4 * ULP * seen.mass)
        upper = np.nan_to_num(upper / -math.expm1(-h), nan=np.inf, posinf=np.inf)
    mass = seen.mass + seen.error
    upper = np.clip(upper, 0.0, mass)
    grid = np.zeros(len(points))
    grid[1:] = upper
    grid[:-1] += mass - upper
    grid[0] += seen.below
    grid.flags.writeable = False
    return Losses(first, grid, seen.above)


class _Cells(NamedTuple):
    """A distribution's mass in each cell, a bound on the error of each, and the mass below and above all cells."""

    mass: np.ndarray
    error: np.ndarray
    below: float
    above: float

    def turned(self) -> _Cells:
        return _Cells(self.mass[::-1], self.error[::-1], self.above, self.below)


def _cells(z: np.ndarray, mean: float, s: float) -> _Cells:
    """Returns the cells of N(mean, s^2). Differences use the nearer tail, so that far cells keep their digits."""
    t = (z - mean) / (s * math.sqrt(2))
    tail = np.array([math.erfc(abs(x)) for x in t.tolist()]) / 2
    below_mean = t < 0
    across = below_mean[:-1] & ~below_mean[1:]
    mass = np.maximum(np.diff(np.where(below_mean, tail, -tail)) + across, 0.0)
    error = 4 * ULP * (tail[:-1] + tail[1:] + across)
    below = tail[0] if below_mean[0] else 1 - tail[0]
    above = 1 - tail[-1] if below_mean[-1] else tail[-1]
    return _Cells(mass, error, float(below) * (1 + 8 * ULP), float(above) * (1 + 8 * ULP))


def _mixed(q: float, one: _Cells, zero: _Cells) -> _Cells:
    pairs: Any = zip(one, zero, strict=True)
    return _Cells(*(q * a + (1 - q) * b for a, b in pairs))
