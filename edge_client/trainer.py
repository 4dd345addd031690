"""One round on a device: train, clip, noise once, encode, and commit before anything may leave.

The simulator's fast engine runs this same class, with a seeded `Randomness` in place of the field's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hushfleet.config.spec import TaskSpec
from hushfleet.data.samples import Samples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.board.consent import check_allowed
from hushfleet.edge_client.storage.store import DeviceStore, OutboxEntry, RoundCommit
from hushfleet.errors import Malformed
from hushfleet.methods import make_method
from hushfleet.methods.stages import Release
from hushfleet.methods.state import DeviceState, RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from hushfleet.training.batch import GradientFunction
from hushfleet.training.draws import Inputs
from hushfleet.training.local_round import MakeOptimizer, OnBatch, Trained, train_round
from hushfleet.training.optim import make_optimizer
from hushfleet.wire.format.forms import CARRIED, steps_for
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, encode_update

_ORDER_STREAM = 0x4F524452


class Randomness(Protocol):
    """Where a device's random numbers come from."""

    def noise(self, round: int) -> NoiseSource: ...

    def order(self, round: int) -> np.random.Generator:
        """For the order of the samples, augmentation and dropout, which would do no harm if they were known; and for
        who is in a batch with privacy unit `record`, which must stay a secret."""


class FieldRandomness:
    """Noise from a cryptographically secure stream; nothing is repeatable."""

    def noise(self, round: int) -> NoiseSource:
        return SecureNoise()

    def order(self, round: int) -> np.random.Generator:
        return np.random.default_rng()


@dataclass(frozen=True)
class SeededRandomness:
    """Repeatable. FOR SIMULATION ONLY: who knows the seed can subtract the noise."""

    seed: int
    device_index: int

    def noise(self, round: int) -> NoiseSource:
        return SeededNoise(self.seed, self.device_index, round)

    def order(self, round: int) -> np.random.Generator:
        key = np.random.SeedSequence(self.seed, spawn_key=(_ORDER_STREAM, self.device_index, round))
        return np.random.Generator(np.random.PCG64(key))


@dataclass(frozen=True)
class TrainedRound:
    """What an observer on the device is shown; all of it is private, and none of it may be sent.

    :param own: float32 `[d]`, the device's own model after local training, before aggregation.
    :param loss: mean training loss per sample.
    """

    round: int
    own: np.ndarray
    loss: float
    state: DeviceState
    release: Release


class Trainer:
    """Runs rounds of one task on one device.

    :param store: keeps the state, the ledger and the update; what is committed there is what is sent.
    :param logits_of: the network's inference, for methods that look at their own data.
    :param samples: reads the device's data; asked when they are needed.
    :param limits: what the device's owner allows, and how many times the standard noise is wanted.
    :param observer: is shown each trained round, for metrics that stay on the device.
    :param make_optimizer: of the local training.
    """

    def __init__(
        self,
        *,
        device: str,
        store: DeviceStore,
        spec: TaskSpec,
        gradient: GradientFunction,
        logits_of: LogitsOf,
        samples: Callable[[], Samples],
        randomness: Randomness,
        limits: LimitsSection,
        observer: Callable[[TrainedRound], None] | None = None,
        make_optimizer: MakeOptimizer = make_optimizer,
    ) -> None:
        self.device = device
        self.store = store
        self.spec = spec
        self.gradient = gradient
        self.logits_of = logits_of
        self._samples = samples
        self.randomness = randomness
        self.limits = limits
        self.observer = observer
        self.make_optimizer = make_optimizer
        self._checked: RoundPlan | None = None
        self.method = make_method(spec.method, spec.method_config, spec.privacy, spec.model.layout, rounds=spec.rounds)

    @property
    def samples(self) -> Samples:
        """Raises `BadInput` where there are none and the task needs some, or where they do not fit it."""
        return self._samples()

    def check_round(self, plan: RoundPlan) -> None:
        """Refuses, before any training, a round that this device must not take part in.

        Raises `BudgetExceeded` or `Declined` for what its owner does not allow, and `Malformed` for a plan that
        contradicts the task. A plan is checked once: what it depends on changes only when its round is committed.
        """
        if plan is self._checked:
            return
        if plan.task != self.spec.task or plan.rounds != self.spec.rounds:
            raise Malformed(f"the plan of round {plan.round} belongs to {plan.task!r}, not {self.spec.task!r}")
        terms = self.terms_of(plan)
        check_allowed(plan, self.spec, self.method, terms, limits=self.limits, ledger=self.store.ledger)
        self._checked = plan

    def run_round(self, plan: RoundPlan, global_params: np.ndarray, *, on_batch: OnBatch | None = None) -> OutboxEntry:
        """Trains and commits the update of a round; a round that was committed before is returned as it is.

        :param global_params: float32 `[d]`, read-only.
        """
        stored = self.store.outbox(plan.task, plan.round)
        if stored is not None:
            return stored
        return self.commit(plan, self.train(plan, global_params, on_batch=on_batch))

    def train(self, plan: RoundPlan, global_params: np.ndarray, *, on_batch: OnBatch | None = None) -> Trained:
        """The local training alone; nothing is stored and nothing may leave."""
        return train_round(
            self.method,
            self.state_for(plan),
            global_params,
            self.gradient,
            self.samples,
            terms=self.terms_of(plan),
            logits_of=self.logits_of,
            inputs=Inputs(self.spec.model.dropout, self.spec.augment),
            rng=self.randomness.order(plan.round),
            noise=self.randomness.noise(plan.round),
            on_batch=on_batch,
            make_optimizer=self.make_optimizer,
        )

    def terms_of(self, plan: RoundPlan) -> RoundTerms:
        return RoundTerms(plan.noise_split, plan.controls, self.limits.noise_preference)

    def state_for(self, plan: RoundPlan) -> DeviceState:
        """What the device begins a round with; raises as `check_round` does."""
        self.check_round(plan)
        return self.store.load_state(plan.task) or self.method.init_state()

    def commit(self, plan: RoundPlan, trained: Trained) -> OutboxEntry:
        """Clips, noises, encodes and stores the update of a round that was trained, once."""
        method, layout, state, update = self.method, self.spec.model.layout, trained.context.state, trained.update
        # With the unit `record` this stream has served the gradients, and nothing more is drawn from it.
        release = method.release(trained.context, update, self.randomness.noise(plan.round))
        shared = ~state.public.mask
        counts = [int(shared[span.start : span.stop].sum()) for span in layout.layers]
        epsilon_after = self.store.ledger.epsilon_server(
            delta=self.spec.privacy.delta,
            task=plan.task,
            extra=release.charge,
            accountant=self.spec.privacy.accountant,
        )
        header = UpdateHeader(
            task=plan.task,
            round=plan.round,
            device=self.device,
            codec=self.spec.wire.codec,
            value_count=sum(counts),
            steps=self._steps(release, counts),
            noise_stds=tuple(release.noise_stds),
            clip_norms=tuple(release.clip_norms),
            public_digest=state.public.digest(),
            rounds_charged=self.store.ledger.rounds_charged(plan.task) + 1,
            epsilon_server=epsilon_after,
            multiplier_server=release.charge.noise_multiplier,
            noise_split=release.charge.noise_split,
            report=release.report,
        )
        everything = bool(shared.all())  # then nothing is copied: a board's memory is small
        values, residual = release.values if everything else release.values[shared], None
        if self.spec.wire.codec in CARRIED:
            residual = self.store.load_residual(plan.task, size=layout.size)
            values = values + residual[shared]
        encoded = encode_update(header, values, counts=counts, identity=self.store.identity)
        sent = encoded.sent
        if not everything:
            sent = np.zeros_like(update)
            sent[shared] = encoded.sent
        if residual is not None:
            residual[shared] = values - encoded.sent
        commit = RoundCommit(
            task=plan.task,
            round=plan.round,
            charge=release.charge,
            state=method.advance(trained.context, update=update, trained=trained.own, sent=sent),
            update=encoded.data,
            public_before=state.public.to_bytes(),
            residual=residual,
        )
        entry = self.store.commit_round(commit)
        if self.observer is not None:
            self.observer(TrainedRound(plan.round, trained.own, trained.loss, state, release))
        return entry

    def _steps(self, release: Release, counts: list[int]) -> tuple[float, ...]:
        norms = layer_norms(release.values, self.spec.model.layout)
        rms = [float(norm) / max(count, 1) ** 0.5 for norm, count in zip(norms, counts, strict=True)]
        return steps_for(self.spec.wire, noise_stds=[float(std) for std in release.noise_stds], layer_rms=rms)
