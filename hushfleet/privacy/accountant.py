"""Conversion of noise to epsilon; `noise_for` converts back.

The functions are pure, so that a board computes the same numbers as the aggregator prints. Steps with
sampling need NumPy: a process without it computes them in another one (`apart`). There are two accountants, and both
give upper bounds:

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
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal

from hushfleet.apart import apart
from hushfleet.errors import PrivacyError
from hushfleet.privacy.gaussian import epsilon_of_gaussian
from hushfleet.privacy.step import Step
from hushfleet.privacy.terms import Accountant

__all__ = ["Adjacency", "Step", "check_delta_range", "epsilon"]

Adjacency = Literal["add-or-remove", "replace-one"]
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
        `replace-one`: did this unit take part or another one? Then a step moves by up to twice as much.

    A step without noise makes epsilon inf. Raises `PrivacyError` for values outside their range, and for `rdp` with
    `replace-one` of sampled units, which that accountant cannot compute.

    >>> round(epsilon([Step(4.992, 1.0, 20)], delta=0.01), 3)
    2.0
    """
    check_delta_range(delta)
    merged: dict[tuple[float, float], int] = {}
    for step in history:
        step.check()
        if step.steps and step.sample_rate:
            key = (float(step.noise_multiplier), float(step.sample_rate))
            merged[key] = merged.get(key, 0) + int(step.steps)
    steps = tuple(Step(*key, count) for key, count in sorted(merged.items()))  # always in the same order
    if accountant == "rdp":
        return _by_renyi(steps, delta, adjacency)
    return _exactly(steps, float(delta), adjacency == "replace-one")


def _by_renyi(steps: Sequence[Step], delta: float, adjacency: Adjacency) -> float:
    if adjacency == "replace-one":
        if any(step.sample_rate < 1 for step in steps):
            raise PrivacyError('the accountant "rdp" knows no replace-one adjacency of sampled units: use "exact"')
        steps = [step._replace(noise_multiplier=step.noise_multiplier / 2) for step in steps]
    from hushfleet.privacy.renyi import renyi_epsilon

    return renyi_epsilon(steps, delta=delta)


@lru_cache(maxsize=1024)
def _exactly(steps: tuple[Step, ...], delta: float, replaces: bool) -> float:
    if any(step.noise_multiplier**2 == 0 for step in steps):
        return math.inf
    sensitivity = 2 if replaces else 1
    # Sampling only lowers epsilon: computing as if every unit took part in every step gives an upper bound, and the
    # exact value if every unit does.
    whole = epsilon_of_gaussian(sensitivity * _mean_shift(steps), delta)
    sampled = [step for step in steps if step.sample_rate < 1]
    if not sampled or whole == 0:
        return whole
    if _total_variation(steps, sensitivity) <= delta:
        return 0.0
    return float(apart(f"{__name__}:with_sampling", steps, delta, replaces, whole))


def with_sampling(rows: Sequence[Sequence[Any]], delta: float, replaces: bool, whole: float) -> float:
    """Returns epsilon of steps of which some are sampled; it needs NumPy, and convolutions of a large grid.

    :param rows: the steps, as plain values.
    :param whole: epsilon if every unit took part in every step.
    """
    from hushfleet.privacy.loss_grid import Pair
    from hushfleet.privacy.privacy_loss import epsilon_bound
    from hushfleet.privacy.renyi import renyi_epsilon

    steps = tuple(Step(*row) for row in rows)
    sampled = [step for step in steps if step.sample_rate < 1]
    pairs = [(Pair(step.noise_multiplier, step.sample_rate, replaces), step.steps) for step in sampled]
    shift = _mean_shift([step for step in steps if step.sample_rate == 1])
    if shift:
        pairs.append((Pair(1 / shift, 1.0, replaces), 1))  # as one step
    found = min(whole, epsilon_bound(pairs, delta))
    smaller = next((each for each in _SMALLER_DELTAS if each < delta), None)
    if found > _HUGE and smaller is not None:  # no grid is fine enough; a bound at a smaller delta holds here, too
        found = min(found, _exactly(steps, smaller, replaces))
    if replaces or found < min(whole, _LARGE):
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


def check_delta_range(delta: float) -> None:
    """Raises `PrivacyError` unless delta is between 0 and 1."""
    if not 0 < delta < 1:
        raise PrivacyError(f"delta must lie strictly between 0 and 1, got {delta!r}")
