"""Conversion of noise to epsilon and back.

The functions are pure, so that a board computes the same numbers as the aggregator prints. NumPy is imported only for
steps with sampling, and for `rdp`. There are two accountants, and both give upper bounds:

- `exact` is the default. If every unit takes part in every step, it is the exact value (`gaussian`); with Poisson
  sampling it is a close upper bound (`privacy_loss`).
- `rdp` is what the papers print (`renyi`). It is at least about a tenth larger.

Example: 20 rounds at noise multiplier 3.975 and delta 0.1, the setting that FedGLP-ADP calls "epsilon = 2":

    >>> history = [Step(noise_multiplier=3.975, sample_rate=1.0, steps=20)]
    >>> round(epsilon(history, delta=0.1), 3), round(epsilon(history, delta=0.1, accountant="rdp"), 3)
    (1.429, 1.996)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal

from hushfleet.errors import PrivacyError
from hushfleet.privacy.accounting.gaussian import epsilon_of_gaussian
from hushfleet.privacy.accounting.step import Step
from hushfleet.privacy.terms import Accountant

__all__ = ["Adjacency", "Step", "check_delta", "epsilon", "noise_multiplier_for"]

Adjacency = Literal["add-or-remove", "exchange"]
_SEARCHES = 200
_HUGE = 1e4
_SMALLER_DELTAS = (1e-3, 1e-6, 1e-9, 1e-12)
_LARGE = 50.0  # above it the grid may have to be coarse


def epsilon(
    history: Iterable[Step],
    *,
    delta: float,
    accountant: Accountant = "exact",
    adjacency: Adjacency = "add-or-remove",
) -> float:
    """Returns epsilon at `delta` of all steps of `history` together; 0.0 if nothing was released.

    :param adjacency: what the adversary guesses. `add-or-remove`: did this unit take part, or nothing in its place?
        `exchange`: did this unit take part or another one? An exchange moves a step by up to twice as much.

    A step without noise makes epsilon inf. Raises `PrivacyError` for values outside their range, and for `rdp` with an
    exchange of sampled units, which that accountant cannot compute.
    """
    _check_delta_range(delta)
    merged: dict[tuple[float, float], int] = {}
    for step in history:
        step.check()
        if step.steps and step.sample_rate:
            key = (float(step.noise_multiplier), float(step.sample_rate))
            merged[key] = merged.get(key, 0) + int(step.steps)
    steps = tuple(Step(*key, count) for key, count in sorted(merged.items()))  # always in the same order
    if accountant == "rdp":
        return _by_renyi(steps, delta, adjacency)
    return _exactly(steps, float(delta), adjacency == "exchange")


def _by_renyi(steps: Sequence[Step], delta: float, adjacency: Adjacency) -> float:
    if adjacency == "exchange":
        if any(step.sample_rate < 1 for step in steps):
            raise PrivacyError('the accountant "rdp" does not know an exchange of sampled units: use "exact"')
        steps = [step._replace(noise_multiplier=step.noise_multiplier / 2) for step in steps]
    from hushfleet.privacy.accounting.renyi import renyi_epsilon

    return renyi_epsilon(steps, delta=delta)


@lru_cache(maxsize=1024)
def _exactly(steps: tuple[Step, ...], delta: float, exchange: bool) -> float:
    if any(step.noise_multiplier**2 == 0 for step in steps):
        return math.inf
    sensitivity = 2 if exchange else 1
    # Sampling only lowers epsilon: computing as if every unit took part in every step gives an upper bound, and the
    # exact value if every unit does.
    whole = epsilon_of_gaussian(sensitivity * _mean_shift(steps), delta)
    sampled = [step for step in steps if step.sample_rate < 1]
    if not sampled or whole == 0:
        return whole
    if _total_variation(steps, sensitivity) <= delta:
        return 0.0
    from hushfleet.privacy.accounting.loss_grid import Pair
    from hushfleet.privacy.accounting.privacy_loss import epsilon_bound
    from hushfleet.privacy.accounting.renyi import renyi_epsilon

    pairs = [(Pair(step.noise_multiplier, step.sample_rate, exchange), step.steps) for step in sampled]
    shift = _mean_shift([step for step in steps if step.sample_rate == 1])
    if shift:
        pairs.append((Pair(1 / shift, 1.0, exchange), 1))  # as one step
    found = min(whole, epsilon_bound(pairs, delta))
    smaller = next((each for each in _SMALLER_DELTAS if each < delta), None)
    if found > _HUGE and smaller is not None:  # no grid is fine enough; a bound at a smaller delta holds here, too
        found = min(found, _exactly(steps, smaller, exchange))
    if exchange or found < min(whole, _LARGE):
        return found  # smaller than Rényi's bound, whose moments would take more time than the rest
    return min(found, renyi_epsilon(steps, delta=delta))


def _total_variation(steps: Iterable[Step], sensitivity: float) -> float:
    """Returns an upper bound on the total variation of all steps together, which is the delta at which epsilon is 0."""
    parts = (
        step.steps * step.sample_rate * math.erf(sensitivity / (math.sqrt(8) * step.noise_multiplier)) for step in steps
    )
    return math.fsum(parts) * (1 + 1e-12)


def _mean_shift(steps: Iterable[Step]) -> float:
    return math.sqrt(math.fsum(step.steps / step.noise_multiplier**2 for step in steps))


def noise_multiplier_for(
    *, epsilon: float, delta: float, steps: int, sample_rate: float = 1.0, accountant: Accountant = "exact"
) -> float:
    """Returns the smallest noise multiplier (to 1e-9 relative) whose epsilon is at most `epsilon`.

    Raises `PrivacyError` if no multiplier reaches it: with the accountant `rdp` the conversion alone adds about
    `log(1 / delta) / 62`.
    """
    if not 0 < epsilon < math.inf:
        raise PrivacyError(f"a target epsilon must be positive and finite, got {epsilon!r}")
    if steps < 1 or not 0 < sample_rate <= 1:
        raise PrivacyError(
            f"a noise multiplier needs at least one step and a sample rate in (0, 1], "
            f"got {steps!r} steps at rate {sample_rate!r}"
        )

    def spent(multiplier: float) -> float:
        return _epsilon_of(Step(multiplier, sample_rate, steps), delta, accountant)

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
    """
    _check_delta_range(delta)
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


def _check_delta_range(delta: float) -> None:
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie strictly between 0 and 1, got {delta!r}")


def _epsilon_of(step: Step, delta: float, accountant: Accountant) -> float:
    # This needs a separate name because inside `noise_multiplier_for` the name `epsilon` is the target.
    return epsilon([step], delta=delta, accountant=accountant)
