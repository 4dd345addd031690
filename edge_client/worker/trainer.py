"""Runs one round on a device: checks, trains, clips, adds noise once, encodes, and commits before anything is sent.

The simulator's fast engine runs the same classes, with a seeded `Randomness` instead of the one of the field.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hushfleet.at_need import at_need
from hushfleet.data.samples import LabelledSamples, Samples
from hushfleet.durations import Period
from hushfleet.edge_client.storage.round_commit import OutboxEntry, RoundCommit
from hushfleet.edge_client.worker.allowed import AllowedRound, Party
from hushfleet.edge_client.worker.randomness import Randomness
from hushfleet.errors import BadInput, LedgerError, Malformed, PrivacyError, StoreError
from hushfleet.learning.batch import GradientFunction
from hushfleet.learning.draws import Inputs
from hushfleet.learning.evaluation import LogitsOf
from hushfleet.learning.optim import make_optimizer
from hushfleet.learning.own_samples import LoadedSamples, OwnSamples
from hushfleet.methods.local_round import LocalRound, MakeOptimizer, Trained
from hushfleet.methods.privatize import NoisedUpdate, Release, clip_and_noise
from hushfleet.methods.state import DeviceState, RoundContext
from hushfleet.privacy.clipping import layer_norms
from hushfleet.privacy.noise import NoiseSource
from hushfleet.wire.format.codecs import codec_of, steps_for
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader
from hushfleet.wire.format.update_values import EncodeUpdate, encode_masked, encode_update

if TYPE_CHECKING:
    from hushfleet.edge_client.board import local_data
    from hushfleet.learning import carry_over
    from hushfleet.methods import answer
    from hushfleet.secure import prime_field
    from hushfleet.secure.membership_list import MembershipList
else:
    local_data = at_need("hushfleet.edge_client.board.local_data")
    carry_over = at_need("hushfleet.learning.carry_over")
    answer = at_need("hushfleet.methods.answer")
    prime_field = at_need("hushfleet.secure.prime_field")

_log = logging.getLogger("hushfleet.edge")


@dataclass(kw_only=True, eq=False)
class Trainer(Party):
    """One task on one device, with all that its training needs.

    :param logits_of: the network's inference, for methods that look at their own data.
    :param samples: reads the device's data; called when they are needed. Raises `BadInput` if there are none and the
        task needs some, or if they do not fit it.
    :param held_out: reads the samples that never train; None if the task holds none out.
    :param left_out: counts the samples that could not be read.
    :param worse: returns whether the personalized head has become worse; None if the owner does not allow to report it.
    :param observer: receives each trained round and its noised update before the commit, for metrics that stay on the
        device.
    :param make_optimizer: creates the optimizer of the local training.
    :param trained: called after each training, before its update is made.
    :param replace_failed_training: whether the device answers like a device without data if training fails on its
        data.
    :param encode: what does not sign is FOR SIMULATION ONLY.
    :param release: what clips and adds the noise in place of `clip_and_noise` is FOR SIMULATION ONLY.
    :param arrived: reads the samples that arrived in a window; None if all arrived in the present one.
    """

    gradient: GradientFunction
    logits_of: LogitsOf
    samples: Callable[[], LabelledSamples]
    randomness: Randomness
    observer: Callable[[DeviceRound, Trained, NoisedUpdate], None] | None = None
    make_optimizer: MakeOptimizer = make_optimizer
    trained: Callable[[], None] = lambda: None
    replace_failed_training: bool = False
    held_out: Callable[[], LabelledSamples] | None = None
    left_out: Callable[[], int] = lambda: 0
    worse: Callable[[], bool | None] = lambda: None
    encode: EncodeUpdate = encode_update
    release: Release = clip_and_noise
    arrived: Callable[[Period], LabelledSamples] | None = None


class DeviceRound(AllowedRound):
    """The round of one plan on one device, which is trained.

    :param membership_list: the membership list that the plan names, if the round has secure aggregation.
    """

    failed: str | None = None
    """What went wrong with the data; this text must not leave the device."""

    def __init__(self, trainer: Trainer, plan: RoundPlan, membership_list: MembershipList | None = None) -> None:
        super().__init__(trainer, plan, membership_list)
        self.trainer = trainer

    def run(self, published: np.ndarray, *, blank: bool = False) -> OutboxEntry:
        """Trains and commits the update; returns the stored update if the round was committed before.

        :param published: the round's model and vectors, float32, read-only, in the form that `TaskMethod.split` takes.
        :param blank: whether it trains as a device without data.
        """
        stored = self.store.outbox(self.plan.task, self.plan.round)
        if stored is not None:
            return stored
        trained = (self._without_data if blank else self._train_or_replace)(published)
        self.trainer.trained()
        return self.commit(trained)

    def _train_or_replace(self, published: np.ndarray) -> Trained:
        """Trains. If training fails on the device's data, continues as without data: a decline would reveal this.

        A failure that also occurs without data is no secret, and is raised.
        """
        try:
            trained = self.answer_question(published) if self.asks else self.train(published)
        except (StoreError, BadInput):  # `BadInput`: the task takes no device without data
            raise
        except Exception as error:
            if not self.trainer.replace_failed_training or not self._is_hidden(published):
                raise
            self.failed = f"round {self.plan.round}: training failed, and noise alone is sent: {error!r}"
            _log.error("%s", self.failed, exc_info=error)
        else:
            if trained.failures:
                reasons = "; ".join(trained.failures)
                self.failed = f"round {self.plan.round}: training left some of the data out: {reasons}"
                _log.error("%s", self.failed)
            return trained
        return self._without_data(published)

    def _without_data(self, published: np.ndarray) -> Trained:
        """Trains, or answers, as a device without data does: what is sent is noise alone."""
        if self.asks:
            return self._as_update(np.zeros(self.spec.model.layout.size, np.float32))
        model, by_record = self.spec.model, self.method.by_record
        count = 0 if by_record else self.method.config.batch_size
        blank = local_data.zero_samples(model, model.targets.blank(count, len(model.class_names)))
        trained = self.train(published, blank)
        return trained if by_record else trained.without_training()  # with the unit `record`, training adds the noise

    def _is_hidden(self, published: np.ndarray) -> bool:
        """Returns whether noise hides what the round sends, and the published model is finite."""
        return self.is_hidden and bool(np.isfinite(published).all())

    def begun(self, published: np.ndarray, samples: OwnSamples) -> LocalRound:
        """Returns the local round, which starts from the kept state; raises the same errors as `charge`."""
        _ = self.charge  # refuses the round
        number = self.spec.training_number(self.plan.round)
        return LocalRound(self.method, self.state(), published, self.terms, samples, number)

    def state(self) -> DeviceState:
        """Returns the state that the device starts the round with: the state after its last round, or a newcomer's.

        In a new window of data, everything that earlier samples have left without noise is dropped: nothing that is
        sent from now on may depend on these samples.
        """
        kept, fresh = self.store.load_state(self.plan.task), self.trainer.method.init_state()
        if kept is None:
            return self._newcomer(fresh)
        if self.window is None:
            return kept
        if self.store.ledger.totals(self.plan.task).window == self.window:
            return kept
        return DeviceState(kept.public, private=fresh.private)

    def _newcomer(self, state: DeviceState) -> DeviceState:
        """Returns a newcomer's state: if the task continues an earlier one, it keeps its own parts of the model.

        It starts without them if its messages could then depend on earlier samples without noise: with windows of data;
        and with the unit `record`, if gradients depend on own parts, which the earlier task may have trained
        without noise.
        """
        earlier, model, method = self.spec.continues, self.spec.model, self.trainer.method
        afresh = self.window is not None or (method.by_record and not method.personalized_model_has_no_noise)
        before = None if earlier is None or afresh else self.store.load_state(earlier.task)
        if earlier is None or before is None or before.own is None:
            return state
        softmax, layout = model.targets.loss == "cross-entropy", model.layout
        names, to_names = (
            carry_over.output_names(each, layout, are_inputs=model.targets.are_inputs)
            for each in (earlier.class_names, model.class_names)
        )
        try:
            own = carry_over.carry_over(before.own, names, layout=layout, to_names=to_names, softmax=softmax)
        except BadInput:  # another network: its own parts start like everyone's
            return state
        return replace(state, own=own)

    def samples(self) -> LabelledSamples:
        """Returns the device's samples that the round trains on."""
        if self.window is None or self.trainer.arrived is None:
            return self.trainer.samples()
        return self.trainer.arrived(self.window)

    def answer_question(self, published: np.ndarray) -> Trained:
        """Returns the answer to the round's question, as an update of a model that is zero; nothing is stored."""
        _ = self.charge  # refuses the round
        trainer, question = self.trainer, self.spec.question
        assert question is not None
        if question.kind == "drift":
            return self._as_update(answer.drift_answer(trainer.worse()))
        samples = trainer.samples()
        if question.kind != "evaluation":
            assert isinstance(samples, Samples)
            return self._as_update(
                answer.statistic_answer(question, samples, self.spec.model.class_names, trainer.left_out())
            )
        assert trainer.held_out is not None
        params, _ = trainer.method.split(published)
        return self._as_update(answer.evaluation_answer(trainer.spec, params, samples, trainer.held_out()))

    def _as_update(self, answer: np.ndarray) -> Trained:
        """Returns an answer, float32 `[k]`, as the update of a model that is zero."""
        begin = np.zeros_like(answer)
        context = RoundContext(self.method.setting(self.terms), self.method.init_state(), begin, begin)
        return Trained(context, answer, answer, 0.0)

    def train(self, published: np.ndarray, samples: LabelledSamples | None = None) -> Trained:
        """Runs only the local training; nothing is stored, and nothing may leave the device.

        :param samples: samples to use instead of the device's own.
        """
        own = self.samples() if samples is None else samples
        loaded = LoadedSamples(own, self.trainer.gradient, self.trainer.logits_of, by_record=self.method.by_record)
        return self.begun(published, loaded).train(
            inputs=Inputs(self.spec.model.dropout, self.spec.augment),
            rng=self.trainer.randomness.order(self.plan.round),
            noise=self.trainer.randomness.noise(self.plan.round) if self.method.by_record else None,
            make_optimizer=self.trainer.make_optimizer,
        )

    def commit(self, trained: Trained) -> OutboxEntry:
        """Clips, noises, encodes and stores the update of a trained round, once.

        If an update cannot be released, a zero update is sent instead, noised and charged like any other: an aggregator
        could choose models with which training diverges on some data, and a decline would reveal on which.
        """
        try:
            return self._commit(trained)
        except (PrivacyError, Malformed) as error:
            if isinstance(error, LedgerError) or not self._is_hidden(trained.context.global_params):
                raise
            self.failed = f"round {self.plan.round}: noise alone is sent: {error}"
            _log.warning("%s", self.failed)
        return self._commit(trained.without_training())

    def _commit(self, trained: Trained) -> OutboxEntry:
        plan, method, layout = self.plan, self.method, self.spec.model.layout
        state, update = trained.context.state, trained.update
        held = self.state() if self.asks else state
        # With the unit `record`, the gradients have used this stream, and nothing more is drawn from it.
        noise = self.trainer.randomness.noise(plan.round)
        noised = method.privatize(trained.context, update, noise, self.trainer.release)
        shared = state.public.shared
        everything = not state.public.keeps_any  # then nothing is copied: a board's memory is small
        values, residual = noised.values if everything else noised.values[shared], None
        counts = state.public.counts(layout)
        header = self.header(noised, held, counts)
        if self.spec.privacy.secure is not None:
            data, seen = self._masked(header, values, noise), np.zeros_like(values)
        else:
            if codec_of(self.spec.wire.codec).carries_error:
                residual = self.store.load_residual(plan.task, size=layout.size)
                values = values + residual[shared]
            data, seen = self.trainer.encode(header, values, counts=counts, identity=self.store.identity)
        sent = seen
        if not everything:
            sent = np.zeros_like(update)
            sent[shared] = seen
        if residual is not None:
            residual[shared] = values - seen
        if self.asks and codec_of(self.trainer.spec.wire.codec).carries_error:  # training's residual does not change
            residual = self.store.load_residual(plan.task, size=self.trainer.spec.model.layout.size)
        commit = RoundCommit(
            task=plan.task,
            round=plan.round,
            charge=noised.charge,
            state=held if self.asks else method.advance(trained.context, update=update, trained=trained.own, sent=sent),
            update=data,
            public_before=held.public.to_bytes(),
            residual=residual,
            context=None if plan.secure is None else self.secure.context,
            package=self.trainer.package,
            at=self.trainer.now(),
            window=self.window,
        )
        if self.trainer.observer is not None and not self.asks:  # before the commit: after a crash it measures again
            self.trainer.observer(self, trained, noised)
        return self.store.commit_round(commit)

    def _masked(self, header: UpdateHeader, values: np.ndarray, noise: NoiseSource) -> bytes:
        """Returns the blob of an update for secure aggregation: masked integers with this device's part of the noise.

        :param values: clipped, float32 `[k]`. Nobody sees them, not even the aggregator.
        """
        secure_round, cost = self.secure, self.method.cost(self.terms)
        ring = secure_round.ring(cost.bound, cost.noise_multiplier, cost.records)
        masked = secure_round.masked(self.mask_keys, ring.encode(values, noise))
        integers = np.concatenate((masked.values, masked.corrections.reshape(-1)))
        data = prime_field.to_bytes(integers, secure_round.spec.bits)
        return encode_masked(header, data, identity=self.store.identity)

    def header(self, noised: NoisedUpdate, state: DeviceState, counts: Sequence[int]) -> UpdateHeader:
        """Returns the header of the round's update.

        :param counts: how many values of each layer are sent.
        """
        privacy, ledger, task = self.spec.privacy, self.store.ledger, self.plan.task
        return UpdateHeader(
            task=task,
            round=self.plan.round,
            device=self.trainer.device,
            codec=self.spec.wire.codec,
            value_count=sum(counts),
            steps=self._steps(noised, counts),
            noise_stds=tuple(noised.noise_stds),
            clip_norms=tuple(noised.clip_norms),
            public_digest=state.public.digest(),
            rounds_charged=ledger.rounds_charged(task) + 1,
            epsilon_server=ledger.epsilon_server(
                delta=privacy.delta, task=task, extra=noised.charge, accountant=privacy.accountant
            ),
            multiplier_server=noised.charge.noise_multiplier,
            noise_split=noised.charge.noise_split,
            report=noised.report,
        )

    def _steps(self, noised: NoisedUpdate, counts: Sequence[int]) -> tuple[float, ...]:
        stds = [float(std) for std in noised.noise_stds]
        rms: list[float] = []
        if not any(stds):  # the steps depend on the values
            norms = layer_norms(noised.values, self.spec.model.layout)
            rms = [float(norm) / max(count, 1) ** 0.5 for norm, count in zip(norms, counts, strict=True)]
        return steps_for(self.spec.wire, noise_stds=stds, layer_rms=rms)
