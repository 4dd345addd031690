"""One round on a device: train, clip, noise once, encode, and commit before anything may leave.

The simulator's fast engine runs this same class, with a seeded `Randomness` in place of the field's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from hushfleet.config.spec import BlobRef, TaskSpec
from hushfleet.data.samples import LabelledSamples
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.board.consent import check_allowed, check_trust
from hushfleet.edge_client.board.local_data import blank_samples
from hushfleet.edge_client.declines import Declined
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit, RoundStore
from hushfleet.errors import BadInput, LedgerError, Malformed, PrivacyError, StoreError
from hushfleet.methods import method_of
from hushfleet.methods.method import TaskMethod
from hushfleet.methods.stages import Release
from hushfleet.methods.state import DeviceState, RoundTerms
from hushfleet.model.evaluation import LogitsOf
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.ledger import epsilon_server_of
from hushfleet.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from hushfleet.secure import field
from hushfleet.secure.agreement import KeyAgreement
from hushfleet.secure.member_answer import AnswerHeader, encode_answer
from hushfleet.secure.ring_of import ring_of
from hushfleet.secure.roster import Roster
from hushfleet.secure.secure_round import SecureRound
from hushfleet.training.batch import GradientFunction
from hushfleet.training.draws import Inputs
from hushfleet.training.local_round import MakeOptimizer, OnBatch, Trained, train_round
from hushfleet.training.optim import make_optimizer
from hushfleet.wire.format.forms import codec_of, steps_for
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import SIGNED, UpdateFormat, UpdateHeader, encode_masked

_ORDER_STREAM = 0x4F524452

_log = logging.getLogger("hushfleet.edge")


class GivenUp(Exception):
    """Training was given up on purpose, whatever the data are: what `on_batch` may raise."""


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
    """Repeatable. FOR SIMULATION ONLY: who knows the seed can subtract the noise.

    :param make_noise: for an implementation that gives the same bits faster.
    """

    seed: int
    device_index: int
    make_noise: Callable[[int, int, int], NoiseSource] = SeededNoise

    def noise(self, round: int) -> NoiseSource:
        return self.make_noise(self.seed, self.device_index, round)

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
    :param method: of `spec`, where it was made before.
    :param observer: is shown each trained round before it is committed, for metrics that stay on the device.
    :param make_optimizer: of the local training.
    :param stand_in: whether a round is answered as by a device without data where training fails on this one's.
    :param make_secure_round: of a round with a secure sum; a simulation of sums alone may leave the masks out.
    :param update_format: another than the field's FOR SIMULATION ONLY.
    """

    def __init__(
        self,
        *,
        device: str,
        store: RoundStore,
        spec: TaskSpec,
        gradient: GradientFunction,
        logits_of: LogitsOf,
        samples: Callable[[], LabelledSamples],
        randomness: Randomness,
        limits: LimitsSection,
        method: TaskMethod | None = None,
        observer: Callable[[TrainedRound], None] | None = None,
        make_optimizer: MakeOptimizer = make_optimizer,
        stand_in: bool = False,
        make_secure_round: Callable[..., SecureRound] = SecureRound,
        update_format: UpdateFormat = SIGNED,
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
        self.stand_in = stand_in
        self.make_secure_round = make_secure_round
        self.update_format = update_format
        self.failed: str | None = None
        """What went wrong with the data in the round that was trained last, in words that must stay here."""
        self._checked: RoundPlan | None = None
        self._secure: tuple[RoundPlan, SecureRound] | None = None
        self.method = method or method_of(spec)

    @property
    def samples(self) -> LabelledSamples:
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
        # With the unit `record` gradients are computed of what the device has kept, which must have noise; by another
        # package it may have none.
        package = self.store.package_of(plan.task)
        if package not in (None, self._package):
            raise Declined("error", f"this device has trained for {plan.task} by another package")
        if package is None and self.method.by_record and self.store.load_state(plan.task) is not None:
            raise Declined("error", f"an earlier client has trained for {plan.task}, and did not note by which package")
        if (plan.secure is None) != (self.spec.privacy.secure is None):
            raise Malformed(f"the plan of round {plan.round} has {'no' if plan.secure is None else 'a'} secure sum")
        terms = self.terms_of(plan)
        check_allowed(plan, self.spec, self.method, terms, limits=self.limits, ledger=self.store.ledger)
        self._checked = plan

    @cached_property
    def _package(self) -> bytes:
        return BlobRef.of(self.spec.to_bytes()).digest

    @cached_property
    def _agreement(self) -> KeyAgreement:
        return KeyAgreement(self.store.identity, task=self._package)

    def secure_round(self, plan: RoundPlan, roster: Roster | None) -> SecureRound:
        """Cohort and committee of a round with a secure sum; kept until the next plan.

        Raises `Declined` where the owner trusts less, and `BadInput` for a task, plan or roster that give none, or too
        few honest devices.
        """
        if self._secure is None or self._secure[0] is not plan:
            spec = self.spec.privacy.secure
            if spec is None or roster is None:
                raise BadInput(f"round {plan.round} of {plan.task} has no secure sum: task and plan must both have one")
            check_trust(spec, self.limits)
            shared = int(np.count_nonzero(~self.method.init_state().public.mask))
            self._secure = plan, self.make_secure_round(spec, plan, roster, size=shared)
        return self._secure[1]

    def run_round(
        self,
        plan: RoundPlan,
        published: np.ndarray,
        roster: Roster | None = None,
        *,
        on_batch: OnBatch | None = None,
    ) -> OutboxEntry:
        """Trains and commits the update of a round; a round that was committed before is returned as it is.

        :param published: the round's model and vectors, float32, read-only, as `TaskMethod.split` takes them.
        :param roster: that the plan names, where it has a secure sum.
        """
        stored = self.store.outbox(plan.task, plan.round)
        if stored is not None:
            return stored
        return self.commit(plan, self._train_or_stand_in(plan, published, on_batch), roster)

    def answer(self, plan: RoundPlan, roster: Roster) -> AnswerEntry | None:
        """What this device answers as a committee member, once a round; None where it is none.

        The same set of devices again gives the same bytes. Raises `PrivacyError` for another set, and `Malformed` for
        one that does not fit the cohort or is too small.
        """
        secure_round = self.secure_round(plan, roster)
        if self.device not in secure_round.members or plan.secure is None:
            return None
        included = plan.secure.included
        header = AnswerHeader.of(plan.task, plan.round, self.device, included, secure_round.spec.bits)
        stored = self.store.answers.of(plan.task, plan.round)
        if stored is None:
            values = secure_round.answer(self._agreement, self.device, included)
            data = encode_answer(header, values, identity=self.store.identity)
            return self.store.answers.commit(plan.task, plan.round, included=header.included, data=data)
        if stored.included != header.included:
            raise PrivacyError(
                f"the aggregator asks for a second sum of round {plan.round} of {plan.task}, over another set of "
                "devices. Two such sums would tell what single devices sent, so nothing more is answered"
            )
        return stored

    def _train_or_stand_in(self, plan: RoundPlan, published: np.ndarray, on_batch: OnBatch | None) -> Trained:
        """As `train`. Where that fails on the device's data, the round goes on as without data: a decline would tell.

        What fails without data, too, is nobody's secret, and is raised.
        """
        self.failed = None
        try:
            trained = self.train(plan, published, on_batch=on_batch)
        except (GivenUp, StoreError, BadInput):  # of `BadInput`: where the task takes no device without data
            raise
        except Exception as error:
            if not self.stand_in or not self._promised(plan, published):
                raise
            self.failed = f"round {plan.round}: training failed, and noise alone is sent: {error!r}"
            _log.error("%s", self.failed, exc_info=error)
        else:
            if trained.failures:
                self.failed = f"round {plan.round}: training left some of the data out: {'; '.join(trained.failures)}"
                _log.error("%s", self.failed)
            return trained
        model = self.spec.model
        if self.method.by_record:  # the noise is in the training
            blank = blank_samples(model, model.targets.blank(0, len(model.class_names)))
            return self._trained_on(blank, plan, published, on_batch)
        count = self.method.config.batch_size
        blank = blank_samples(model, model.targets.blank(count, len(model.class_names)))
        return self._trained_on(blank, plan, published, on_batch).forgotten()

    def _promised(self, plan: RoundPlan, published: np.ndarray) -> bool:
        """Whether noise hides what a round sends, and the model to begin with is one."""
        charge = self.method.charge(self.terms_of(plan))
        return charge.noise_multiplier > 0 and not charge.raw and bool(np.isfinite(published).all())

    def train(self, plan: RoundPlan, published: np.ndarray, *, on_batch: OnBatch | None = None) -> Trained:
        """The local training alone; nothing is stored and nothing may leave."""
        return self._trained_on(self.samples, plan, published, on_batch)

    def _trained_on(
        self, samples: LabelledSamples, plan: RoundPlan, published: np.ndarray, on_batch: OnBatch | None
    ) -> Trained:
        return train_round(
            self.method,
            self.state_for(plan),
            published,
            self.gradient,
            samples,
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

    def commit(self, plan: RoundPlan, trained: Trained, roster: Roster | None = None) -> OutboxEntry:
        """Clips, noises, encodes and stores the update of a round that was trained, once.

        Where an update cannot be released, nothing is sent in its place, noised and charged like any other: an
        aggregator could choose models with which training diverges on some data, and a decline would tell on which.
        """
        try:
            return self._commit(plan, trained, roster)
        except (PrivacyError, Malformed) as error:
            if isinstance(error, LedgerError) or not self._promised(plan, trained.context.global_params):
                raise
            self.failed = f"round {plan.round}: noise alone is sent: {error}"
            _log.warning("%s", self.failed)
        return self._commit(plan, trained.forgotten(), roster)

    def _commit(self, plan: RoundPlan, trained: Trained, roster: Roster | None) -> OutboxEntry:
        method, layout, state, update = self.method, self.spec.model.layout, trained.context.state, trained.update
        # With the unit `record` this stream has served the gradients, and nothing more is drawn from it.
        noise = self.randomness.noise(plan.round)
        release = method.release(trained.context, update, noise)
        shared = ~state.public.mask
        everything = bool(shared.all())  # then nothing is copied: a board's memory is small
        values, residual = release.values if everything else release.values[shared], None
        counts = [int(np.count_nonzero(shared[span.start : span.stop])) for span in layout.layers]
        header = self._header(plan, release, state, counts)
        if self.spec.privacy.secure is not None:
            data, seen = self._masked(plan, header, values, noise, roster), np.zeros(len(values), np.float32)
        else:
            if codec_of(self.spec.wire.codec).carries_error:
                residual = self.store.load_residual(plan.task, size=layout.size)
                values = values + residual[shared]
            data, seen = self.update_format.encode(header, values, counts=counts, identity=self.store.identity)
        sent = seen
        if not everything:
            sent = np.zeros_like(update)
            sent[shared] = seen
        if residual is not None:
            residual[shared] = values - seen
        commit = RoundCommit(
            task=plan.task,
            round=plan.round,
            charge=release.charge,
            state=method.advance(trained.context, update=update, trained=trained.own, sent=sent),
            update=data,
            public_before=state.public.to_bytes(),
            residual=residual,
            context=None if plan.secure is None else self.secure_round(plan, roster).context,
            package=self._package,
        )
        if self.observer is not None:  # before the commit: who dies in between measures again
            self.observer(TrainedRound(plan.round, trained.own, trained.loss, state, release))
        return self.store.commit_round(commit)

    def _masked(
        self, plan: RoundPlan, header: UpdateHeader, values: np.ndarray, noise: NoiseSource, roster: Roster | None
    ) -> bytes:
        """The blob of an update for a secure sum: integers with this device's part of the sum's noise, masked.

        :param values: clipped, float32 `[k]`. Nobody is shown them, the aggregator no more than others.
        """
        secure_round, cost = self.secure_round(plan, roster), self.method.cost(self.terms_of(plan))
        ring = ring_of(self.spec, plan, secure_round, cost.bound, cost.noise_multiplier, cost.records)
        masked = secure_round.masked(self._agreement, self.device, ring.encode(values, noise))
        integers = np.concatenate((masked.values, masked.corrections.reshape(-1)))
        return encode_masked(header, field.to_bytes(integers, secure_round.spec.bits), identity=self.store.identity)

    def _header(self, plan: RoundPlan, release: Release, state: DeviceState, counts: list[int]) -> UpdateHeader:
        """:param counts: how many values of each layer are sent."""
        privacy, charged = self.spec.privacy, self.store.ledger.entries(plan.task)
        return UpdateHeader(
            task=plan.task,
            round=plan.round,
            device=self.device,
            codec=self.spec.wire.codec,
            value_count=sum(counts),
            steps=self._steps(release, counts),
            noise_stds=tuple(release.noise_stds),
            clip_norms=tuple(release.clip_norms),
            public_digest=state.public.digest(),
            rounds_charged=len({entry.round for entry in charged}) + 1,
            epsilon_server=epsilon_server_of(
                [*(entry.charge for entry in charged), release.charge],
                delta=privacy.delta,
                accountant=privacy.accountant,
            ),
            multiplier_server=release.charge.noise_multiplier,
            noise_split=release.charge.noise_split,
            report=release.report,
        )

    def _steps(self, release: Release, counts: list[int]) -> tuple[float, ...]:
        stds = [float(std) for std in release.noise_stds]
        rms: list[float] = []
        if not any(stds):  # the steps follow the values
            norms = layer_norms(release.values, self.spec.model.layout)
            rms = [float(norm) / max(count, 1) ** 0.5 for norm, count in zip(norms, counts, strict=True)]
        return steps_for(self.spec.wire, noise_stds=stds, layer_rms=rms)
