"""Conversion of epsilon to noise, and what delta should be: for the planning of a task. A board needs neither."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from hushfleet.errors import PrivacyError
from hushfleet.privacy.accountant import Step, check_delta_range
from hushfleet.privacy.accountant import epsilon as epsilon_of
from hushfleet.privacy.terms import Accountant

_SEARCHES = 200


@cache  # the table of measured gains asks nine hundred times for few epsilons
def noise_multiplier_for(
    *, epsilon: float, delta: float, steps: int, sample_rate: float = 1.0, accountant: Accountant = "exact"
) -> float:
    """Returns the smallest noise multiplier (to 1e-9 relative) whose epsilon is at most `epsilon`.

    Raises `PrivacyError` if no multiplier reaches it: with the accountant `rdp` the conversion alone adds about
    `log(1 / delta) / 62`.

    >>> round(noise_multiplier_for(epsilon=2.0, delta=0.01, steps=20), 3)
    4.992
    """
    if not 0 < epsilon < math.inf:
        raise PrivacyError(f"a target epsilon must be positive and finite, got {epsilon!r}")
    if steps < 1 or not 0 < sample_rate <= 1:
        raise PrivacyError(
            f"a noise multiplier needs at least one step and a sample rate in (0, 1], "
            f"got {steps!r} steps at rate {sample_rate!r}"
        )

    def spent(multiplier: float) -> float:
        return epsilon_of([Step(multiplier, sample_rate, steps)], delta=delta, accountant=accountant)

    enough = 1.0
    while spent(enough) > epsilon:
        enough *= 2
        if enough > 1e9:
            raise PrivacyError(
                f"no noise multiplier reaches epsilon {epsilon:g} at delta {delta:g}: the floor of this "
                f"accounting is {spent(enough):.4g}; ask for more epsilon or a larger delta"
            )
    too_small = enough / 2
    while spent(too_small) <= epsilon:
        enough, too_small = too_small, too_small / 2
    return _crossing(spent, epsilon, too_small, enough)


def _crossing(spent: Callable[[float], float], target: float, too_small: float, enough: float) -> float:
    """Returns the upper end of an interval of relative width 1e-9 in which `spent` falls to `target`: by regula falsi
    on the logarithms in the Illinois form (it halves an end value that stays), because evaluations are expensive."""

    def excess(value: float) -> float:
        return math.log(max(value, 1e-300) / target) if value < math.inf else 700.0

    low, high = math.log(too_small), math.log(enough)
    above, below = excess(spent(too_small)), excess(spent(enough))
    moved = 0
    for count in range(_SEARCHES):
        if high - low <= 1e-9:
            break
        share = above / (above - below) if above > below and count % 8 < 6 else 0.5
        # Never nearer to an end than a third of the wanted precision, so that both ends approach the answer.
        middle = low + min(max(share * (high - low), 3e-10), high - low - 3e-10)
        found = spent(math.exp(middle))
        if found <= target:
            high, below = middle, excess(found)
            above, moved = (above / 2 if moved == 1 else above), 1
        else:
            low, above = middle, excess(found)
            below, moved = (below / 2 if moved == -1 else below), -1
    return math.exp(high)


def check_delta(delta: float, units: int, *, as_published: bool = False) -> list[str]:
    """Returns warnings about a delta for `units` protected devices or records; empty if it is small enough.

    A delta of 1 / units allows a mechanism that publishes one unit completely. A larger delta therefore raises
    `PrivacyError`, unless `as_published` asks for a paper's own setting. A delta above a tenth of 1 / units gives a
    warning.

    >>> check_delta(1e-5, 100)
    []
    """
    check_delta_range(delta)
    if units < 1:
        raise PrivacyError(f"delta is judged against at least one unit, got {units!r}")
    limit = 1 / units
    if delta > limit and not as_published:
        raise PrivacyError(
            f"delta {delta:g} is above 1/{units} = {limit:g}: it would allow one of the {units} units to be "
            f"published outright; use at most {limit / 10:g}"
        )
    if delta > limit / 10:
        return [
            f"delta {delta:g} is above a tenth of 1/{units} = {limit:g}: a failure of the promise is not "
            f"rare among {units} units; {limit / 10:g} or less is usual"
        ]
    return []
