"""The secure aggregation of one round for device, committee member and aggregator: the participants and their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hushfleet.errors import BadInput, Malformed
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.committee import CommitteeRule, committee_rule, corrupt_devices, least_honest
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.unmasking_share import unmasking_share
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import MAX_SECURE_ROUNDS, SecureSpec

if TYPE_CHECKING:
    import numpy as np

    from hushfleet.privacy.ring import Ring
    from hushfleet.secure.masking import Masked

RING_KEY_BYTES = 16


class SecureRound:
    """The cohort and the committee of an open round.

    :param spec: of the task.
    :param plan: with `secure`.
    :param membership_list: the membership list that the plan names.
    :param size: number of summed values.

    Raises `BadInput` for a plan in which a device must not take part: a task beyond the limits that the operator has
    signed, a round number too high, too few devices for a sum to be opened, too few honest devices for the noise that
    the task assumes, or a cohort from which no committee can be made.
    """

    def __init__(self, spec: SecureSpec, plan: RoundPlan, membership_list: MembershipList, *, size: int) -> None:
        if plan.secure is None:
            raise BadInput(f"the plan of round {plan.round} has no secure aggregation")
        self.spec, self.membership_list, self.size, self.length = spec, membership_list, size, spec.length(size)
        _check_signed_limits(spec, membership_list)
        if plan.round > MAX_SECURE_ROUNDS:
            raise BadInput(
                f"round {plan.round} is above {MAX_SECURE_ROUNDS}, the most that secure aggregation allows: each "
                "further round is a committee that the aggregator could choose"
            )
        # The draw depends only on the membership list and the round: if it depended on the task's id, or on anything
        # else that the aggregator can choose, the aggregator could try values until a committee suits it. The
        # operator's random bytes are in the membership list's digest, so a device cannot try keys either. The masks'
        # keys depend on everything that the device and the members must agree on, and on everything that the training
        # depends on: otherwise parts of the fleet could train different models in one sum.
        seed = hashlib.sha256(membership_list.digest() + b"|%d" % plan.round).digest()
        told = sorted(plan.controls.items())  # they may include the noise
        agreed = (
            f"|{size}|{plan.secure.rate!r}|{spec.bits}|{spec.min_devices}|{spec.honest_fraction!r}|{plan.task}|{told}"
            f"|{plan.global_digest.hex()}|{plan.rounds}|{plan.noise_split}{'|padded' * spec.padded}"
        )
        self.context: bytes = hashlib.sha256(seed + agreed.encode()).digest()
        """The context of the masks: everything in the plan about round and sum, except the devices in the sum."""
        self._ring_key = hashlib.sha256(f"ring|{plan.task}|{plan.round}".encode()).digest()[:RING_KEY_BYTES]
        self.cohort: list[int] = membership_list.cohort(seed=seed, rate=plan.secure.rate)
        self.rule = _rule_of(spec, membership_list, drawn=len(self.cohort))
        self.committee: list[int] = membership_list.committee(self.cohort, seed=seed, size=self.rule.members)
        self._places = {membership_list.devices[index]: index for index in self.cohort}

    @property
    def devices(self) -> list[str]:
        """The cohort's ids, in rising order."""
        return [self.membership_list.devices[index] for index in self.cohort]

    @property
    def members(self) -> list[str]:
        """The committee's ids, in its order."""
        return [self.membership_list.devices[index] for index in self.committee]

    @property
    def width(self) -> int:
        """Number of values in a member's answer."""
        return self.rule.width(self.length)

    @property
    def sent(self) -> int:
        """Number of integers in an update, with the corrections."""
        return self.length + self.rule.may_miss * self.width

    def key_of(self, device: str) -> bytes | None:
        """Returns the membership list's key of a device of the cohort; None for any other device."""
        place = self._places.get(device)
        return None if place is None else self.membership_list.key(place)

    @cached_property
    def prime(self) -> int:
        """The number of elements of the field in which values are summed."""
        from hushfleet.secure.prime_field import PRIMES

        return PRIMES[self.spec.bits]

    def ring(self, clip_norm: float, noise_multiplier: float, records: int = 0) -> Ring:
        """Returns the ring, which maps clipped values to the summed integers; a function of public numbers only.

        :param clip_norm: the largest change of a device's values by the protected unit (`Cost.bound`).
        :param noise_multiplier: of the sum (`Cost.noise_multiplier`).
        :param records: `Cost.records`.
        """
        from hushfleet.privacy.ring import Ring

        return Ring(
            prime=self.prime,
            clip_norm=clip_norm,
            noise_multiplier=noise_multiplier,
            honest_devices=self.spec.honest_devices,
            devices=len(self.cohort),
            size=self.size,
            length=self.length,
            records=records,
            key=self._ring_key,
        )

    # the device

    def keys(self, agreement: KeyAgreement, device: str) -> tuple[bytes, ...]:
        """Returns the keys of this round alone that `device` shares with the committee, in its order."""
        return tuple(
            agreement.key(self.membership_list.key(m), self._info(self._places[device], m)) for m in self.committee
        )

    def masked(self, keys: Sequence[bytes], values: np.ndarray) -> Masked:
        """Returns the masked form of `values`, uint32 `[length]`, that the device with these `keys` sends."""
        from hushfleet.secure.masking import mask

        return mask(values, keys, self.rule, self.prime)

    # the member

    def answer(self, agreement: KeyAgreement, member: str, included: bytes) -> list[int]:
        """Returns the answer of `member` for a sum, `[width]` values. Raises `Malformed` if the sum must not open."""
        place = self._places.get(member)
        if place not in self.committee:
            raise Malformed(f"{member} is not a member of this round's committee")
        keys = [agreement.key(self.membership_list.key(i), self._info(i, place)) for i in self.read_included(included)]
        return unmasking_share(keys, self.width, self.prime)

    # the aggregator

    def pack_included(self, devices: Iterable[str]) -> bytes:
        """Returns the bitmap of a plan, for the devices in the sum."""
        chosen = set(devices)
        bits = "".join("01"[device in chosen] for device in self.devices)
        width = -(-len(bits) // 8)
        return int(bits.ljust(8 * width, "0"), 2).to_bytes(width, "big")

    def read_included(self, included: bytes) -> list[int]:
        """Returns indices in the roster. Raises `Malformed` for a bitmap that does not fit, or too small a sum."""
        count = len(self.cohort)
        bits = "".join(f"{byte:08b}" for byte in included)
        if len(included) != (count + 7) // 8 or "1" in bits[count:]:
            raise Malformed(f"a bitmap of {len(included)} bytes does not fit a cohort of {count} devices")
        chosen = [index for index, bit in zip(self.cohort, bits, strict=False) if bit == "1"]
        if len(chosen) < self.spec.min_devices:
            raise Malformed(f"the sum has {len(chosen)} devices, and needs {self.spec.min_devices} or more")
        return chosen

    def opened(self, sums: Masked, answers: Mapping[str, np.ndarray]) -> tuple[np.ndarray, list[str]]:
        """Returns the sum of values, uint32 `[length]`, and the members whose answers did not fit (see `Opened`).

        :param sums: of the included devices' masked values and corrections, modulo the prime.
        :param answers: by member.

        Raises `BadInput` if there are too few answers, if they contradict each other, or for an answer of a non-member.
        """
        from hushfleet.secure.masking import unmask

        places = {member: place for place, member in enumerate(self.members)}
        strangers = answers.keys() - places.keys()
        if strangers:
            raise BadInput(f"{min(strangers)} is not a member of this round's committee")
        opened = unmask(sums, {places[member]: each for member, each in answers.items()}, self.rule, self.prime)
        return opened.values, [self.members[place] for place in opened.wrong]

    def _info(self, device: int, member: int) -> bytes:
        return b"%s device %d member %d" % (self.context, device, member)


def assumption(spec: SecureSpec, *, devices: int, membership_list: str | None) -> str:
    """Describes the assumptions of a task's secure aggregation.

    :param devices: number in the roster.
    :param membership_list: its name; None if no operator has signed it.
    """
    honest = devices - corrupt_devices(devices, honest_fraction=spec.honest_fraction)
    if membership_list is None:
        of = f"{devices} boards are honest, and the server keeps to the protocol: no operator has signed who they are"
    else:
        of = f"{devices} boards of {membership_list} are honest"
    return f"protected as long as at least {honest} of {of}; no sum of fewer than {spec.min_devices} is opened"


def check_membership_list(spec: SecureSpec, membership_list: MembershipList, *, rate: float) -> None:
    """Checks, before a round opens, that a cohort of the usual size can have a sum.

    Without it, a fleet that has outgrown its task would open and give up one round after the other, until none is left.

    Raises `BadInput` for a membership list that does not fit the task, or for a task beyond the limits that the
    operator has signed.
    """
    _check_signed_limits(spec, membership_list)
    _rule_of(spec, membership_list, drawn=round(rate * len(membership_list.devices)))


def _rule_of(spec: SecureSpec, membership_list: MembershipList, *, drawn: int) -> CommitteeRule:
    """Returns the rule of a cohort of `drawn` devices. Raises `BadInput` if it can have no sum."""
    if drawn < spec.min_devices:
        raise BadInput(f"the cohort has {drawn} devices, and a sum needs {spec.min_devices} or more")
    devices, fraction = len(membership_list.devices), spec.honest_fraction
    honest = least_honest(spec.min_devices, devices=devices, honest_fraction=fraction, drawn=drawn)
    if honest < spec.honest_devices:
        raise BadInput(
            f"the task counts on the noise of {spec.honest_devices} honest devices, but a sum of "
            f"{spec.min_devices} may have only {honest}, with {drawn} of {devices} devices drawn"
        )
    rule = committee_rule(drawn, honest_fraction=fraction, membership_list=devices)
    if rule.packed < 1:
        raise BadInput(f"no committee of {rule.members} devices withstands {rule.corrupt} corrupt ones")
    return rule


def _check_signed_limits(spec: SecureSpec, membership_list: MembershipList) -> None:
    """Checks the task, which the aggregator writes, against the limits that the operator has signed, if any.

    Raises `BadInput` for a task beyond these limits.
    """
    if not membership_list.signature:
        return
    if spec.honest_fraction > membership_list.honest_fraction:
        raise BadInput(
            f"the task assumes that a share of {spec.honest_fraction:g} of the devices is honest; the operator has "
            f"signed {membership_list.honest_fraction:g} in {membership_list.name}"
        )
    if spec.min_devices < membership_list.min_devices:
        raise BadInput(
            f"the task opens sums of {spec.min_devices} devices; the operator has signed "
            f"{membership_list.min_devices} or more "
            f"in {membership_list.name}"
        )
