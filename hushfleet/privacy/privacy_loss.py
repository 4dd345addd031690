"""An upper bound on epsilon of Poisson-subsampled Gaussian steps: the distribution of the privacy loss on a grid,
composed by FFT (Koskela et al. 2020, Gopi et al. 2021). `docs/privacy.md` gives its measured distance from the truth.

Losses of steps add up, so their distributions convolve. No error here may make epsilon too small:

- **The grid** dominates the true distribution (`loss_grid`). Its step is chosen so that epsilon grows by about 0.1 %.
- **The window** of the FFT: the mass of the composition above the window is bounded by Chernoff's bound, on the grid's
  distribution, and added to delta; the mass below the window wraps around to the top and is counted there.
- **Rounding.** The distribution is tilted by e^(rate loss) before the transform, as in Chernoff's bound, so that errors
  are small compared with a delta of 1e-10, too. A bound on the errors of transforms, powers and sums is added to delta.

Adding and removing a unit are the two orders of the pair; the larger epsilon counts. The loss from the absence of a
sampled unit is bounded for any noise; this bound is used if the grid can give no bound for that order (`_limit`).

The parameters (the rate, the window, the grid's step) are found by quadrature, which may be inexact: then the bound is
looser, or infinite, but never too small.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hushfleet.privacy.gaussian import epsilon_of_gaussian
from hushfleet.privacy.loss_grid import ULP, Pair, loss_of, losses_on_grid, z_of

_EXCESS = 1e-3  # relative excess of epsilon that the grid adds
_ROUGH_EXCESS = 0.03  # the same in the first pass, whose epsilon sets the grid of the second
_SMALLEST = 0.01  # a smaller epsilon is found with the absolute precision of this one
_TAIL_SHARE = 1e-4  # share of delta beyond the grid
_ROUNDING = 2e-3  # share of epsilon: if rounding adds more, more work is done
_BEYOND = 12.0  # -log of the tilted mass beyond the window, which wraps around and is counted
_HEAVY = 16  # points that are transformed one by one
_LEAST_TILT = 0.7  # times the rate at which Rényi's bound is smallest
_NOTHING = 30.0  # -log of a tilted mass that is negligible
_MAX_POINTS = 1 << 18
_NODES = 160
_LEAST_DELTA = 1e-300  # below it the tails are no normal floats


def epsilon_bound(history: Sequence[tuple[Pair, int]], delta: float) -> float:
    """Returns an epsilon that is never below the true one; inf if the grid cannot represent it.

    :param history: pairs with a noise multiplier and a sample rate above 0, and the number of steps of each.
    """
    if delta < _LEAST_DELTA:
        return math.inf
    symmetric = all(pair.replaces or pair.sample_rate == 1 for pair, _ in history)
    orders = [_Composition(tuple(history), delta, reverse) for reverse in ((False,) if symmetric else (False, True))]
    highest = 0.0
    for rough, order in sorted(((order.rough, order) for order in orders), key=lambda each: each[0], reverse=True):
        if rough > highest:  # else this order cannot give the larger epsilon
            highest = max(highest, order.fine())
    return highest


@dataclass(frozen=True)
class _Composition:
    """The steps of one direction, to be composed.

    :param reverse: the loss from a unit's absence instead of its presence.
    """

    history: tuple[tuple[Pair, int], ...]
    delta: float
    reverse: bool

    @cached_property
    def rough(self) -> float:
        rate, expected = self._tilt
        if not math.isfinite(expected):
            return self._limit
        return min(self._on_grid(self._grid_step(expected, _ROUGH_EXCESS), rate)[0], self._limit)

    def fine(self) -> float:
        """Returns a bound of at most `rough` that is close to the true epsilon."""
        rate, expected = self._tilt
        if not math.isfinite(expected):
            return self._limit
        best, h = self.rough, self._grid_step(min(self.rough, expected), _EXCESS)
        # With a heavy tail the tilted distribution is wide: less tilt gives a smaller window and larger errors.
        for share, heavy in ((1, 0), (1, _HEAVY), (_LEAST_TILT**0.5, _HEAVY), (_LEAST_TILT, _HEAVY)):
            found, precise = self._on_grid(h, share * rate, heavy)
            best = min(best, found)
            if precise:
                break
        return best

    @cached_property
    def _limit(self) -> float:
        """The upper limit for epsilon of this direction. The absence of a sampled unit has a loss of at most
        -log(1 - q) per step for any noise; the other steps add the epsilon of Gaussian steps."""
        if not self.reverse:
            return math.inf
        bounded = [-count * math.log1p(-pair.sample_rate) for pair, count in self.history if pair.sample_rate < 1]
        rest = [count / pair.noise_multiplier**2 for pair, count in self.history if pair.sample_rate == 1]
        return (math.fsum(bounded) + epsilon_of_gaussian(math.sqrt(math.fsum(rest)), self.delta)) * (1 + 1e-12)

    @cached_property
    def _ends(self) -> list[tuple[float, float]]:
        """Ends z of each pair's grid, with `_TAIL_SHARE` of delta beyond them."""
        steps = sum(count for _, count in self.history)
        drawn = sum(pair.sample_rate * count for pair, count in self.history)
        # in quarters, so that a growing ledger reuses cached cells
        far, near = (
            math.ceil(4 * math.sqrt(2 * math.log(max(n, 2) / (_TAIL_SHARE * self.delta)))) / 4 for n in (steps, drawn)
        )
        ends = []
        for pair, _ in self.history:
            s = pair.noise_multiplier
            top = max(far * s, 1 + near * s)
            ends.append((-top if pair.replaces else -far * s, top))
        return ends

    @cached_property
    def _grid_ends(self) -> list[tuple[float, float]]:
        """`_ends` without the negative losses that are negligible at any tilt: they round to the grid's least loss."""
        steps = sum(count for _, count in self.history)
        least = -(2.0 ** math.ceil(math.log2((_NOTHING + math.log(steps)) / (_LEAST_TILT * self._tilt[0]))))
        trimmed = []
        for (pair, _), (low, high) in zip(self.history, self._ends, strict=True):
            end = float(z_of(pair, np.array([-least if self.reverse else least]))[0])
            trimmed.append((low, min(high, end)) if self.reverse else (max(low, end), high))
        return trimmed

    # -- the parameters: rate, grid, window ---------------------------------------------------------------------------

    @cached_property
    def _nodes(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Steps, log weights and losses of each pair at the nodes of a quadrature."""
        nodes = []
        for (pair, count), (low, high) in zip(self.history, self._ends, strict=True):
            s, q = pair.noise_multiplier, pair.sample_rate
            z = low + (high - low) * (np.arange(_NODES) + 0.5) / _NODES
            with np.errstate(divide="ignore"):
                weight = np.logaddexp(np.log1p(-q) - z**2 / (2 * s**2), np.log(q) - (z - 1) ** 2 / (2 * s**2))
            loss = loss_of(pair, z)
            if self.reverse:
                weight, loss = weight - loss, -loss
            nodes.append((count, weight - np.logaddexp.reduce(weight), loss))
        return nodes

    def _log_moments(self, rates: np.ndarray) -> np.ndarray:
        """Returns log of the mean of e^(rate loss) of all steps together: `[n]` -> `[n]`."""
        total = np.zeros(len(rates))
        for count, weight, loss in self._nodes:
            total += count * np.logaddexp.reduce(weight + np.outer(rates, loss), axis=1)
        return total

    @cached_property
    def _tilt(self) -> tuple[float, float]:
        """The rate at which Rényi's bound is smallest, and that bound."""

        def bound(rates: np.ndarray) -> np.ndarray:  # Balle et al. 2020, Theorem 21, at order rate + 1
            log_delta = math.log(self.delta)
            per_rate = (self._log_moments(rates) - log_delta - np.log1p(rates)) / rates
            return np.asarray(per_rate - np.log1p(1 / rates))

        rates = np.geomspace(1e-4, 1e9, 53)
        best = int(np.argmin(bound(rates)))
        if best == 0:  # epsilon is huge
            rates = np.geomspace(1e-12, 1e-4, 33)
            best = int(np.argmin(bound(rates)))
        rates = np.geomspace(rates[max(best - 1, 0)], rates[min(best + 1, len(rates) - 1)], 25)
        values = bound(rates)
        best = int(np.argmin(values))
        return float(rates[best]), float(values[best])

    def _grid_step(self, epsilon: float, excess: float) -> float:
        """Returns h: a chord of e^(rate x) adds at most rate (rate + 1) h^2 / 8 to a step's log moment, on average 2/3
        of it."""
        steps = sum(count for _, count in self.history)
        if epsilon < _SMALLEST:
            low, top, _ = self._window(self._tilt[0])
            # A grid that is coarse compared with the window gives no useful bound.
            epsilon = max(epsilon, min(_SMALLEST, abs(top - low)))
        wanted = math.sqrt(12 * excess * epsilon / (steps * (self._tilt[0] + 1)))
        pairs = [pair for pair, _ in self.history]
        widest = max(float(np.ptp(loss_of(*each))) for each in zip(pairs, map(np.array, self._grid_ends), strict=True))
        return 2.0 ** math.floor(math.log2(max(wanted, 2 * widest / _MAX_POINTS)))

    def _window(self, rate: float) -> tuple[float, float, float]:
        """Returns two losses between which nearly all of the tilted composition lies, and the rate shift that gave the
        upper one."""
        below, here, above = self._log_moments(rate * np.array([1 - 1e-3, 1, 1 + 1e-3]))
        deviation = math.sqrt(max(below - 2 * here + above, 1e-18)) / (1e-3 * rate)
        shifts = np.geomspace(0.03, 300, 31) / deviation
        raised = self._log_moments(rate + shifts)
        down = -(self._log_moments(rate - shifts) - here + _BEYOND) / shifts
        beyond = (raised - math.log(_TAIL_SHARE * self.delta)) / (rate + shifts)  # of the distribution itself
        best = int(np.argmin(beyond))
        up = np.min((raised - here + _BEYOND) / shifts)
        return float(down.max()), max(float(up), float(beyond[best])), float(shifts[best])

    # -- the bound ----------------------------------------------------------------------------------------------------

    def _on_grid(self, h: float, rate: float, heavy: int = 0) -> tuple[float, bool]:
        """Returns epsilon, and True if neither the window nor rounding made it much larger."""
        low, top, shift = self._window(rate)
        if not math.isfinite(top - low):
            return math.inf, False
        wanted = 1 << max(4, math.ceil(math.log2(max(top - low, 0.0) / h + 2)))
        points = min(wanted, _MAX_POINTS)
        h *= wanted // points  # coarser is looser, and still a bound
        start = math.floor(low / h)

        log_moment = log_beyond = infinite = loss_error = transform_error = growth = 0.0
        log_product = np.zeros(points // 2 + 1, dtype=np.complex128)
        power_error = np.zeros(points // 2 + 1)
        for (pair, count), ends in zip(self.history, self._grid_ends, strict=True):
            losses = losses_on_grid(pair, h, ends, self.reverse)
            index = np.arange(losses.first, losses.first + len(losses.mass))
            with np.errstate(divide="ignore"):
                log_mass = np.log(losses.mass)
            exponent = log_mass + rate * h * index
            moment = float(np.logaddexp.reduce(exponent))
            log_moment += count * moment
            log_beyond += count * float(np.logaddexp.reduce(exponent + shift * h * index))
            infinite += count * losses.infinite
            # An error in the cells' borders in z is an error in their losses.
            farthest = max(abs(ends[0]), abs(ends[1])) / pair.noise_multiplier**2
            loss_error += count * 16 * ULP * (2 + farthest + h * max(abs(index[0]), abs(index[-1])))
            folded = np.bincount(index % points, weights=np.exp(exponent - moment), minlength=points)
            transform, off = _transform(folded, heavy)
            logs = np.log(np.where(transform == 0, 1e-290, transform))
            log_product += count * logs
            power_error += count * 4 * ULP * (4 + np.abs(logs))
            transform_error += count * off
            growth += count * off * math.sqrt(points)
        product = np.exp(log_product)
        composed = np.roll(np.fft.irfft(product, points), -(start % points))
        # In the 2-norm. |F^T - G^T| <= T |F - G| max(|F|, |G|)^(T - 1), and |F| <= 1.
        error = transform_error * math.exp(min(growth, 700.0))
        error += math.sqrt(2 / points) * float(np.linalg.norm(np.abs(product) * np.expm1(np.minimum(power_error, 700))))
        error += _fft_error(points) * float(np.linalg.norm(composed))

        x = h * np.arange(start, start + points)
        infinite += math.exp(min(log_beyond - (rate + shift) * float(x[-1]), 0.0))
        steps = sum(count for _, count in self.history)
        untilt = np.exp(np.minimum(log_moment - rate * x, 300.0)) * (1 + 1e-9 + 256 * ULP * steps)
        epsilon, rounding = _solve(x, composed * untilt, error * untilt, self.delta - infinite)
        precise = wanted <= 2 * points and rounding <= _ROUNDING * epsilon
        return float(epsilon * (1 + 1e-9) + loss_error), precise


def _fft_error(points: int) -> float:
    """Returns the relative error in the 2-norm: each of log2(points) stages adds at most 1 + sqrt(5) roundings and the
    error of a root; see Percival 2003, "Rapid multiplication modulo the sum and difference of highly composite
    numbers"."""
    return 5 * ULP * math.log2(points)


def _transform(values: np.ndarray, heavy: int) -> tuple[np.ndarray, float]:
    """Returns the Fourier transform of values that add up to 1, and a bound on its error's 2-norm over sqrt(points).

    The error of an FFT is proportional to its input's norm. With many steps, a few points hold nearly all mass of one
    step, so the `heavy` largest values are transformed by the definition.
    """
    points = len(values)
    if not heavy:
        return np.fft.rfft(values), _fft_error(points) * float(np.linalg.norm(values))
    largest = np.argsort(values)[-heavy:]
    rest = values.copy()
    rest[largest] = 0.0
    transform = np.fft.rfft(rest)
    roots = np.exp(np.arange(points) * (-2j * math.pi / points))
    frequencies = np.arange(points // 2 + 1)
    partial, roundings = float(rest.sum()), 0.0
    for index in largest.tolist():  # in rising order, so that partial sums are small
        transform += values[index] * roots[frequencies * index % points]
        partial += float(values[index])
        roundings += partial + 4 * float(values[index])
    return transform, _fft_error(points) * float(np.linalg.norm(rest)) + roundings * ULP


def _solve(x: np.ndarray, mass: np.ndarray, error: np.ndarray, delta: float) -> tuple[float, float]:
    """Returns the smallest epsilon >= 0 whose sum over x > epsilon of mass (1 - e^(epsilon - x)), plus the error, is at
    most delta, and about how much of epsilon is due to the error.

    :param error: this, times any sequence whose squares add up to 1, may be missing from the mass at the same index.
    """
    if delta <= 0:
        return math.inf, math.inf
    missing = np.sqrt(np.cumsum(error[::-1] ** 2)[::-1])
    above = np.cumsum(mass[::-1])[::-1] + missing
    # Epsilon is at most the x above which all mass is below delta; 60 below that, e^(epsilon - x) is negligible.
    highest = float(x[np.argmax(above <= delta)]) if above[-1] <= delta else float(x[-1])
    kept = x > max(highest - 60, x[0] - x[1])
    x, mass, above, missing = x[kept], mass[kept], above[kept], missing[kept]
    if not len(x):
        return math.inf, math.inf
    taken = np.cumsum((mass * np.exp(np.maximum(highest - x, -700)))[::-1])[::-1]
    enough = np.flatnonzero((above - taken * np.exp(np.minimum(x - highest, 0.0)) <= delta) & (x >= 0))
    if not len(enough):
        return math.inf, math.inf
    at = int(enough[0])
    if at == 0:
        return max(float(x[0]), 0.0), 0.0
    # Between two points the curve is above - taken e^(epsilon - highest), with both values of the upper point.
    ratio = float(above[at] - delta) / float(taken[at]) if taken[at] > 0 else 0.0
    epsilon = min(max(math.log(ratio) + highest if ratio > 0 else 0.0, float(x[at - 1]), 0.0), float(x[at]))
    slope = float(taken[at]) * math.exp(epsilon - highest)
    return epsilon, float(missing[at]) / slope if slope > 0 else math.inf
