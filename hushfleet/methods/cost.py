"""The public facts of a device's round, and the privacy cost of a method's stages that `methods.stages` computes from
them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hushfleet.errors import PrivacyError
from hushfleet.params import ParamLayout
from hushfleet.privacy.charge import DEVICE_ADJACENCY, Charge
from hushfleet.wire.format.spec import PrivacySpec


@dataclass(frozen=True)
class RoundTerms:
    """The terms of a round for one device.

    :param noise_split: number of devices among which the round's noise is divided.
    :param controls: numbers that the server chose for this round and published with the plan, by name.
    :param preference: this device's privacy preference: its noise is this many times the standard noise (APDP-FL).
    """

    noise_split: int = 1
    controls: Mapping[str, float] = field(default_factory=dict)
    preference: float = 1.0

    def __hash__(self) -> int:
        return hash((self.noise_split, tuple(sorted(self.controls.items())), self.preference))


@dataclass(frozen=True)
class RoundSetting:
    """The public facts of a device's round: everything that its cost depends on."""

    layout: ParamLayout
    privacy: PrivacySpec
    terms: RoundTerms

    @property
    def clip_norm(self) -> float:
        """C of the round: the server's choice, or the task's."""
        return self.terms.controls.get("clip_norm", self.privacy.clip_norm)

    @property
    def noise_split(self) -> int:
        """The number of devices that divide the noise. Under `strict` it is 1, because the server sees each update.

        With `secure` the task sets the number of honest devices in a sum, for any participants.
        """
        if self.privacy.secure is not None:
            return self.privacy.secure.honest_devices
        return self.terms.noise_split if self.privacy.as_published else 1

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the round: the server's choice, or the task's."""
        return self.terms.controls.get("noise_multiplier", self.privacy.noise_multiplier)

    def preferred_multiplier(self, max_preference: float | None) -> float:
        """Returns the round's noise multiplier times the device's own preference. Raises `PrivacyError`.

        :param max_preference: the largest preference that the method allows; None: preferences are ignored.
        """
        if max_preference is None:
            return self.noise_multiplier
        if self.terms.preference > max_preference:
            raise PrivacyError(
                f"this device wants {self.terms.preference:g} times the standard noise, and the task allows "
                f"{max_preference:g} times (method.max_preference)"
            )
        return self.terms.preference * self.noise_multiplier


@dataclass(frozen=True)
class Cost:
    """The cost of a list of stages for a device in a round, with the unit `device`.

    :param norm: bound of the values in units of the round's clip norm C; inf: no bound.
    :param clip_norm: C.
    :param noise_multiplier: noise over bound of the values, summed over `noise_split` devices.
    :param summed: True if values are seen only as a sum, with the noise of at least `noise_split` honest devices.
    :param records: 0 if a device is protected; if a record is protected, a device's values have at most the norm of
        this many records.
    :param reports: noise multiplier of each noised report, summed in the same way, and True if the server only adds
        them up.
    :param report_limit: the largest size of a number in an honest report, except with a probability below 1e-14.
    :param raw: functions of the device's data that leave without noise, in words.
    """

    clip_norm: float
    norm: float = math.inf
    noise_multiplier: float = 0.0
    noise_split: int = 1
    summed: bool = False
    records: int = 0
    reports: tuple[tuple[float, bool], ...] = ()
    report_limit: float = 0.0
    raw: tuple[str, ...] = ()

    @property
    def bound(self) -> float:
        """The largest change of the values when the device, or one of its records, is added or removed."""
        return self.clip_norm * self.norm

    @property
    def largest(self) -> float:
        """The largest norm of a device's values."""
        return self.bound * max(1, self.records)

    @property
    def values_multiplier(self) -> float:
        """Noise over bound in the visible form of the device's own values."""
        return self.noise_multiplier / math.sqrt(self._divided)

    @property
    def _divided(self) -> int:
        return 1 if self.summed else self.noise_split

    def charge(self) -> Charge:
        """Returns the ledger's charge for the values and the reports together."""
        multiplier = combined_multiplier(self.noise_multiplier, *(each for each, _ in self.reports)) / math.sqrt(
            self._divided
        )
        return Charge(
            unit="device",
            adjacency=DEVICE_ADJACENCY,
            mechanism="gaussian" if multiplier > 0 else "none",
            noise_multiplier=multiplier,
            noise_split=self.noise_split,
            raw=self.raw,
        )

    def multiplier_release(self, participants: int) -> float:
        """Returns the noise multiplier against anyone who sees only the aggregate, a plain sum in which noise adds up.

        If the server does more with a report than add it up, only the report's own noise counts. For summed values only
        the noise of the honest devices (`noise_split`) counts.
        """
        if self.summed:
            return self.charge().noise_multiplier
        summed = math.sqrt(participants / self.noise_split)
        alone = 1 / math.sqrt(self.noise_split)
        reports = (each * (summed if adds_up else alone) for each, adds_up in self.reports)
        return combined_multiplier(self.noise_multiplier * summed, *reports)


def combined_multiplier(*multipliers: float) -> float:
    """Returns the multiplier z of one Gaussian mechanism equal to all releases: 1/z^2 adds up; 0 if one has none.

    >>> round(combined_multiplier(3.0, 4.0), 3)
    2.4
    """
    if len(multipliers) == 1 or 0 in multipliers:
        return min(multipliers)
    return float(math.fsum(z**-2 for z in multipliers) ** -0.5)


def remaining_multiplier(whole: float, report: float) -> float:
    """Returns the noise multiplier that remains after a report has used its part.

    >>> round(remaining_multiplier(2.4, 4.0), 6)
    3.0
    """
    return float((whole**-2 - report**-2) ** -0.5)
