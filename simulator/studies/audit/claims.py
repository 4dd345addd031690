"""What a ledger claims: not one number, but an epsilon at every delta, and so a whole trade-off curve.

That is what makes small audits sharp. At the task's own delta a thousand trials cannot show that a noise was halved; at
a delta of a tenth, where the same ledger makes a claim as well, they can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from hushfleet.privacy.accounting.epsilon import Accountant, Step, epsilon
from hushfleet.privacy.mechanism import Charge
from hushfleet.simulator.studies.audit.bounds import ErrorRates, epsilon_at_least, separation_at_least

DELTAS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.4)
_BISECTIONS = 6
_ROUNDING = 1 - 1e-9
_STRIDE = 1.3  # between two noise multipliers that are looked at first
_MOST = 8.0  # times the noise that is charged: beyond it a measurement shows next to nothing


@dataclass(frozen=True)
class Claim:
    """What the ledger says of `rounds` rounds that are charged alike.

    :param accountant: the task's; what is measured is always put into numbers by the exact one.
    """

    charge: Charge
    rounds: int
    accountant: Accountant = "exact"

    def epsilon(self, delta: float) -> float:
        """Against whoever sees the device's own updates; inf where something leaves without noise."""
        if self.charge.mechanism == "none" or self.charge.raw:
            return math.inf
        charge = self.charge
        steps = [Step(charge.noise_multiplier, charge.sample_rate, charge.steps * self.rounds)]
        return epsilon(steps, delta=delta, accountant=self.accountant)

    @property
    def of_noised_values(self) -> Claim:
        """The same without what leaves raw beside them."""
        return replace(self, charge=replace(self.charge, raw=()))

    def over(self, rounds: int) -> Claim:
        return replace(self, rounds=rounds)

    def refuted_at(self, rates: ErrorRates, delta: float) -> float | None:
        """A delta at which errors below `rates` contradict the claim, `delta` or one of `DELTAS`; None without one."""
        charge = self.charge
        if charge.mechanism == "none" or charge.raw:
            return None
        excess = {each: self._excess(rates, each) for each in (delta, *self._worth_a_look(rates))}
        most = max(excess, key=excess.get)
        if excess[most] > 0:
            return most
        # The Gaussian curve itself, between the deltas that were looked at.
        below = charge.sample_rate == 1 and self.multiplier_at_most(rates) < charge.noise_multiplier * _ROUNDING
        return most if below else None

    def multiplier_at_most(self, rates: ErrorRates) -> float:
        """The most noise that a mechanism of the claimed form can have had, with errors below `rates`.

        Exact for the Gaussian mechanism, by its trade-off curve; a sampled one is held to its accountant's epsilon, at
        the delta that tells most. inf where the errors show nothing.
        """
        charge = self.charge
        if charge.sample_rate == 1:
            separation = separation_at_least(rates)
            return math.sqrt(charge.steps * self.rounds) / separation if separation > 0 else math.inf
        deltas = self._worth_a_look(rates)
        if not deltas or charge.mechanism == "none":
            return math.inf
        delta = max(deltas, key=lambda each: self._excess(rates, each))

        def refuted(multiplier: float) -> bool:
            return self.with_noise(multiplier)._excess(rates, delta) > 0

        kept = charge.noise_multiplier
        while refuted(kept):
            kept /= _STRIDE
        while not refuted(kept * _STRIDE):
            kept *= _STRIDE
            if kept > _MOST * charge.noise_multiplier:
                return math.inf
        refuted_from = kept * _STRIDE
        for _ in range(_BISECTIONS):
            middle = math.sqrt(kept * refuted_from)
            kept, refuted_from = (kept, middle) if refuted(middle) else (middle, refuted_from)
        return refuted_from

    def with_noise(self, multiplier: float) -> Claim:
        """The same form with another noise multiplier, and nothing raw."""
        charge = replace(self.of_noised_values.charge, mechanism="gaussian", noise_multiplier=multiplier)
        return replace(self, charge=charge, accountant="exact")

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

    @staticmethod
    def _worth_a_look(rates: ErrorRates) -> list[float]:
        return [delta for delta in DELTAS if epsilon_at_least(rates, delta) > 0]
