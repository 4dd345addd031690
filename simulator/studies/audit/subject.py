"""Makes the audited device: the code of a board, with an empty store, and with the audit's inputs."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.board.local_data import zero_samples
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.trainer import Trainer
from hushfleet.methods import method_of
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.question import RoundRules, rules_of
from hushfleet.methods.task_method import TaskMethod
from hushfleet.privacy.charge import Charge
from hushfleet.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from hushfleet.secure.membership_list import MembershipList
from hushfleet.simulator.engines.fast.sums import UnmaskedRound, key_of
from hushfleet.simulator.studies.audit.canary import CanaryGradient, disjoint_blocks
from hushfleet.simulator.studies.audit.claims import Claim
from hushfleet.wire.format.messages import RoundPlan, SecurePlan
from hushfleet.wire.format.spec import BlobRef, TaskSpec

DEVICE = "audited"


@dataclass(frozen=True, eq=False)
class Subject:
    """The audited device and task.

    :param spec: the task package; the audit needs none of its graphs.
    :param initial: float32 `[d]`, a global model.
    :param cohort: number of devices in a round; noise may be divided among them.
    :param field_noise: whether the noise is not seeded, as in the field.
    :param fleet: number of devices in the membership list, if the task has secure aggregation.
    :param simulated: the controls of each round of a simulated run, if they follow from the run.
    """

    spec: TaskSpec
    initial: np.ndarray
    cohort: int
    seed: int = 0
    field_noise: bool = False
    fleet: int = 0
    simulated: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @cached_property
    def method(self) -> TaskMethod:
        return method_of(self.spec)

    @cached_property
    def training(self) -> tuple[int, ...]:
        """The rounds that train."""
        return tuple(round for round in range(1, self.spec.rounds + 1) if not self.spec.asks(round))

    @cached_property
    def asking(self) -> tuple[int, ...]:
        """The rounds that ask."""
        return tuple(round for round in range(1, self.spec.rounds + 1) if self.spec.asks(round))

    def rules(self, round: int) -> RoundRules:
        """Returns the task and its method as they are in a round."""
        return rules_of(self.spec, self.method, round)

    def terms(self, round: int) -> RoundTerms:
        """Returns the terms of a round, as in the aggregator's plans."""
        if self.spec.asks(round):
            return RoundTerms()
        return RoundTerms(min(self.spec.privacy.noise_split, self.cohort), self._controls[round])

    @cached_property
    def _controls(self) -> Mapping[int, Mapping[str, float]]:
        server, number = self.method.server, self.spec.training_number
        state = server.initial(self.seed)
        return self.simulated or {round: server.controls(state, number(round)) for round in self.training}

    def charge(self, round: int) -> Charge:
        return self.rules(round).method.charge(self.terms(round))

    def noise(self, round: int) -> float:
        """Returns the charged noise multiplier of a round; 1 without noise."""
        return self.charge(round).noise_multiplier or 1.0

    def kind(self, round: int) -> Hashable:
        """Returns equal values for two rounds of a game if they have the same terms."""
        return tuple(sorted(self.terms(round).controls.items()))

    def claim(self, rounds: Iterable[int]) -> Claim:
        """Returns the claim of the ledger about these rounds."""
        return Claim(tuple(map(self.charge, rounds)), self.spec.privacy.accountant)

    @property
    def classes(self) -> int:
        return len(self.spec.model.class_names)

    @cached_property
    def membership_list(self) -> MembershipList | None:
        """The membership list, if the task has secure aggregation."""
        if self.spec.privacy.secure is None:
            return None
        names = self._names(self.fleet)
        return MembershipList.of({name: key_of(self.seed, number).public_key for number, name in enumerate(names)})

    def plan(self, round: int) -> RoundPlan:
        terms = self.terms(round)
        return RoundPlan(
            task=self.spec.task,
            round=round,
            rounds=self.spec.rounds,
            phase="open",
            global_digest=hashlib.sha256(self.initial.tobytes()).digest(),
            global_bytes=self.initial.nbytes,
            cohort={} if self.membership_list is not None else dict.fromkeys(self._names(self.cohort), bytes(16)),
            noise_split=terms.noise_split,
            deadline_s=0.0,
            controls=dict(terms.controls),
            secure=None
            if self.membership_list is None
            else SecurePlan(BlobRef.of(self.membership_list.to_bytes()), 1.0),
        )

    @staticmethod
    def _names(count: int) -> list[str]:
        return [DEVICE, *(f"other-{number}" for number in range(1, count))]

    @contextmanager
    def device(self, life: int, records: tuple[CanaryGradient, np.ndarray] | None = None) -> Iterator[Trainer]:
        """Opens a device with an empty store; each `life` has its own noise.

        It accepts all terms of its task: the audit measures how much privacy they give.

        :param records: its gradient function, and the canaries that are its only records, int `[n]`; None: the game
            needs no data and no network.
        """
        privacy, (gradient, inserted) = self.spec.privacy, records or (_not_asked, np.arange(0))
        with (
            tempfile.TemporaryDirectory(prefix="audit-") as folder,
            DeviceStore(
                Path(folder) / "store.sqlite", device=DEVICE, durable=False, identity=key_of(self.seed, 0)
            ) as store,
        ):
            trainer = Trainer(
                device=DEVICE,
                store=store,
                spec=self.spec,
                method=self.method,
                gradient=gradient,
                logits_of=_not_asked if records is None else lambda params, x: np.zeros((len(x), 1), np.float32),
                samples=lambda: zero_samples(self.spec.model, inserted + self.classes),
                randomness=FreshNoise(self.seed, life, self.field_noise),
                limits=LimitsSection.of_simulation(privacy),
            )
            if self.membership_list is not None:
                trainer.make_secure_round = UnmaskedRound
            yield trainer

    def canary_records(self, count: int, rng: np.random.Generator, *, length: float) -> CanaryGradient:
        """Returns the gradient function of a device whose records may be canaries, `count` different ones.

        :param length: norm of a canary's gradient.
        """
        return CanaryGradient(self.classes, disjoint_blocks(self.spec.model.layout, count, rng), length)


def _not_asked(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this game needs no data and no network")


@dataclass
class FreshNoise:
    """A device's `Randomness` in which each draw is different, as in the field; repeatable unless `field` is set."""

    seed: int
    life: int
    field: bool
    drawn: int = 0

    def noise(self, round: int) -> NoiseSource:
        self.drawn += 1
        return SecureNoise() if self.field else SeededNoise(self.seed, self.life, self.drawn)

    def order(self, round: int) -> np.random.Generator:
        self.drawn += 1
        if self.field:
            return np.random.default_rng()
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(self.life, self.drawn)))
