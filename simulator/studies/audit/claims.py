"""Computes the claim of a ledger: an epsilon at each delta, and so a whole trade-off curve.

All deltas together make small audits effective. At the task's own delta, a thousand trials cannot show that the noise
is only half; at delta 0.1, for which the same ledger also makes a claim, they can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize

from hushfleet.privacy.accounting.epsilon import Step, epsilon
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.terms import Accountant
from hushfleet.simulator.studies.audit.bounds import ErrorRates, epsilon_at_least, separation_at_least

DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
_ROUNDING = 1 - 1e-9
_MOST = 8.0  # multiple of the charged noise: beyond it, a measurement shows almost nothing
_STEP, _PRECISION = 0.3, 0.005  # of the logarithm of a sampled mechanism's noise


@dataclass(frozen=True)
class Claim:
    """The claim of the ledger about `rounds` rounds with the same charge.

    :param accountant: the task's accountant; measured noise is always converted by the exact one.
    """

    charge: Charge
    rounds: int = 1
    accountant: Accountant = "exact"

    @property
    def is_made(self) -> bool:
        """True if an epsilon is claimed at all, because nothing is sent without noise."""
        return self.charge.mechanism != "none" and not self.charge.raw

    def epsilon(self, delta: float) -> float:
        """Returns epsilon against an observer of the device's own updates; inf if something is sent without noise."""
        if not self.is_made:
            return math.inf
        charge = self.charge
        steps = [Step(charge.noise_multiplier, charge.sample_rate, charge.steps * self.rounds)]
        return epsilon(steps, delta=delta, accountant=self.accountant)

    @property
    def of_noised_values(self) -> Claim:
        """The same claim without the raw values that are sent beside the noised ones."""
        return replace(self, charge=replace(self.charge, raw=()))

    def over(self, rounds: int) -> Claim:
        return replace(self, rounds=rounds)

    def with_noise(self, multiplier: float) -> Claim:
        """Returns the claim of the same mechanism with another noise multiplier, by the exact accountant."""
        charge = replace(self.charge, mechanism="gaussian", noise_multiplier=multiplier, raw=())
        return replace(self, charge=charge, accountant="exact")

    def refuted_at(self, rates: ErrorRates, delta: float) -> float | None:
        """Returns `delta` or one of `DELTAS` at which errors below `rates` contradict the claim, or None."""
        if not self.is_made:
            return None
        excess = {each: self._excess(rates, each) for each in (delta, *self._worth_a_look(rates))}
        most = max(excess, key=excess.__getitem__)
        if excess[most] > 0:
            return most
        # The Gaussian curve itself, between the deltas that were checked.
        charged = self.charge.noise_multiplier * _ROUNDING
        return most if self.charge.sample_rate == 1 and self.multiplier_at_most(rates) < charged else None

    def multiplier_at_most(self, rates: ErrorRates) -> float:
        """Returns the largest noise multiplier of a mechanism of the claimed form with errors below `rates`.

        Exact for the Gaussian mechanism, by its trade-off curve; a sampled one is compared with its accountant's
        epsilon at the delta that shows most. inf if the errors show nothing.
        """
        charge = self.charge
        if charge.sample_rate == 1:
            separation = separation_at_least(rates)
            return math.sqrt(charge.steps * self.rounds) / separation if separation > 0 else math.inf
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

    def curve(self, false_positives: np.ndarray) -> np.ndarray:
        """Returns the least false negative rate that the claim allows at each false positive rate."""
        least = np.zeros_like(false_positives)
        for delta in DELTAS:
            ratio = math.exp(min(self.epsilon(delta), 700))
            least = np.maximum(least, 1 - delta - ratio * false_positives)
            least = np.maximum(least, (1 - delta - false_positives) / ratio)
        return least

    def _excess(self, rates: ErrorRates, delta: float) -> float:
        return epsilon_at_least(rates, delta) - self.epsilon(delta)

    @staticmethod
    def _worth_a_look(rates: ErrorRates) -> list[float]:
        return [delta for delta in DELTAS if epsilon_at_least(rates, delta) > 0]
