"""Makes the ring of a round, which maps clipped values to the summed integers; all participants have the same ring."""

from __future__ import annotations

import hashlib

from hushfleet.config.spec import TaskSpec
from hushfleet.errors import BadInput
from hushfleet.privacy.ring import Ring
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.messages import RoundPlan

KEY_BYTES = 16


def ring_of(
    spec: TaskSpec,
    plan: RoundPlan,
    secure_round: SecureRound,
    clip_norm: float,
    noise_multiplier: float,
    records: int = 0,
) -> Ring:
    """Returns the round's ring, a function of public numbers only.

    :param clip_norm: the largest change of a device's values by the protected unit (`Cost.bound`).
    :param noise_multiplier: of the sum (`Cost.noise_multiplier`).
    :param records: `Cost.records`.

    Raises `BadInput` for a task without secure sums.
    """
    if spec.privacy.secure is None:
        raise BadInput(f"the task {spec.task} has no secure sums")
    return Ring(
        prime=secure_round.prime,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        honest_devices=spec.privacy.secure.honest_devices,
        devices=len(secure_round.cohort),
        size=secure_round.size,
        records=records,
        key=hashlib.sha256(f"ring|{plan.task}|{plan.round}".encode()).digest()[:KEY_BYTES],
    )
