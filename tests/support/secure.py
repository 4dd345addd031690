"""Devices of secure aggregation with real identities, rings and masks; no network, no training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.methods import method_of
from hushfleet.methods.cost import RoundTerms
from hushfleet.privacy.noise import SeededNoise
from hushfleet.privacy.ring import Ring
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.committee import least_honest
from hushfleet.secure.masking import Masked
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.prime_field import to_bytes
from hushfleet.secure.secure_round import SecureRound
from hushfleet.secure.unmasking_share import AnswerHeader, encode_answer
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import BlobRef, SecureSpec
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import encode_masked
from support.fleet import LAYOUT, prepared_task


def secure_task(devices: int, *, min_devices: int, honest_fraction: float = 1.0, **settings: Any) -> PreparedTask:
    """A task of secure aggregation, noise among the honest ones of `min_devices`."""
    base = prepared_task(
        method="dp-fedavg", devices=devices, accounting="secure", wire={"downlink": "full"}, min_updates=min_devices,
        **settings,
    )  # fmt: skip
    honest = least_honest(min_devices, devices=devices, honest_fraction=honest_fraction, drawn=devices)
    secure = SecureSpec(16, min_devices, honest, honest_fraction=honest_fraction)
    spec = replace(base.spec, privacy=replace(base.spec.privacy, secure=secure))
    package = spec.to_bytes()
    method = method_of(spec)
    return replace(base, spec=spec, spec_ref=BlobRef.of(package), method=method)


class SecureFleet:
    """A store, an engine on it, and its devices.

    :param masked: False leaves the masks out on both sides.
    """

    def __init__(
        self, folder: Path, *, devices: int = 10, min_devices: int = 6, masked: bool = True, **settings: Any
    ) -> None:
        self.folder, self.masked = folder, masked
        self.prepared = secure_task(devices, min_devices=min_devices, **settings)
        self.names = [f"dev-{index}" for index in range(devices)]
        self.identities = {name: Identity.from_bytes(bytes([index + 1]) * 32) for index, name in enumerate(self.names)}
        self.agreements = {name: KeyAgreement(identity) for name, identity in self.identities.items()}
        self.devices = self  # where a `Field` looks for identities
        self.now, self.wall_from = 1000.0, 0.0  # the clock on the wall shows the sum
        self.store = AggregatorStore(folder, durable=False)
        for name in self.names:
            self.store.add_device(name, public_key=self.identities[name].public_key, board="test")
        self.engine = self._engine()

    def _engine(self) -> RoundEngine:
        clocks = {"clock": self.wall, "monotonic": lambda: self.now}
        return RoundEngine(self.store, self.prepared, masked=self.masked, **clocks)

    def wall(self) -> float:
        return self.wall_from + self.now

    def restart(self) -> RoundEngine:
        """As after a crash."""
        self.store.close()
        self.store = AggregatorStore(self.folder, durable=False)
        self.engine = self._engine()
        return self.engine

    @property
    def plan(self) -> RoundPlan:
        assert self.engine.plan is not None
        return self.engine.plan

    @property
    def round(self) -> SecureRound:
        spec = self.prepared.spec.privacy.secure
        assert spec is not None
        assert self.engine.membership_list is not None
        return SecureRound(spec, self.plan, MembershipList.from_bytes(self.engine.membership_list), size=LAYOUT.size)

    @property
    def ring(self) -> Ring:
        cost = self.prepared.method.cost(RoundTerms(self.plan.noise_split))
        return self.round.ring(cost.bound, cost.noise_multiplier)

    def integers(self, name: str) -> np.ndarray:
        """What `name` adds to the sum, before its mask: uint32 `[d]`."""
        index, number = self.names.index(name), self.plan.round
        change = np.random.default_rng([number, index]).normal(size=LAYOUT.size)
        values = change * (0.5 / np.linalg.norm(change))
        return self.ring.encode(values.astype(np.float32), SeededNoise(3, index, number))

    def update(self, name: str, *, integers: np.ndarray | None = None, **changes: Any) -> bytes:
        secure, plan, layers = self.round, self.plan, len(LAYOUT.layers)
        charge = self.prepared.method.charge(RoundTerms(plan.noise_split))
        header = UpdateHeader(
            task=plan.task,
            round=plan.round,
            device=name,
            codec="masked",
            value_count=LAYOUT.size,
            steps=(),
            noise_stds=(1.0,) * layers,
            clip_norms=(0.5,) * layers,
            public_digest=bytes(16),
            rounds_charged=plan.round,
            epsilon_server=0.0,
            multiplier_server=charge.noise_multiplier,
            noise_split=charge.noise_split,
        )
        values = self.integers(name) if integers is None else integers
        if self.masked:
            masked = secure.masked(secure.keys(self.agreements[name], name), values)
        else:
            masked = Masked(values, np.zeros((secure.rule.may_miss, secure.width), np.uint32))
        flat = np.concatenate([masked.values, masked.corrections.reshape(-1)])
        return encode_masked(replace(header, **changes), to_bytes(flat, 16), identity=self.identities[name])

    def answer(self, member: str, *, change: int = 0, included: bytes | None = None) -> bytes:
        """:param change: a member that lies adds it to each value."""
        assert self.plan.secure is not None
        included = included or self.plan.secure.included
        made = self.round.answer(self.agreements[member], member, included)
        values = [(value + change) % self.round.prime for value in made]
        header = AnswerHeader.of(self.plan.task, self.plan.round, member, included, 16)
        return encode_answer(header, values, identity=self.identities[member])

    def send(self, names: Iterable[str]) -> None:
        for name in names:
            verdict = self.engine.accept(name, self.update(name))
            assert verdict.code == "accepted", verdict

    def run_round(self, *, missing: Iterable[str] = ()) -> Any:
        """One round to its end; `missing` never send anything."""
        self.engine.open_round(())
        there = [name for name in self.names if name not in missing]
        self.send(there)
        for name in missing:
            self.engine.decline(name, "busy", "", round=self.plan.round)
        if self.masked:
            assert not self.engine.should_close(self.now)
            for member in self.round.members:
                if member in there:
                    assert self.engine.accept(member, self.answer(member)).code == "accepted"
            self.now += 60
        assert self.engine.should_close(self.now)
        return self.engine.close()
