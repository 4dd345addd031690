"""Handles the open round on a device: decides, trains, and sends its update until it is acknowledged.

It handles one plan at a time. A plan is settled when there is nothing left to decide: the update is being sent or is
acknowledged, the round was declined, or this device is not in the cohort. In a round with a secure sum, the phase
`unmask` follows the updates; in it only the members of the committee send an answer, in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.constant_time import ANSWER_S, AnnouncedTraining
from hushfleet.edge_client.board.new_samples import NewSamples
from hushfleet.edge_client.board.pacing import Pacer
from hushfleet.edge_client.board.waiting import Kind
from hushfleet.edge_client.declines import Declined, DeclineReason, GivenUp, decline_reason
from hushfleet.edge_client.net.download import BlobSource, GlobalModel, RosterSource
from hushfleet.edge_client.net.store_check import StoreCheck
from hushfleet.edge_client.net.upload import Upload
from hushfleet.edge_client.own_head import OwnHeads, rounds_in
from hushfleet.edge_client.own_model import blobs_of_models, is_shared_whole
from hushfleet.edge_client.runtime import TaskRuntime
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.kept import KeptModel
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.tasks import MAX_ATTEMPTS, TaskHandler
from hushfleet.edge_client.trainer import DeviceRound
from hushfleet.errors import BadInput, CopiedStore, HushfleetError, Malformed, StoreError, WireError
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import Ack, Decline, Message, Missing, Refused, RoundPlan

MOST_RESENDS = 20
"""How many times an update's chunks are sent again in one process: enough for a link that loses 19 of 20."""

RETRY_S = 3600.0  # after a declined buffered round, which may stay open until this device's update arrives
_TRANSIENT = ("state-unknown", "store-full")
_IN_PROGRESS = ("open", "unmask")

_log = logging.getLogger("hushfleet.edge")


class Superseded(GivenUp):
    """Training was given up: its result could not be used any more."""


class Stopped(GivenUp):
    """Training was given up because the client is asked to stop."""


class RoundHandler:
    """Handles the plan that the aggregator announced last.

    :param store_check: checks whether the store is the newest one of its device.
    :param training: announces each training's beginning and end.
    :param between_batches: called with the plan before each batch; may raise `Superseded` or `Stopped`.
    :param clock: monotonic seconds.
    :param pacer: makes training as slow as on a simulated board.
    :param listens: as `BudgetClock.listens`.
    """

    def __init__(
        self,
        config: DeviceConfig,
        store: DeviceStore,
        blobs: BlobSource,
        tasks: TaskHandler,
        store_check: StoreCheck,
        *,
        training: AnnouncedTraining,
        between_batches: Callable[[RoundPlan], None],
        clock: Callable[[], float],
        pacer: Pacer,
        listens: Callable[[], bool],
    ) -> None:
        self._device = config.device.id
        self._memory_mib = config.memory_mib
        self._store, self._blobs = store, blobs
        self._model = GlobalModel(store, blobs)
        self._own_heads = None if config.simulation else OwnHeads(store, self._model)
        self._rosters = RosterSource(store, blobs, federation=config.device.federation, operator=config.roster_key)
        self._tasks, self._store_check = tasks, store_check
        self._new_samples = NewSamples.of(config.store_path.parent, tell=config.limits.tell_new)
        self._training = training
        self._between_batches = between_batches
        self._clock, self._pacer = clock, pacer
        self._listens = listens if config.limits.budget.limits_periods else lambda: False
        self.plan: RoundPlan | None = None
        self.deadline = 0.0
        self.upload: Upload | None = None
        self.decline: Decline | None = None
        self.decline_due = False
        self._retry_at = 0.0  # when the round is considered again after `decline`
        self._round: DeviceRound | None = None  # the round of `plan`
        self._settled = True
        self._sent: bytes | None = None  # SHA-256 of what was sent last
        self._sent_for = 0  # the latest round for which that was sent
        self._resent_chunks = 0  # chunks of that which were sent again since then

    @property
    def finished(self) -> bool:
        """True if the announced task has ended, and nothing is left to send."""
        plan = self.plan
        return plan is not None and plan.phase == "finished" and plan.task == self._tasks.name and self.upload is None

    @property
    def waits_for(self) -> tuple[Kind, str]:
        """Kind and words of the event that comes next, while the aggregator is there and knows the device."""
        plan, upload = self.plan, self.upload
        if upload is not None:
            return "nothing", f"round {upload.entry.round}: sending the update"
        if self._blobs.fetch is not None:
            return "nothing", "fetching the task or its model"
        if plan is None or plan.phase == "finished":
            return "round", "a round"
        return "round", f"round {plan.round + (plan.phase == 'closed')} of {plan.rounds} of {plan.task}"

    def resume(self) -> None:
        """Sends again what may have been lost, after the link or the aggregator came back."""
        if self.upload is not None:
            self.upload.offer_again()
        self.decline_due = self.decline is not None

    # incoming messages

    def on_new_task(self) -> None:
        """Considers the plan again, because another task was announced and the plan may belong to it."""
        self.upload, self._round = None, None
        self._reconsider()

    def on_plan(self, plan: Message) -> None:
        """Takes a plan. Raises `Malformed` for a message of another kind."""
        if not isinstance(plan, RoundPlan):
            raise Malformed(f"expected a round plan, got a {type(plan).__name__}")
        before, self.plan = self.plan, plan
        same = before if before is not None and same_round(before, plan) else None
        if self._tasks.runtime is not None and (same is None or plan.differences != same.differences):
            # parts of the global model of a round that is over, or that a restarted aggregator has lost
            self._blobs.drop()
        unchanged = ("phase", "deadline_s", "secure")
        if same is not None and all(getattr(plan, name) == getattr(same, name) for name in unchanged):
            # The same plan again: the aggregator was away, and may not know what was answered. If the broker was
            # restarted, an offer that was sent before the aggregator had subscribed is lost.
            self.resume()
            if self.decline is None and self.upload is None:
                self._settled = plan.phase not in _IN_PROGRESS
            if self._clock() > self.deadline:  # the round is still open: it rested, or the aggregator was away
                self.deadline = self._clock() + plan.deadline_s
            return
        if plan.phase == "closed":
            _log.info("no round is open; %d of %d are done", plan.round, plan.rounds)
        else:
            _log.info("round %d of %d: %s", plan.round, plan.rounds, plan.phase)
        if same is None:
            self._store_check.round_begins(self._clock())
        self.deadline = self._clock() + plan.deadline_s
        goes_on = same is not None and (plan.phase, plan.secure) == (same.phase, same.secure)
        if self.upload is not None and not (goes_on and plan.phase in _IN_PROGRESS) and not self._waits(plan):
            _log.warning("round %d went on before what was being sent was acknowledged", self.upload.entry.round)
            self.upload = None
        self._reconsider()

    def _waits(self, plan: RoundPlan) -> bool:
        """Returns whether the update that is being sent also belongs to a later buffered round."""
        upload, buffered = self.upload, plan.max_staleness > 0 and plan.phase != "finished"
        return upload is not None and buffered and plan.takes(upload.entry.task, upload.entry.round)

    def on_answer(self, answer: Message) -> None:
        """Handles an answer to an update; ignores one about another update. Raises `Malformed` for other messages."""
        if not isinstance(answer, (Ack, Missing, Refused)):
            raise Malformed(f"expected an answer to an update, got a {type(answer).__name__}")
        upload = self.upload or self._revived(answer)
        if upload is None or not upload.concerns(answer.task, answer.round, answer.digest):
            return
        now = self._clock()
        if isinstance(answer, Ack):
            self._conclude(upload.entry, "acked")
        elif isinstance(answer, Missing):
            # a recorded answer that somebody publishes endlessly must not use up a metered link
            if answer.digest == upload.offer.digest and self._resent_chunks < MOST_RESENDS * upload.chunks:
                upload.resend(answer, now)
                self._resent_chunks += upload.queued
                self.upload = upload
        elif upload.entry.status == "acked" and answer.code not in _TRANSIENT:
            _log.warning("round %d: acknowledged, so a refusal (%s) is ignored", answer.round, answer.code)
        elif answer.code == "state-unknown" and isinstance(upload.entry, OutboxEntry) and not upload.with_public:
            self.upload = self._noted(replace(upload, with_public=True, push=not upload.entry.attached_digest, now=now))
        elif answer.code == "store-full":
            _log.warning("the aggregator has no room for the update; it is offered again later")
            upload.wait_longer(now)
            self.upload = upload
        else:
            _log.warning("round %d: refused (%s): %s", answer.round, answer.code, answer.reason)
            self._conclude(upload.entry, f"refused:{answer.code}")
            if answer.code == "duplicate":  # it is unclear which update the aggregator means
                self._store_check.ask_again(now, doubt=True)

    def _revived(self, answer: Ack | Missing | Refused) -> Upload | None:
        """Returns the upload that an answer is about, if it is not being sent: the aggregator may have lost it."""
        plan, task = self.plan, self._tasks.runtime
        if plan is None or task is None or plan.phase not in _IN_PROGRESS or not same_round(plan, answer):
            return None
        stored = self._store.outbox if plan.phase == "open" else self._store.answers.of
        entry = stored(plan.task, plan.round)
        if entry is None or not entry.data or entry.status.startswith("refused"):
            return None
        return self._make_upload(plan, task, entry, push=False)

    def _conclude(self, entry: OutboxEntry | AnswerEntry, status: str) -> None:
        self.upload = None
        if entry.status != status:
            is_update = isinstance(entry, OutboxEntry)
            _log.info("round %d: the %s is %s", entry.round, "update" if is_update else "member's answer", status)
            (self._store if is_update else self._store.answers).set_status(entry.task, entry.round, status)
        if self.plan is not None and not same_round(self.plan, entry):  # a buffered round that was announced meanwhile
            self._reconsider()

    def _reconsider(self) -> None:
        self._tasks.retry_after_full_disk()
        self._settled = self.plan is None or self.plan.phase not in _IN_PROGRESS or self.upload is not None
        self.decline, self.decline_due = None, False

    # actions

    def advance(self) -> None:
        """Does what can be done now for the open round; training happens in here."""
        plan, tasks = self.plan, self._tasks
        if plan is None or plan.task != tasks.name:
            return  # a plan waits until its task is there
        if self._settled:
            if self.decline is not None and plan.max_staleness and self._clock() >= self._retry_at:
                self._round, self._retry_at = None, -1.0  # a `DeviceRound` keeps the time of its first check
                self._reconsider()
            task, heads = tasks.runtime, self._own_heads
            if self.upload is None and heads is not None and task is not None and heads.advance(plan, task):
                self._tidy(plan, task, trained=False)
        elif not plan.names(self._device):
            self._settled = True
        elif tasks.declined is not None:
            self.decline_round(tasks.declined)
        elif tasks.runtime is not None:
            try:
                self._take_part(plan, tasks.runtime)
            except (Stopped, CopiedStore):
                raise
            except Exception as error:
                self.decline_round(decline_reason(error))

    def decline_round(self, reason: DeclineReason) -> None:
        """Declines the open round, unless it is settled already.

        A committee member that cannot or will not answer sends nothing, because enough others answer.
        """
        plan = self.plan
        if plan is None or self._settled:
            return
        _log.warning("round %d (%s) declined (%s): %s", plan.round, plan.phase, *reason)
        self._settled = True
        if plan.phase == "unmask":
            return
        self.decline = Decline(plan.task, plan.round, *reason)
        self._retry_at = self._clock() + RETRY_S
        self.decline_due = True

    def _take_part(self, plan: RoundPlan, task: TaskRuntime) -> None:
        round = self._round_of(plan, task)
        if round is None:
            return
        if plan.max_staleness:
            if (waiting := self._unsent(plan)) is not None:
                self._send(plan, task, waiting)
                return
        elif plan.secure is None:
            held = plan.cohort[self._device]
            if held != task.newcomer_digest and not self._store.has_been(plan.task, held):
                if not self._store_check.may_train():
                    return  # the state may come from an earlier card, until the aggregator knows this one
                self._store_check.stop(
                    f"the plan of round {plan.round} of {plan.task} says that the aggregator holds a state of this "
                    "device that this store has never been in"
                )
        elif plan.phase == "unmask":
            if self._store_check.may_train():
                self._send(plan, task, round.answer())
            return
        entry = self._store.outbox(plan.task, plan.round)
        if entry is None:
            if self._listens():
                return  # it would be declined now, and the fleet's statement of the time comes soon
            self._check(round, task)
            if self._retry_at < 0:  # the aggregator withdrew its note of the charge, and notes it again when asked
                self._store_check.ask_again(self._clock(), doubt=True)
                self._retry_at = 0.0
            params = self._global_params(plan, task)
            entry = None if params is None else self._train(round, task, params)
            if entry is None:
                return
        elif entry.context != (round.secure.context if plan.secure else None):
            raise Declined("error", "this device has committed its update of the round for another sum")
        elif not entry.data and (entry.pending or plan.round < (self._store.last_round(plan.task) or 0)):
            raise Declined("error", "this device has committed another round since, and keeps one update")
        self._send(plan, task, entry)

    def _unsent(self, plan: RoundPlan) -> OutboxEntry | None:
        """Returns the unacknowledged update of an earlier round that a buffered round still accepts, or None."""
        taken = (each for each in self._store.waiting() if plan.takes(*each) and each[1] != plan.round)
        return next((self._store.outbox(*each) for each in taken), None)

    def _round_of(self, plan: RoundPlan, task: TaskRuntime) -> DeviceRound | None:
        """Returns the plan's round; None while its roster is fetched, or if this device is not in its secure sum.

        Raises `Declined` for a cohort that this device must not be in.
        """
        if plan.secure is None:
            if self._round is None or self._round.plan is not plan:
                self._round = DeviceRound(task.trainer, plan)
            return self._round
        try:
            if self._round is None or self._round.plan is not plan:
                roster = self._rosters.need(plan.secure.roster)
                if roster is None:
                    return None
                self._round = DeviceRound(task.trainer, plan, roster)
            key = self._round.secure.key_of(self._device)
        except (WireError, BadInput) as error:
            raise Declined("no-privacy", f"round {plan.round}: {error}") from error
        if key is None:
            self._settled = True
            return None
        if key != self._store.identity.public_key:
            raise Declined("no-privacy", f"the roster of round {plan.round} names another key for this device")
        return self._round

    def _send(self, plan: RoundPlan, task: TaskRuntime, entry: OutboxEntry | AnswerEntry | None) -> None:
        if isinstance(entry, OutboxEntry):
            task.check_stored(entry)
        self._settled = True
        if entry is None or not (entry.pending or (entry.status == "acked" and entry.data)):
            return
        if (is_first := entry.digest != self._sent) or plan.round > self._sent_for:
            self._sent, self._sent_for, self._resent_chunks = entry.digest, plan.round, 0
        # If the plan came again, the aggregator answers which chunks it lacks, or that it has the update.
        self.upload = self._make_upload(plan, task, entry, push=entry.pending and is_first)

    def _check(self, round: DeviceRound, task: TaskRuntime) -> None:
        """Raises an error with a reason to decline if this device cannot or must not take part."""
        plan, spec = round.plan, task.spec
        last = self._store.last_round(plan.task)
        if last is not None and plan.round < last:
            raise Declined("error", f"this device has already committed round {last} of the task")
        if self._store.is_charged(plan.task, plan.round):
            raise Declined("error", "an earlier card of this device may have sent an update for this round")
        if spec.memory_mib > self._memory_mib:
            raise Declined("memory", f"the task needs {spec.memory_mib} MiB, this device gives {self._memory_mib} MiB")
        if plan.rounds != spec.rounds or plan.global_bytes != 4 * task.trainer.method.published_size:
            raise Declined("error", "the plan does not fit the task: its rounds or its model's size differ")
        _ = round.charge  # raises if the owner does not allow it
        if not task.constant_time:  # the time to read the data depends on the number of records
            self._read(round, task)
            if self._new_samples is not None and task.spec.after_new and not round.asks:
                self._new_samples.check(round.samples(), task=plan.task, wanted=task.spec.after_new)

    def _read(self, round: DeviceRound, task: TaskRuntime) -> None:
        """Reads the data before any training. Raises `BadInput` if the task needs data and this device has none."""
        counted = not task.data.has_read  # only for the first read: each count is a write to the card
        if counted and self._store.count_attempt("data", f"{round.plan.task}/{round.plan.round}") > MAX_ATTEMPTS:
            raise Declined("memory", f"reading the data ended the client abruptly {MAX_ATTEMPTS} times")
        try:
            round.samples()
        except (BadInput, StoreError):
            raise
        except Exception as error:  # training fails in the same way, and hides it in its answer
            _log.error("the data cannot be read: %s", error)
        finally:
            if counted:
                self._store.end_attempt("data")

    def _global_params(self, plan: RoundPlan, task: TaskRuntime) -> np.ndarray | None:
        """Returns the model and the method's vectors, float32; None while they are fetched, or training must wait.

        Raises `Declined` for a model that is not finite: nothing could be sent, and the failure may depend on the data.
        """
        model = self._model.need(plan, task.spec)
        if model is None or not self._store_check.may_train():
            return None
        params = np.frombuffer(model, "<f4")
        if not np.isfinite(params).all():
            raise Declined("no-privacy", "the round's model has values that are not finite")
        return params

    def _train(self, round: DeviceRound, task: TaskRuntime, params: np.ndarray) -> OutboxEntry | None:
        """Trains and commits; returns the update, or None if a newer plan came meanwhile."""
        plan = round.plan
        attempts = self._store.count_attempt("round", f"{plan.task}/{plan.round}")
        if attempts > MAX_ATTEMPTS:
            raise Declined("memory", f"training ended the client abruptly {MAX_ATTEMPTS} times")
        if attempts > 1:
            task.use_processor("training ended the client abruptly")  # a power cut, or a fault of the GPU's driver
        asks = task.spec.asks(plan.round)
        seconds = ANSWER_S if asks and task.constant_time else task.nominal_seconds(params)
        nominal_s = None if seconds is None else seconds * self._pacer.slowdown
        if plan.max_staleness:  # a version may be open for days, and its plan may be old
            self.deadline = self._clock() + plan.deadline_s
        announced = self._training(nominal_s=nominal_s, deadline=self.deadline, deadline_s=plan.deadline_s)
        try:
            with announced, ExitStack() as at_the_end:
                at_the_end.callback(self._tidy, plan, task)
                with self._pacer.checked_by(lambda: self._between_batches(plan)):
                    entry = task.run_round(round, params, self._pacer)
        except Superseded as reason:
            _log.info("training for round %d was given up: %s", plan.round, reason)
            if self._clock() > self.deadline:
                raise Declined("busy", "the round's deadline passed before training had ended") from reason
            self._settled = True  # the newer plan is in the backlog
            return None
        done = "answered" if asks else "trained"
        _log.info("round %d: %s and committed, %d bytes to send", plan.round, done, len(entry.data))
        if self._new_samples is not None and task.spec.after_new and not (asks or task.constant_time):
            self._new_samples.note(task=plan.task)
        return entry

    def _tidy(self, plan: RoundPlan, task: TaskRuntime, *, trained: bool = True) -> None:
        """Deletes what is no longer needed. It never fails a committed round: the next round meets the full disk."""
        try:
            if trained:
                self._store.end_attempt("round")
            if task.spec.training_rounds or self._store.task_digest is None:  # a question keeps the present model
                self._store.set_current(task_digest=task.digest, global_digest=plan.global_digest)
                if not task.spec.model.chooses_head:
                    self._keep_model(plan, task)
                needed = task.blobs() | blobs_of_models(self._store) | self._rosters.kept()
                self._store.drop_blobs(keep=needed | {plan.global_digest})
        except HushfleetError as error:
            _log.error("%s", error)

    def _keep_model(self, plan: RoundPlan, task: TaskRuntime) -> None:
        """Stores that the device now predicts with this task's model: its own, or a shared one that is trained."""
        if is_shared_whole(task.spec):
            round = rounds_in(plan)
            if not (round or task.spec.continues):
                return
        elif plan.phase in _IN_PROGRESS:
            round = plan.round
        else:
            return
        self._store.keep_model(KeptModel(plan.task, plan.global_digest, package=task.digest, round=round))
        self._store.note_awaited("")

    def _make_upload(
        self, plan: RoundPlan, task: TaskRuntime, entry: OutboxEntry | AnswerEntry, *, push: bool
    ) -> Upload:
        with_public = False
        if plan.secure is None and isinstance(entry, OutboxEntry):
            before = PublicState.from_bytes(entry.public_before, size=task.spec.model.layout.size)
            # a buffered round's plan does not name the state that the aggregator holds; if it lacks one, it says so
            with_public = not plan.max_staleness and plan.cohort.get(self._device) != before.digest()
        chunk_bytes = task.spec.wire.chunk_bytes
        return self._noted(Upload(entry, self._store.identity, chunk_bytes, with_public, push, self._clock()))

    def _noted(self, upload: Upload) -> Upload:
        """Stores the digest with the attached state before it is sent, so that the store later recognises it."""
        entry, digest = upload.entry, upload.offer.digest
        if upload.with_public and isinstance(entry, OutboxEntry) and entry.attached_digest != digest:
            self._store.note_attached(entry.task, entry.round, digest)
        return upload


def same_round(plan: RoundPlan, other: RoundPlan | OutboxEntry | AnswerEntry | Ack | Missing | Refused) -> bool:
    return (plan.task, plan.round) == (other.task, other.round)
