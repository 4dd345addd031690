"""Makes the audited device: the code of a board, with an empty store, and with the audit's inputs."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.config.spec import BlobRef, TaskSpec
from hushfleet.data.samples import LabelledSamples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import Trainer
from hushfleet.gradients.batch import GradientFunction
from hushfleet.methods import method_of
from hushfleet.methods.state import RoundTerms
from hushfleet.methods.task_method import TaskMethod
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from hushfleet.secure.roster import Roster
from hushfleet.simulator.engines.fast.sums import key_of
from hushfleet.wire.format.messages import RoundPlan, SecurePlan

DEVICE = "audited"
ROUNDS_A_LIFE = 32  # rounds before a new store, because each entry reads the whole ledger
FLOOR = 1e-12

KeepGoing = Callable[[int], bool]
"""Called with the number of finished trials; returns whether to continue."""


@dataclass(frozen=True, eq=False)
class Subject:
    """The audited device and task.

    :param spec: the task package; the audit needs none of its graphs.
    :param initial: float32 `[d]`, a global model.
    :param cohort: number of devices in a round; noise may be divided among them.
    :param field_noise: whether the noise is not seeded, as in the field.
    :param fleet: number of devices in the roster, if the task has secure sums.
    """

    spec: TaskSpec
    initial: np.ndarray
    cohort: int
    seed: int = 0
    field_noise: bool = False
    fleet: int = 0

    @cached_property
    def method(self) -> TaskMethod:
        return method_of(self.spec)

    @cached_property
    def terms(self) -> RoundTerms:
        """The terms of a round, as in the aggregator's plans."""
        controls = self.method.server.controls(self.method.server.initial(self.seed), 1)
        return RoundTerms(min(self.spec.privacy.noise_split, self.cohort), controls)

    @property
    def charge(self) -> Charge:
        """The charge of one round."""
        return self.method.charge(self.terms)

    @property
    def classes(self) -> int:
        return len(self.spec.model.class_names)

    @cached_property
    def roster(self) -> Roster | None:
        """The roster, if the task has secure sums."""
        if self.spec.privacy.secure is None:
            return None
        names = self._names(self.fleet)
        return Roster.of({name: key_of(self.seed, number).public_key for number, name in enumerate(names)})

    def plan(self, round: int) -> RoundPlan:
        return RoundPlan(
            task=self.spec.task,
            round=round,
            rounds=self.spec.rounds,
            phase="open",
            global_digest=hashlib.sha256(self.initial.tobytes()).digest(),
            global_bytes=self.initial.nbytes,
            cohort={} if self.roster is not None else dict.fromkeys(self._names(self.cohort), bytes(16)),
            noise_split=self.terms.noise_split,
            deadline_s=0.0,
            controls=dict(self.terms.controls),
            secure=None if self.roster is None else SecurePlan(BlobRef.of(self.roster.to_bytes()), 1.0),
        )

    @staticmethod
    def _names(count: int) -> list[str]:
        return [DEVICE, *(f"other-{number}" for number in range(1, count))]

    @contextmanager
    def device(
        self,
        life: int,
        *,
        gradient: GradientFunction | None = None,
        logits_of: LogitsOf | None = None,
        samples: LabelledSamples | None = None,
    ) -> Iterator[Trainer]:
        """Opens a device with an empty store; each `life` has its own noise.

        It accepts all terms of its task: the audit measures how much privacy they give.
        """
        privacy = self.spec.privacy
        with (
            tempfile.TemporaryDirectory(prefix="audit-") as folder,
            DeviceStore(
                Path(folder) / "store.sqlite", device=DEVICE, durable=False, identity=key_of(self.seed, 0)
            ) as store,
        ):
            yield Trainer(
                device=DEVICE,
                store=store,
                spec=self.spec,
                method=self.method,
                gradient=_not_asked if gradient is None else gradient,
                logits_of=_not_asked if logits_of is None else logits_of,
                samples=_not_asked if samples is None else lambda: samples,
                randomness=FreshNoise(self.seed, life, self.field_noise),
                limits=LimitsSection.of_simulation(privacy),
            )


def _not_asked(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("this game needs no data and no network")


class Scores(NamedTuple):
    """The adversary's scores, float64 `[trials]` in each world; a higher score means "in"."""

    inside: np.ndarray
    outside: np.ndarray


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


@dataclass
class Moments:
    """Running sums of vectors, for their variances."""

    count: int = 0
    total: Any = 0.0
    squares: Any = 0.0

    def add(self, values: np.ndarray) -> None:
        self.count += 1
        self.total = self.total + values
        self.squares = self.squares + values * values

    @property
    def spread(self) -> np.ndarray:
        """Sum of squared deviations from the mean."""
        return np.maximum(self.squares - self.total**2 / self.count, 0.0)
