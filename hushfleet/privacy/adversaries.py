"""Converts a noise level into epsilon, and epsilon into noise, against both adversaries.

Example: ten devices that divide the noise of 20 rounds among them (FedGLP-ADP at its "epsilon = 2"):

    >>> spent = epsilon(3.975, rounds=20, delta=0.1, noise_split=10)
    >>> f"server {spent.server:.2f}, release {spent.release:.3f}"
    'server 10.04, release 1.429'
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hushfleet.errors import PrivacyError
from hushfleet.privacy.accountant import Step
from hushfleet.privacy.accountant import epsilon as epsilon_of
from hushfleet.privacy.mechanism import GaussianMechanism
from hushfleet.privacy.noise_for import noise_multiplier_for
from hushfleet.privacy.terms import Accountant, Unit


class Against(NamedTuple):
    """A number against an adversary who sees a device's updates (`server`), or only the models (`release`)."""

    server: float
    release: float


def multipliers(
    noise_multiplier: float, *, noise_split: int = 1, participants: int | None = None, unit: Unit = "device"
) -> Against:
    """Returns the noise over the clip norm that each adversary sees.

    :param noise_multiplier: of the sum of `noise_split` devices; with record-level noise, of each batch.
    :param participants: number of devices whose updates are added up; None: `noise_split`.

    >>> seen = multipliers(4.0, noise_split=4)
    >>> seen.server, seen.release
    (2.0, 4.0)
    """
    mechanism = GaussianMechanism(noise_multiplier, noise_split=noise_split)
    summed = noise_split if participants is None else participants
    release = noise_multiplier if unit == "record" else mechanism.multiplier_release(summed)
    return Against(mechanism.multiplier_server, release)


def epsilon(
    noise_multiplier: float,
    *,
    rounds: int,
    delta: float,
    sample_rate: float = 1.0,
    noise_split: int = 1,
    participants: int | None = None,
    unit: Unit = "device",
    accountant: Accountant = "exact",
) -> Against:
    """Returns epsilon at `delta` for adding or removing a unit, as `hushfleet privacy` prints it; inf without noise.

    :param noise_multiplier: as in `multipliers`; `noise_split` and `participants` too.
    :param rounds: number of rounds; with record-level noise, number of batches over the whole task.
    :param sample_rate: probability with which a unit takes part in a round. The server sees which devices take part,
        so against the server they count as if drawn in every round.
    :raises PrivacyError: a value outside its range.
    """
    noise = multipliers(noise_multiplier, noise_split=noise_split, participants=participants, unit=unit)
    seen = sample_rate if unit == "record" else 1.0
    return Against(
        *(
            epsilon_of([Step(multiplier, rate, rounds)], delta=delta, accountant=accountant)
            for multiplier, rate in zip(noise, (seen, sample_rate), strict=True)
        )
    )


def noise_multiplier(
    epsilon: float,
    *,
    rounds: int,
    delta: float,
    sample_rate: float = 1.0,
    noise_split: int = 1,
    participants: int | None = None,
    accountant: Accountant = "exact",
) -> float:
    """Returns the noise multiplier of the sum of `noise_split` devices that gives `epsilon` to the released models.

    Without a split, this epsilon also holds against the server.

    :raises PrivacyError: a value outside its range, or an epsilon that no noise reaches.

    >>> round(noise_multiplier(2, rounds=20, delta=0.01), 3)
    4.992
    """
    total = noise_multiplier_for(
        epsilon=epsilon, delta=delta, steps=rounds, sample_rate=sample_rate, accountant=accountant
    )
    return total / multipliers(1.0, noise_split=noise_split, participants=participants).release


def snr_db(signal_norm: float, noise_std: float, count: int) -> float:
    """Returns signal over noise in dB: `signal_norm` against noise of `noise_std` on `count` entries.

    It is inf without noise, -inf without signal. The norm of a real update is private: compute this on
    the device for its owner, or with the clip norm in place of the norm, and do not send it.

    >>> round(snr_db(1.0, 0.1, 100), 6)
    0.0
    """
    if not all(0 <= value < math.inf for value in (signal_norm, noise_std, count)):
        raise PrivacyError(f"norms must be finite, zero or more: {signal_norm}, {noise_std} on {count} entries")
    if noise_std == 0 or count == 0:
        return math.inf
    return 20 * math.log10(signal_norm / (noise_std * math.sqrt(count))) if signal_norm > 0 else -math.inf
