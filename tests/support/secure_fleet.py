"""The other devices of secure aggregation, and the sum itself, for a bench with one real device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hushfleet.secure import prime_field
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.masking import Masked
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.secure_round import SecureRound
from hushfleet.secure.unmasking_share import decode_answer
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan, SecurePlan
from hushfleet.wire.format.spec import BlobRef, PrivacySpec, SecureSpec, TaskSpec, WireSpec
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import decode_masked
from support.edge import CHUNK_BYTES, DEVICE, Bench, Package

BITS = 16


def with_secure_aggregation(package: Package, *, honest_fraction: float = 0.9) -> Package:
    secure = SecureSpec(BITS, min_devices=8, honest_devices=7, honest_fraction=honest_fraction)
    privacy = PrivacySpec("device", "secure", clip_norm=1.0, noise_multiplier=2.0, delta=1e-5, secure=secure)
    return package.with_spec(privacy=privacy, wire=WireSpec(codec="masked", chunk_bytes=CHUNK_BYTES))


@dataclass
class SecureFleet:
    """:param others: how many devices beside the real one."""

    bench: Bench
    others: int = 11
    operator: Identity | None = None

    def __post_init__(self) -> None:
        self.identities = {f"other-{number:03}": Identity.generate() for number in range(self.others)}
        self.membership_list = self.membership_list_of({DEVICE: self.bench.store.identity.public_key})

    @property
    def spec(self) -> TaskSpec:
        return self.bench.server.package.spec

    @property
    def shared(self) -> int:
        return self.spec.model.layout.size

    def membership_list_of(self, keys: dict[str, bytes]) -> MembershipList:
        secure = self.spec.privacy.secure
        assert secure is not None
        membership_list = MembershipList.of(
            {**{name: each.public_key for name, each in self.identities.items()}, **keys},
            federation=self.bench.server.topics.federation,
            honest_fraction=secure.honest_fraction,
            min_devices=secure.min_devices,
        )
        return membership_list if self.operator is None else membership_list.signed(self.operator)

    def serve(self, membership_list: MembershipList) -> BlobRef:
        data = membership_list.to_bytes()
        ref = BlobRef.of(data)
        self.bench.server.package.blobs[ref.digest] = data
        return ref

    def open_round(self, round: int, **changes: object) -> RoundPlan:
        """:param changes: of the plan."""
        secure = SecurePlan(self.serve(self.membership_list), 1.0)
        return self.bench.server.open_round(round, **{"cohort": {}, "secure": secure, **changes})

    def unmask(self, plan: RoundPlan, included: bytes, **changes: object) -> RoundPlan:
        assert plan.secure is not None
        secure = replace(plan.secure, included=included)
        return self.bench.server.open_round(
            plan.round, **{"phase": "unmask", "cohort": {}, "secure": secure, "epoch": plan.epoch, **changes}
        )

    def of(self, plan: RoundPlan, membership_list: MembershipList | None = None) -> SecureRound:
        assert self.spec.privacy.secure is not None
        return SecureRound(self.spec.privacy.secure, plan, membership_list or self.membership_list, size=self.shared)

    def keys_of(self, name: str, spec: TaskSpec | None = None) -> KeyAgreement:
        """:param spec: that it was told of another task package."""
        package = BlobRef.of((spec or self.spec).to_bytes()).digest
        return KeyAgreement(self.identities[name], task=package)

    def sum(
        self, secure_round: SecureRound, update: bytes, included: list[str], *, told: TaskSpec | None = None
    ) -> tuple[Masked, np.ndarray]:
        """Masked sums over `included`, and the sum of what the others of them have sent.

        :param update: of the real device.
        :param told: another task package, which the others were given.
        """
        rng = np.random.default_rng(0)
        _, values = self.read(update)
        width, rows = secure_round.width, secure_round.rule.members - secure_round.rule.threshold
        sums = Masked(values[: self.shared].copy(), values[self.shared :].reshape(rows, width).copy())
        plain = np.zeros(self.shared, np.uint32)
        for name in included:
            if name != DEVICE:
                own = rng.integers(0, secure_round.prime, self.shared, dtype=np.uint32)
                masked = secure_round.masked(secure_round.keys(self.keys_of(name, told), name), own)
                for total, each in ((sums.values, masked.values), (sums.corrections, masked.corrections), (plain, own)):
                    prime_field.add_into(total, each, secure_round.prime)
        return sums, plain

    def answers(self, secure_round: SecureRound, included: bytes, answer: bytes) -> dict[str, np.ndarray]:
        """Of all members; the real device's is the blob `answer`."""
        found = {
            name: np.array(secure_round.answer(self.keys_of(name), name, included), np.uint32)
            for name in secure_round.members
            if name != DEVICE
        }
        decoded = decode_answer(answer, public_key=self.bench.store.identity.public_key)
        return {**found, DEVICE: decoded.values}

    def read(self, update: bytes) -> tuple[UpdateHeader, np.ndarray]:
        header, values = decode_masked(update, public_key=self.bench.store.identity.public_key)
        return header, prime_field.from_bytes(values, BITS)
