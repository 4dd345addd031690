"""Makes the specification of secure aggregation for devices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Protocol

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.config.sections import DataSection, MethodSection, PrivacySection
from hushfleet.errors import PrivacyError
from hushfleet.privacy.ring_length import is_slow
from hushfleet.secure.committee import least_honest
from hushfleet.secure.prime_field import PRIMES
from hushfleet.wire.format.spec import MAX_SECURE_ROUNDS, SecureSpec

LEAST_SHARE = 0.9  # a sum is opened only with at least this share of the cohort


class SecureTask(Protocol):
    """The values of a task that secure aggregation depends on."""

    @property
    def round(self) -> RoundSection: ...
    @property
    def data(self) -> DataSection: ...
    @property
    def privacy(self) -> PrivacySection: ...
    @property
    def method(self) -> MethodSection: ...
    @property
    def cohort_size(self) -> int: ...
    @property
    def sampling_rate(self) -> float: ...
    @property
    def total_rounds(self) -> int: ...


def least_updates(task: SecureTask) -> int:
    """Returns the least number of updates in a sum: the task's, or nine tenths of a cohort."""
    if task.round.min_updates > 1:
        return task.round.min_updates
    cohort, rate = task.cohort_size, task.sampling_rate
    return max(2, math.ceil(LEAST_SHARE * (cohort - 3 * math.sqrt(cohort * (1 - rate))) - 1e-9))


def spec_of(task: SecureTask, *, noise_multiplier: float, size: int | None) -> SecureSpec:
    """Returns the specification of the sums for devices.

    :param size: number of values in an update, which determines the bits of each value; None: always 32 bits.

    Raises `PrivacyError` if no honest devices are left, or no ring is fine enough.
    """
    if (rounds := task.total_rounds) > MAX_SECURE_ROUNDS:
        evaluated = "" if rounds == task.round.rounds else f", {rounds} with those that evaluate"
        raise PrivacyError(
            f"round.rounds = {task.round.rounds}{evaluated}: secure aggregation allows at most {MAX_SECURE_ROUNDS}, "
            "since a round's number draws its committee, and an aggregator with more rounds could choose among "
            "committees"
        )
    least, fraction = task.round.min_updates, task.privacy.honest_fraction
    most = math.ceil(task.cohort_size + 6 * math.sqrt(task.cohort_size * (1 - task.sampling_rate)))
    honest = least_honest(least, devices=task.data.devices, honest_fraction=fraction, drawn=most)
    if honest == 0:
        raise PrivacyError(
            f"a sum of round.min_updates = {least} of {task.data.devices} devices, of which a share of "
            f"privacy.honest_fraction = {fraction:g} is honest, may have no honest one: take larger sums"
        )
    spec = SecureSpec(32, least, honest, fraction, padded=size is not None and is_slow(size))
    if size is None:
        return spec
    return replace(spec, bits=_bits(task, noise_multiplier, honest=honest, most=most, size=spec.length(size)))


def _bits(task: SecureTask, noise_multiplier: float, *, honest: int, most: int, size: int) -> Literal[16, 24, 32]:
    from hushfleet.privacy.ring import least_bits  # for tasks with secure aggregation

    records = task.method.config().batch_size if task.privacy.unit == "record" else 0
    try:
        return least_bits(
            PRIMES,
            noise_multiplier=noise_multiplier,
            honest_devices=honest,
            devices=most,
            size=size,
            records=records,
        )
    except PrivacyError as error:
        key = "noise_multiplier" if task.privacy.epsilon is None else "epsilon"
        given = getattr(task.privacy, key) or 0.0
        raise PrivacyError(f"privacy.{key} = {given:g}: {error}; it needs fewer values, or less noise") from error
