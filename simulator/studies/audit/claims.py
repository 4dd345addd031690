"""Computes the claim of a ledger: an epsilon at each delta, and so a whole trade-off curve.

All deltas together make small audits effective. At the task's own delta, a thousand trials cannot show that the noise
is only half; at delta 0.1, for which the same ledger also makes a claim, they can.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special

from hushfleet.privacy.charge import Charge
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.terms import Accountant
from hushfleet.simulator.studies.audit.bounds import ErrorRates, epsilon_at_least, separation_at_least

DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
_ROUNDING = 1 - 1e-9
_MOST = 8.0  # multiple of the charged noise: beyond it, a measurement shows almost nothing
_STEP, _PRECISION = 0.3, 0.005  # of the logarithm of a sampled mechanism's noise
_SLACK = 1e-9  # of an interval's ends, which are computed with rounding


@dataclass(frozen=True)
class Claim:
    """The claim of the ledger about rounds of one kind.

    A measurement plays the rounds in turn, and its errors are those of all of them.

    :param charges: of each round; they differ in their noise only.
    :param accountant: the task's accountant; measured noise is always converted by the exact one.
    """

    charges: tuple[Charge, ...]
    accountant: Accountant = "exact"

    @property
    def costliest(self) -> Charge:
        """The charge of the round with the least noise."""
        return min(self.charges, key=lambda charge: charge.noise_multiplier)

    @property
    def is_made(self) -> bool:
        """True if an epsilon is claimed at all, because nothing is sent without noise."""
        return not any(charge.mechanism == "none" or charge.raw for charge in self.charges)

    def epsilon(self, delta: float) -> float:
        """Returns epsilon of all rounds against an observer of the device's own updates, as the ledger computes it; inf
        if something is sent without noise."""
        return epsilon_server_of(self.charges, delta=delta, accountant=self.accountant)

    def epsilon_round(self, delta: float) -> float:
        """Returns the same for the costliest round alone."""
        return epsilon_server_of([self.costliest], delta=delta, accountant=self.accountant)

    @property
    def of_noised_values(self) -> Claim:
        """The same claim without the raw values that are sent beside the noised ones."""
        return replace(self, charges=tuple(replace(charge, raw=()) for charge in self.charges))

    def with_noise(self, multiplier: float) -> Claim:
        """Returns the claim, by the exact accountant, of the same mechanism with another noise multiplier in the
        costliest round, and in proportion in the others."""
        unit = self.costliest.noise_multiplier
        charges = (
            replace(each, mechanism="gaussian", noise_multiplier=multiplier * (each.noise_multiplier / unit), raw=())
            for each in self.charges
        )
        return Claim(tuple(charges))

    def refuted_at(self, rates: ErrorRates, delta: float) -> float | None:
        """Returns `delta` or one of `DELTAS` at which errors below `rates` contradict the claim, or None."""
        if not self.is_made:
            return None
        excess = {each: self._excess(rates, each) for each in (delta, *self._worth_a_look(rates))}
        most = max(excess, key=excess.__getitem__)
        if excess[most] > 0:
            return most
        # The Gaussian curve itself, between the deltas that were checked, and of rounds with different noise.
        charged = self.costliest.noise_multiplier * _ROUNDING
        return most if self.costliest.sample_rate == 1 and self.multiplier_at_most(rates) < charged else None

    def multiplier_at_most(self, rates: ErrorRates) -> float:
        """Returns the largest noise multiplier of the costliest round for a mechanism of the claimed form, whose errors
        over all rounds are below `rates`.

        Exact for the Gaussian mechanism, by its trade-off curve; a sampled one is compared with its accountant's
        epsilon at the delta that shows most. inf if the errors show nothing.
        """
        charge = self.costliest
        if charge.sample_rate == 1:
            return self._multiplier_of_gaussians(rates)
        deltas = self._worth_a_look(rates)
        if not deltas or charge.mechanism == "none":
            return math.inf
        delta = max(deltas, key=lambda each: self._excess(rates, each))

        def excess(log_times: float) -> float:
            return self.with_noise(charge.noise_multiplier * math.exp(log_times))._excess(rates, delta)

        low, high = 0.0, math.log(_MOST)
        while excess(low) > 0:  # in steps: the accountant is slow with very little noise
            low, high = low - _STEP, low
        if excess(high) <= 0:
            return math.inf
        return charge.noise_multiplier * math.exp(optimize.brentq(excess, low, high, xtol=_PRECISION) + _PRECISION)

    def _multiplier_of_gaussians(self, rates: ErrorRates) -> float:
        """Returns the same if no round is sampled; without noise, the multiplier of the same noise in each round."""
        separation = separation_at_least(rates)
        if separation <= 0:
            return math.inf
        counts = Counter((each.noise_multiplier or 1.0) / math.sqrt(each.steps) for each in self.charges)
        multipliers, shares = np.array(list(counts)), np.array(list(counts.values())) / len(self.charges)

        def excess(log_times: float) -> float:
            least = least_misses(multipliers * math.exp(log_times), shares, rates.false_positive)
            return least - rates.false_negative

        alone = 1 / (separation * multipliers)  # the multiple if all rounds were of one kind
        low, high = math.log(alone.min()), math.log(alone.max())
        log_times = low if low == high else optimize.brentq(excess, low - _SLACK, high + _SLACK)
        return (self.costliest.noise_multiplier or 1.0) * math.exp(log_times)

    def curve(self, false_positives: np.ndarray) -> np.ndarray:
        """Returns the least false negative rate that the claim about the costliest round allows at each false positive
        rate."""
        least = np.zeros_like(false_positives)
        for delta in DELTAS:
            ratio = math.exp(min(self.epsilon_round(delta), 700))
            least = np.maximum(least, 1 - delta - ratio * false_positives)
            least = np.maximum(least, (1 - delta - false_positives) / ratio)
        return least

    def _excess(self, rates: ErrorRates, delta: float) -> float:
        return epsilon_at_least(rates, delta) - self.epsilon_round(delta)

    @staticmethod
    def _worth_a_look(rates: ErrorRates) -> list[float]:
        return [delta for delta in DELTAS if epsilon_at_least(rates, delta) > 0]


def least_misses(multipliers: np.ndarray, shares: np.ndarray, false_positive: float) -> float:
    """Returns the least false negative rate over rounds of Gaussian mechanisms, at a false positive rate over them.

    The best test compares a round's likelihood ratio with one threshold for all rounds. The logarithm of this ratio has
    the mean 1 / (2 z^2) or its negative, and the standard deviation 1 / z.

    :param multipliers: z of the kinds of rounds, `[n]`.
    :param shares: of the rounds that are of each kind, `[n]`; their sum is 1.
    """
    quantile = -special.ndtri(false_positive)
    thresholds = (quantile - 1 / (2 * multipliers)) / multipliers  # with which each kind alone has that rate
    low, high = float(thresholds.min()), float(thresholds.max())

    def excess(threshold: float) -> float:
        return float(shares @ special.ndtr(-threshold * multipliers - 1 / (2 * multipliers))) - false_positive

    threshold = low if low == high else optimize.brentq(excess, low - _SLACK, high + _SLACK)
    return float(shares @ special.ndtr(threshold * multipliers - 1 / (2 * multipliers)))
