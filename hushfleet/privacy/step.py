"""A step: the unit that all accountants count."""

from __future__ import annotations

import math
from typing import NamedTuple

from hushfleet.errors import PrivacyError


class Step(NamedTuple):
    """The same mechanism run `steps` times.

    :param noise_multiplier: noise standard deviation over the sensitivity, as the adversary sees it.
    :param sample_rate: probability with which a unit takes part in one step (Poisson sampling).
    :param steps: number of runs.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int

    def check(self) -> None:
        """Raises `PrivacyError` for a value outside its range."""
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"a noise multiplier must be finite, zero or more, got {self.noise_multiplier!r}")
        if not 0 <= self.sample_rate <= 1:
            raise PrivacyError(f"a sample rate must lie between 0 and 1, got {self.sample_rate!r}")
        if self.steps != int(self.steps) or self.steps < 0:
            raise PrivacyError(f"a number of steps must be a whole number, zero or more, got {self.steps!r}")
