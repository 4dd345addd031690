"""How many devices of a sum are honest for certain: those are the ones whose noise is counted on."""

from __future__ import annotations

import math

from hushfleet.errors import BadInput

_CHANCE = 1e-9  # of more corrupt devices in a cohort


def most_corrupt(devices: int, *, honest_fraction: float, rate: float = 1.0) -> int:
    """The most corrupt devices of a cohort that is drawn with `rate` from `devices`; more have a chance of 1e-9.

    :param honest_fraction: of the devices, at least.
    """
    corrupt = math.floor((1 - honest_fraction) * devices + 1e-9)
    if rate >= 1:
        return corrupt
    chances = [
        math.exp(
            math.lgamma(corrupt + 1)
            - math.lgamma(count + 1)
            - math.lgamma(corrupt - count + 1)
            + count * math.log(rate)
            + (corrupt - count) * math.log1p(-rate)
        )
        for count in range(corrupt + 1)
    ]
    more = 0.0
    for count in range(corrupt, 0, -1):
        more += chances[count]
        if more > _CHANCE:
            return count
    return 0


def honest_in_sum(min_devices: int, devices: int, *, honest_fraction: float, rate: float = 1.0) -> int:
    """Of the fewest devices in a sum, those that are honest even if the aggregator leaves out none of the others.

    Raises `BadInput` where there are none.
    """
    corrupt = most_corrupt(devices, honest_fraction=honest_fraction, rate=rate)
    if corrupt >= min_devices:
        raise BadInput(
            f"with honest_fraction = {honest_fraction:g} and {devices} devices, {corrupt} in a cohort may be corrupt, "
            f"and a sum of {min_devices} may have no honest one: ask for a sum of more devices"
        )
    return min_devices - corrupt
