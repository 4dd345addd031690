"""Gets a second opinion on an epsilon from Opacus' two accountants, for the same steps as ours.

Opacus supports Gaussian steps with Poisson sampling and the add-or-remove adjacency; a ledger charges nothing else.
Steps of secure aggregation are compared as Gaussians; `hushfleet.privacy.ring` says why this is valid for the sum.
The import of Opacus takes seconds, so only `second_opinion` imports it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from hushfleet.privacy.step import Step
from hushfleet.privacy.terms import Accountant

TOLERANCE = 0.01
"""The relative difference above which the accountants are reported to differ."""
_PRV_PRECISION = 0.005  # relative to epsilon; Opacus' own default is 0.01 absolute
_LARGEST_PRV = 500.0  # an epsilon above it overflows in Opacus' grid


class Opinion(NamedTuple):
    """Ours and Opacus' epsilon for the same steps.

    :param charged: our epsilon, which a ledger charges, by `accountant`.
    :param rdp: an upper bound by Opacus' `RDPAccountant`.
    :param prv: lower and upper bound by its `PRVAccountant`; None if it returns none, and `why` says why.
    """

    charged: float
    accountant: Accountant
    delta: float
    rdp: float
    prv: tuple[float, float] | None
    why: str = ""

    @property
    def differs(self) -> bool:
        """Whether our epsilon is above or below the values that Opacus' numbers allow by more than `TOLERANCE`."""
        low, high = 1 - TOLERANCE, 1 + TOLERANCE
        if self.accountant == "rdp":
            return not low * self.rdp <= self.charged <= high * self.rdp
        too_large = self.charged > high * (self.rdp if self.prv is None else self.prv[1])
        return too_large or (self.prv is not None and self.charged < low * self.prv[0])

    @property
    def text(self) -> str:
        prv = self.why if self.prv is None else f"between {self.prv[0]:.4g} and {self.prv[1]:.4g}"
        told = f"{self.charged:.4g} is charged ({self.accountant}); Opacus' RDP: {self.rdp:.4g}; Opacus' PRV: {prv}"
        return f"{told}. They differ by more than {TOLERANCE:.0%}: tell the authors" if self.differs else told


def second_opinion(steps: Sequence[Step], *, delta: float, charged: float, accountant: Accountant = "exact") -> Opinion:
    """Asks Opacus' accountants for the epsilon of `steps`, add or remove.

    :param charged: our epsilon for them, finite.
    :raises ImportError: Opacus is not installed.
    """
    from opacus.accountants import PRVAccountant, RDPAccountant

    history = [(float(step.noise_multiplier), float(step.sample_rate), int(step.steps)) for step in steps]
    with warnings.catch_warnings():  # warnings of more possible orders, and of log(0) at a sample rate of 1
        warnings.simplefilter("ignore")
        renyi = RDPAccountant()
        renyi.history = list(history)
        rdp = float(renyi.get_epsilon(delta))
        if charged > _LARGEST_PRV:
            return Opinion(charged, accountant, delta, rdp, None, f"none above {_LARGEST_PRV:g}, where it overflows")
        prv = PRVAccountant()
        prv.history = list(history)
        error, share = max(1e-3, _PRV_PRECISION * charged), delta / 1000
        try:
            # It returns the upper bound for delta - share. The lower bound is that for delta + share minus both errors.
            upper = float(prv.get_epsilon(delta, eps_error=error, delta_error=share))
            at_more = float(prv.get_epsilon(delta + 2 * share, eps_error=error, delta_error=share))
        except (ValueError, RuntimeError, ArithmeticError, MemoryError) as failed:
            return Opinion(charged, accountant, delta, rdp, None, f"none ({str(failed).splitlines()[0]})")
    lower = max(0.0, at_more - 2 * error)
    if not (math.isfinite(lower) and math.isfinite(upper)):
        return Opinion(charged, accountant, delta, rdp, None, "none (its grid holds nothing)")
    return Opinion(charged, accountant, delta, rdp, (lower, upper))
