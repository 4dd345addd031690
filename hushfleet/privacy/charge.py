"""Defines a charge, the privacy cost of one release, which the ledger records before the release leaves a device; and
the totals of a device's charges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hushfleet.durations import Period
from hushfleet.errors import PrivacyError

DEVICE_ADJACENCY = "add or remove one device's whole contribution to the round"
RECORD_ADJACENCY = "add or remove one record of the device's data"
MOST_WEIGHT = 1e12


@dataclass(frozen=True)
class Charge:
    """Privacy cost of one release for a device, against anyone who sees it (the server, the broker, a wire tap).

    :param unit: what is protected, `"device"` or `"record"`.
    :param adjacency: which two inputs must be indistinguishable.
    :param mechanism: `"gaussian"`, or `"none"` if nothing is protected.
    :param noise_multiplier: noise over sensitivity in the server's view: in this device's own bytes, or in the sum
        if the server sees only the sum.
    :param noise_split: number of devices among which the noise of the sum was divided (1: not divided).
    :param sample_rate: rate of secret Poisson sampling inside the device; 1 for device-level noise.
    :param steps: number of such releases in this charge.
    :param raw: functions of private data that leave without noise beside them, in words. No epsilon covers them.
    """

    unit: str
    adjacency: str
    mechanism: str
    noise_multiplier: float
    noise_split: int = 1
    sample_rate: float = 1.0
    steps: int = 1
    raw: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.unit not in ("device", "record"):
            raise PrivacyError(f'the unit of privacy is "device" or "record", got {self.unit!r}')
        if self.mechanism not in ("gaussian", "none"):
            raise PrivacyError(f'the mechanism is "gaussian" or "none", got {self.mechanism!r}')
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivacyError(f"a noise multiplier must be finite, zero or more, got {self.noise_multiplier!r}")
        if (self.noise_multiplier == 0) != (self.mechanism == "none"):
            raise PrivacyError(
                f"mechanism {self.mechanism!r} contradicts a noise multiplier of {self.noise_multiplier!r}"
            )
        if self.noise_split < 1 or self.steps < 1 or not 0 < self.sample_rate <= 1:
            raise PrivacyError(
                f"a charge needs noise_split and steps of at least 1 and a sample rate in (0, 1], got "
                f"{self.noise_split!r}, {self.steps!r} and {self.sample_rate!r}"
            )
        if any(not words or "\n" in words for words in self.raw):
            raise PrivacyError(f"raw values are named in one line each, got {self.raw!r}")

    @property
    def weight(self) -> float:
        """Adds up over charges, so that two ledgers can be compared: steps x (sample rate / noise multiplier)^2, at
        most 10^12; 1 for each step without noise."""
        ratio = self.sample_rate / self.noise_multiplier if self.noise_multiplier else 1.0
        return min(MOST_WEIGHT, self.steps * ratio * ratio)


@dataclass(frozen=True)
class Totals:
    """A device's charges by their kind, without the single entries: most devices have one or two kinds.

    :param kinds: each charge that was made, and how often, in the order of first appearance.
    :param rounds: number of (task, round) pairs in which something was released.
    :param window: the samples' window of the last entry that has one.
    """

    kinds: tuple[tuple[Charge, int], ...] = ()
    rounds: int = 0
    window: Period | None = None

    @property
    def charges(self) -> list[Charge]:
        """One charge for each kind, which costs as much as all of this kind together."""
        return merged(self.kinds)

    @property
    def weight(self) -> float:
        """The sum of `Charge.weight`, by which two ledgers can be compared."""
        return math.fsum(count * charge.weight for charge, count in self.kinds)


def merged(kinds: Iterable[tuple[Charge, int]]) -> list[Charge]:
    """Returns one charge for each kind, with the steps of all charges of this kind.

    >>> charge = Charge("device", DEVICE_ADJACENCY, "gaussian", 2.0)
    >>> sum(each.steps for each in merged([(charge, 20)]))
    20
    """
    return [replace(charge, steps=charge.steps * count) for charge, count in kinds if count]
