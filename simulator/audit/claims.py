"""What a ledger claims: not one number, but an epsilon at every delta, and so a whole trade-off curve.

That is what makes small audits sharp. At the task's own delta a thousand trials cannot show that a noise was halved; at
a delta of a tenth, where the same ledger makes a claim as well, they can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hushfleet.privacy.accounting import Step, epsilon
from hushfleet.privacy.mechanism import Charge
from simulator.audit.bounds import ErrorRates, epsilon_at_least, separation_at_least

DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
_BISECTIONS = 14
_LEAST, _LARGEST = 0.05, 50.0  # noise multipliers between which one is looked for
_TELLING = 2  # deltas that are looked at on the way


@dataclass(frozen=True)
class Claim:
    """What the ledger says of `rounds` rounds that are charged alike."""

    charge: Charge
    rounds: int

    def epsilon(self, delta: float) -> float:
        """Against whoever sees the device's own updates; inf where something leaves without noise."""
        if self.charge.mechanism == "none" or getattr(self.charge, "raw", ()):
            return math.inf
        charge = self.charge
        return epsilon([Step(charge.noise_multiplier, charge.sample_rate, charge.steps * self.rounds)], delta=delta)

    @property
    def of_noised_values(self) -> Claim:
        """The same without what leaves raw beside them."""
        return replace(self, charge=replace(self.charge, raw=())) if getattr(self.charge, "raw", ()) else self

    def over(self, rounds: int) -> Claim:
        return replace(self, rounds=rounds)

    def refuted_at(self, rates: ErrorRates) -> float | None:
        """A delta at which errors below `rates` contradict the claim; None where they do not."""
        excess = {delta: self._excess(rates, delta) for delta in self._worth_a_look(rates)}
        delta = max(excess, key=excess.get, default=None)
        return delta if delta is not None and excess[delta] > 0 else None

    def multiplier_at_most(self, rates: ErrorRates) -> float:
        """The most noise that a mechanism of the claimed form can have had, with errors below `rates`.

        Exact for the Gaussian mechanism, by its trade-off curve; a sampled one is held to its accountant's epsilons.
        inf where the errors show nothing.
        """
        charge = self.charge
        if charge.sample_rate == 1:
            separation = separation_at_least(rates)
            return math.sqrt(charge.steps * self.rounds) / separation if separation > 0 else math.inf
        deltas = sorted(self._worth_a_look(rates), key=lambda delta: self._excess(rates, delta))[-_TELLING:]
        if not deltas:
            return math.inf
        low, high = _LEAST, _LARGEST
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            refuted = any(self._with(middle)._excess(rates, delta) > 0 for delta in deltas)
            low, high = (low, middle) if refuted else (middle, high)
        return high

    def measured_epsilon(self, rates: ErrorRates, *, rounds: int, delta: float) -> float:
        """`rounds` rounds of a mechanism of the claimed form that has no more noise than `rates` allow."""
        multiplier = self.multiplier_at_most(rates)
        return 0.0 if math.isinf(multiplier) else self._with(multiplier).over(rounds).of_noised_values.epsilon(delta)

    def curve(self, false_positives: np.ndarray) -> np.ndarray:
        """The least false negative rate that the claim leaves at each false positive rate."""
        least = np.zeros_like(false_positives)
        for delta in DELTAS:
            ratio = math.exp(min(self.epsilon(delta), 700))
            least = np.maximum(least, 1 - delta - ratio * false_positives)
            least = np.maximum(least, (1 - delta - false_positives) / ratio)
        return least

    def _excess(self, rates: ErrorRates, delta: float) -> float:
        return epsilon_at_least(rates, delta) - self.epsilon(delta)

    def _with(self, multiplier: float) -> Claim:
        return replace(self, charge=replace(self.charge, mechanism="gaussian", noise_multiplier=multiplier))

    @staticmethod
    def _worth_a_look(rates: ErrorRates) -> list[float]:
        return [delta for delta in DELTAS if epsilon_at_least(rates, delta) > 0]
