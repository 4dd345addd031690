"""The game for a device: is this update the device's, or nothing?

In one world local training ends with the canary update, in the other with no change at all (add or remove, as the
ledger has it). All else is what a board runs: `Trainer.run_round` with its store and ledger, the method's release, the
codec. The adversary is the server: it decodes each update as the aggregator does and has its header and report. It also
asks for each round a second time, as after a lost acknowledgement; if other bytes come, it takes the mean of both.

The score is the likelihood ratio of two normal distributions with the same variances: observed along what the method
sends without noise, each value by its own precision. Variances are measured, in trials that are not counted, and not
taken from the header: noise that is missing somewhere must not be believed.
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import Trainer
from hushfleet.methods.method import TaskMethod
from hushfleet.methods.state import RoundContext, RoundTerms
from hushfleet.privacy.mechanism import Charge
from hushfleet.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from hushfleet.simulator.studies.audit.canary import WorstData, canary_update
from hushfleet.training.local_round import Trained
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, decode_update, payload_digest

DEVICE = "audited"
MEASURED = 32  # trials of each world that variances are measured in
ROUNDS_A_LIFE = 32  # a ledger is read as a whole for each entry
_SEASONING_ROUNDS = 2
FLOOR = 1e-12
_SHOWN_OUTRIGHT = 1e6

KeepGoing = Callable[[int], bool]


@dataclass(frozen=True, eq=False)
class Subject:
    """What is audited.

    :param spec: the task package; the audit needs none of its graphs.
    :param initial: float32 `[d]`, a global model.
    :param cohort: how many devices a round has, among whom noise may be divided.
    :param field_noise: noise as in the field, which no seed repeats.
    """

    spec: TaskSpec
    initial: np.ndarray
    cohort: int
    seed: int = 0
    field_noise: bool = False

    @property
    def noise_split(self) -> int:
        """As the aggregator's plans have it."""
        return min(self.spec.privacy.noise_split, self.cohort)

    def controls(self, method: TaskMethod) -> dict[str, float]:
        """Of the first round."""
        return method.server.controls(method.server.initial(self.seed), 1)

    def plan(self, round: int, controls: dict[str, float]) -> RoundPlan:
        return RoundPlan(
            task=self.spec.task,
            round=round,
            rounds=self.spec.rounds,
            phase="open",
            global_digest=hashlib.sha256(self.initial.tobytes()).digest(),
            global_bytes=self.initial.nbytes,
            cohort={DEVICE if number == 0 else f"other-{number}": bytes(16) for number in range(self.cohort)},
            noise_split=self.noise_split,
            deadline_s=0.0,
            controls=controls,
        )


def limits_of(spec: TaskSpec) -> LimitsSection:
    """An audited device takes what its task asks for: the finding is what that is worth."""
    return LimitsSection(math.inf, spec.privacy.delta, accounting=spec.privacy.accounting)


def _no_samples() -> Samples:
    raise NotImplementedError("the update is given")


class Scores(NamedTuple):
    """The adversary's scores, float64 `[trials]` in each world; higher says "in"."""

    inside: np.ndarray
    outside: np.ndarray


class DeviceScores(NamedTuple):
    """Of all that is sent, and of the noised values alone."""

    everything: Scores
    values: Scores
    charge: Charge


@dataclass
class FreshNoise:
    """A device's `Randomness` of which no two draws are alike, as in the field; but for `field`, repeatable."""

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


class Silence:
    """A noise source that leaves it out."""

    def normal(self, size: int) -> np.ndarray:
        return np.zeros(size)


class ScriptedTrainer(Trainer):
    """A device whose local training ends as the audit says."""

    ends_with: Trained

    def train(self, plan: RoundPlan, global_params: np.ndarray, **_: Any) -> Trained:
        self.state_for(plan)
        return self.ends_with


@dataclass
class Moments:
    """Running sums of vectors, for their variances."""

    count: int = 0
    total: Any = 0.0
    squares: Any = 0.0
    headers: set[tuple[float, ...]] = field(default_factory=set)

    def add(self, values: np.ndarray) -> None:
        self.count += 1
        self.total = self.total + values
        self.squares = self.squares + values * values

    @property
    def spread(self) -> np.ndarray:
        """Sum of squared deviations from the mean."""
        return np.maximum(self.squares - self.total**2 / self.count, 0.0)


class Seen(NamedTuple):
    """One round, decoded: float64 `[d]` values, the report, and what the header says of the noise."""

    values: np.ndarray
    report: np.ndarray
    header: tuple[float, ...]


def play(subject: Subject, trials: int, keep_going: KeepGoing) -> DeviceScores:
    """`trials` rounds in each world, or fewer where `keep_going`, asked with how many are done, says no."""
    game = _DeviceGame(subject)
    return game.play(trials, keep_going)


class _DeviceGame:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        with self._life(0) as trainer:
            self.method: TaskMethod = trainer.method
        rng = np.random.default_rng(subject.seed)
        self.controls = subject.controls(self.method)
        self.terms = RoundTerms(subject.noise_split, self.controls)
        self.context = self._seasoned(rng)
        clip_norm = subject.spec.privacy.clip_norm
        self.update = canary_update(subject.spec.model.layout, clip_norm, rng)
        self.expected, self.nothing = self._without_noise(self.update), self._without_noise(self.update * 0)

    def play(self, trials: int, keep_going: KeepGoing) -> DeviceScores:
        moments = {True: Moments(), False: Moments()}
        for seen, inside in self._pairs(1, MEASURED, lambda _: True):
            moments[inside].add(np.concatenate((seen.values, seen.report)))
            moments[inside].headers.add(seen.header)
        variances = sum(each.spread for each in moments.values()) / (2 * MEASURED - 2)
        means = np.concatenate((self.expected.values, self.expected.report))
        weights = means / np.maximum(variances, np.maximum(FLOOR * means**2, 1e-300))
        of_values = np.where(np.arange(len(weights)) < len(self.expected.values), weights, 0.0)
        # The canary without noise then scores 1 by either, and nothing at all scores 0.
        weights, of_values = (each / max(float(each @ means), 1e-300) for each in (weights, of_values))
        told = self._header_tells(moments)
        scores: dict[tuple[bool, bool], list[float]] = {(a, b): [] for a in (True, False) for b in (True, False)}
        for seen, inside in self._pairs(2, trials, keep_going):
            vector = np.concatenate((seen.values, seen.report))
            shown = _SHOWN_OUTRIGHT if told is not None and seen.header == told else 0.0
            scores[inside, True].append(float(weights @ vector) + shown)
            scores[inside, False].append(float(of_values @ vector))
        everything, values = (
            Scores(np.array(scores[True, all_of_it]), np.array(scores[False, all_of_it])) for all_of_it in (True, False)
        )
        return DeviceScores(everything, values, self.method.charge(self.terms))

    @staticmethod
    def _header_tells(moments: dict[bool, Moments]) -> tuple[float, ...] | None:
        """What the header says in the one world and never in the other."""
        inside, outside = moments[True].headers, moments[False].headers
        return next(iter(inside)) if len(inside) == len(outside) == 1 and inside != outside else None

    def _pairs(self, stage: int, trials: int, keep_going: KeepGoing) -> Iterator[tuple[Seen, bool]]:
        """Trials of both worlds in turn, each world in lives of its own."""
        rounds = min(self.subject.spec.rounds, ROUNDS_A_LIFE)
        done, life = 0, stage << 32
        while done < trials:
            count = min(rounds, trials - done)
            with self._life(life + 1, self.update) as insider, self._life(life + 2, self.update * 0) as outsider:
                for round in range(1, count + 1):
                    if not keep_going(done):
                        return
                    yield self._seen(insider, round), True
                    outside = self._seen(outsider, round)
                    yield outside._replace(report=outside.report - self.nothing.report), False
                    done += 1
            life += 2

    @contextmanager
    def _life(self, number: int, update: np.ndarray | None = None) -> Iterator[ScriptedTrainer]:
        """A device with an empty store."""
        subject = self.subject
        with (
            tempfile.TemporaryDirectory(prefix="audit-") as folder,
            DeviceStore(Path(folder) / "store.sqlite", device=DEVICE, durable=False) as store,
        ):
            trainer = ScriptedTrainer(
                device=DEVICE,
                store=store,
                spec=subject.spec,
                gradient=None,
                logits_of=None,
                samples=_no_samples,
                randomness=FreshNoise(subject.seed, number, subject.field_noise),
                limits=limits_of(subject.spec),
            )
            if update is not None:
                start = subject.initial
                trainer.ends_with = Trained(self.context, start + update, start, 0.0)
            yield trainer

    def _seen(self, trainer: ScriptedTrainer, round: int) -> Seen:
        """What the server has of a round that it asked for twice."""
        plan = self.subject.plan(round, self.controls)
        first, again = (trainer.run_round(plan, self.subject.initial).data for _ in range(2))
        seen = self._decoded(trainer, first)
        if payload_digest(again) == payload_digest(first):
            return seen
        other = self._decoded(trainer, again)
        return Seen((seen.values + other.values) / 2, (seen.report + other.report) / 2, seen.header)

    def _decoded(self, trainer: ScriptedTrainer, data: bytes) -> Seen:
        layout, shared = self.subject.spec.model.layout, ~self.context.mask
        counts = [int(shared[span.start : span.stop].sum()) for span in layout.layers]
        decoded = decode_update(data, public_key=trainer.store.identity.public_key, counts=counts)
        values = np.zeros(layout.size)
        values[shared] = decoded.values
        return Seen(values, np.array(decoded.header.report), _about_noise(decoded.header))

    def _seasoned(self, rng: np.random.Generator) -> RoundContext:
        """A device that has taken part before: what is personal, and what steers its clip norms, has moved.

        It has no model of its own, so that its training begins with the global one: what is sent is then the update.
        """
        method, initial = self.method, self.subject.initial
        state = method.init_state()
        data = WorstData(len(self.subject.spec.model.class_names), rng)
        for round in range(1, _SEASONING_ROUNDS + 1):
            update = canary_update(method.layout, self.subject.spec.privacy.clip_norm, rng) * np.float32(round)
            context = method.measured(method.begin(state, initial, self.terms, data), initial, data)
            release = method.release(context, update, SeededNoise(self.subject.seed, 0, round))
            state = method.advance(context, update=update, trained=initial, sent=release.values)
            state = replace(state, own=None)
        return method.measured(method.begin(state, initial, self.terms, data), initial, data)

    def _without_noise(self, update: np.ndarray) -> Seen:
        release = self.method.release(self.context, update, Silence())
        return Seen(release.values.astype(np.float64), np.array(release.report), ())


def _about_noise(header: UpdateHeader) -> tuple[float, ...]:
    return (*header.steps, *header.noise_stds, *header.clip_norms, header.multiplier_server, float(header.noise_split))
