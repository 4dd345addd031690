"""A fleet for secure aggregation without a network: identities, a membership list, rounds and what each of them
does."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.masking import Masked
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.prime_field import PRIMES, add_into
from hushfleet.secure.secure_round import SecureRound
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import BlobRef, RoundPlan, SecurePlan
from hushfleet.wire.format.spec import SecureSpec


def identity(name: str) -> Identity:
    """The same one for the same name."""
    return Identity.from_bytes(hashlib.sha256(name.encode()).digest())


def plan_of(
    membership_list: MembershipList, *, task: str = "sum-1", round: int = 1, rounds: int = 100, rate: float = 1.0
) -> RoundPlan:
    blob = membership_list.to_bytes()
    secure = SecurePlan(BlobRef(hashlib.sha256(blob).digest(), len(blob)), rate)
    return RoundPlan(task, round, rounds, "open", bytes(32), 400, {}, 1, 600.0, secure=secure)


@dataclass
class SumFleet:
    """`devices` of them, each with the key that `identity` gives its name."""

    devices: int
    size: int = 50
    spec: SecureSpec = field(default_factory=lambda: SecureSpec(16, 2, 1))
    prefix: str = "pi"

    def __post_init__(self) -> None:
        names = [f"{self.prefix}-{index:05d}" for index in range(self.devices)]
        self.agreements = {name: KeyAgreement(identity(name)) for name in names}
        self.membership_list = MembershipList.of({name: identity(name).public_key for name in names})
        self.prime = PRIMES[self.spec.bits]

    def round(self, number: int = 1, *, task: str = "sum-1", rate: float = 1.0) -> SecureRound:
        plan = plan_of(self.membership_list, task=task, round=number, rate=rate)
        return SecureRound(self.spec, plan, self.membership_list, size=self.size)

    def values(self, device: str) -> np.ndarray:
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(device.encode()).digest()[:4], "big"))
        return rng.integers(0, self.prime, self.spec.length(self.size)).astype(np.uint32)

    def masked(self, secure: SecureRound, device: str) -> Masked:
        return secure.masked(secure.keys(self.agreements[device], device), self.values(device))

    def sums(self, secure: SecureRound, devices: Iterable[str]) -> Masked:
        """What the aggregator adds."""
        each = [self.masked(secure, device) for device in devices]
        total = Masked(each[0].values.copy(), each[0].corrections.copy())
        for masked in each[1:]:
            add_into(total.values, masked.values, self.prime)
            add_into(total.corrections, masked.corrections, self.prime)
        return total

    def answers(self, secure: SecureRound, included: Iterable[str], members: Iterable[str]) -> dict[str, np.ndarray]:
        bitmap = secure.pack_included(included)
        return {
            member: np.array(secure.answer(self.agreements[member], member, bitmap), np.uint32) for member in members
        }

    def plain(self, devices: Iterable[str]) -> np.ndarray:
        """The sum that is to come out, by whole numbers."""
        total = sum(self.values(device).astype(np.int64) for device in devices)
        return (total % self.prime).astype(np.uint32)
