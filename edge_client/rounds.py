"""Handles the open round on a device: decides, has a worker train, and sends its update until it is acknowledged.

It handles one plan at a time, by the table in `protocol`. In a round with secure aggregation, the phase `unmask`
follows the updates; in it only the members of the committee send an answer, in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.constant_time import ANSWER_S, announced_at
from hushfleet.edge_client.board.notes import Kind
from hushfleet.edge_client.download import BlobSource, DifferenceChain, GlobalModel
from hushfleet.edge_client.optional import membership_lists, new_samples
from hushfleet.edge_client.personalized_head import PersonalizedHeads
from hushfleet.edge_client.protocol import ROUND, Event, RoundState
from hushfleet.edge_client.sending import Sending
from hushfleet.edge_client.storage.answers import AnswerEntry
from hushfleet.edge_client.storage.declines import Declined, DeclineReason, decline_reason
from hushfleet.edge_client.storage.round_commit import OutboxEntry
from hushfleet.edge_client.storage.state_files import TRAINED_SAMPLES
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.store_check import StoreCheck
from hushfleet.edge_client.tasks import TaskHandler
from hushfleet.edge_client.worker.allowed import AllowedRound
from hushfleet.edge_client.worker.handover import Handover
from hushfleet.edge_client.worker.job import Died, Failed, Finished, HeadChosen, HeadJob
from hushfleet.edge_client.worker.personalized_model import tidy
from hushfleet.edge_client.worker.runtime import TaskRuntime
from hushfleet.errors import BadInput, CopiedStore, HushfleetError, Malformed, WireError
from hushfleet.wire.format.messages import IN_PROGRESS, Decline, DeviceStatus, Message, RoundPlan

if TYPE_CHECKING:
    from hushfleet.edge_client.upload import Upload

MAX_ATTEMPTS = 3
"""How many times in a row training may end abruptly: the client for one round, or the worker for one task."""
POLL_S = 0.1  # how soon the end of a worker is noticed

RETRY_S = 3600.0  # after a declined round that waits for whoever comes: perhaps until this device's update arrives

Then = tuple[Event, Any]
"""The next event, and what its action is called with; None: nothing."""

_log = logging.getLogger("hushfleet.edge")


@dataclass(eq=False)
class AnnouncedTraining:
    """A training that is announced.

    :param plan: the plan that it belongs to; later plans may have come since.
    :param nominal_s: the work by which its end is announced; None: as measured for the task.
    :param blank: whether it goes on as without data, because a worker has died.
    :param given_up: whether it was ended for a reason that does not depend on the data.
    :param ends_at: when the end is announced; None while the worker works.
    :param outcome: the committed update, or why the round is declined; None while the worker works.
    """

    plan: RoundPlan
    round: AllowedRound
    task: TaskRuntime
    began: float
    deadline: float
    hides: bool
    nominal_s: float | None
    outcome: OutboxEntry | DeclineReason | None = None
    given_up: bool = False
    blank: bool = False
    ends_at: float | None = None


class RoundHandler:
    """Handles the plan that the aggregator announced last.

    :param store_check: checks whether the store is the newest one of its device.
    :param handover: has rounds trained by a worker.
    :param announce: publishes the device's status.
    :param quiet: called with whether the link rests, because a training's duration is hidden.
    :param clock: monotonic seconds.
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
        handover: Handover,
        announce: Callable[[DeviceStatus], None],
        quiet: Callable[[bool], None],
        clock: Callable[[], float],
        listens: Callable[[], bool],
    ) -> None:
        self._device, self._memory_mib = config.device.id, config.memory_mib
        self._federation, self._operator = config.device.federation, config.roster_key
        self._store, self._blobs, self._tasks, self._store_check = store, blobs, tasks, store_check
        self._model = GlobalModel(store, blobs, add=self._add_differences, added=self._added)
        self._personalized_heads = PersonalizedHeads(store, self._model, unlabelled=config.data.unlabelled is not None)
        self._has_owner = config.simulation is None  # in a simulation the simulator chooses heads
        self._new_samples: new_samples.NewSamples | None = None
        if config.limits.tell_new:
            self._new_samples = new_samples.NewSamples(config.store_path.parent)
        else:  # earlier notes
            with suppress(OSError):
                config.store_path.with_name(TRAINED_SAMPLES).unlink(missing_ok=True)
        self._handover, self._announce, self._quiet, self._clock = handover, announce, quiet, clock
        self._listens = listens if config.limits.budget.limits_periods else lambda: False
        self.sending = Sending(self._device, store, store_check, clock)
        self.state: RoundState = "rest"
        self.plan: RoundPlan | None = None
        self.deadline = 0.0
        self.training: AnnouncedTraining | None = None
        self.decline: Decline | None = None
        self.decline_due = False
        self._retry_at = 0.0  # when the round is considered again after `decline`
        self._round: AllowedRound | None = None  # the round of `plan`

    @property
    def upload(self) -> Upload | None:
        """The update, or the member's answer, that is being sent."""
        return self.sending.upload

    @property
    def finished(self) -> bool:
        """True if the announced task has ended, and nothing is left to send."""
        plan = self.plan
        return plan is not None and plan.phase == "finished" and plan.task == self._tasks.name and self.upload is None

    @property
    def is_quiet(self) -> bool:
        """True while a training runs whose duration is hidden: the link is not read, and nothing is sent."""
        return self.training is not None and self.training.hides

    def rests_s(self, longest_s: float) -> float:
        """Returns how long the client may sleep before it looks at its worker, or at the end of a slot."""
        if self.state in ("train", "head") or self._model.is_adding:
            return min(longest_s, POLL_S)
        if self.training is not None and self.training.ends_at is not None:
            return max(0.0, min(longest_s, self.training.ends_at - self._clock()))
        return longest_s

    @property
    def waits_for(self) -> tuple[Kind, str]:
        """Kind and words of the event that comes next, while the aggregator is there and knows the device."""
        plan, upload = self.plan, self.upload
        if self.training is not None:
            return "nothing", f"round {self.training.plan.round}: training"
        if upload is not None:
            return "nothing", f"round {upload.entry.round}: sending the update"
        if self._blobs.is_fetching:
            return "nothing", "fetching the task or its model"
        if plan is None or plan.phase == "finished":
            return "round", "a round"
        return "round", f"round {plan.round + (plan.phase == 'closed')} of {plan.rounds} of {plan.task}"

    @cached_property
    def _membership_lists(self) -> membership_lists.MembershipListSource:
        make, of = membership_lists.MembershipListSource, self._federation
        return make(self._store, self._blobs, federation=of, operator=self._operator)

    # events

    def take(self, event: Event, about: Any = None) -> None:
        """Takes an event, and those that follow from it. Raises `CopiedStore`.

        :param about: what the action is called with; None: nothing.
        """
        then: Then | None = (event, about)
        while then is not None and (row := ROUND.find(self.state, then[0])) is not None:
            try:
                then = getattr(self, f"_{row.action}")(*(() if then[1] is None else (then[1],))) if row.action else None
            except CopiedStore:
                raise
            except Exception as error:
                then = "decline", decline_reason(error)
            else:
                self.state = cast(RoundState, row.then)

    def advance(self) -> None:
        """Does what can be done now for the open round."""
        self._handover.rest(at_once=self.finished)
        if not self._blobs.is_fetching or self.training is not None:
            self.take("look")

    def stop(self) -> None:
        """Gives up what a worker does, because the client stops; what is committed is sent after the next start."""
        self.take("stop")
        self._handover.give_up()

    def on_new_task(self) -> None:
        """Considers the plan again, because another task was announced and the plan may belong to it."""
        self._round = None
        self.take("task")
        self._handover.rest(at_once=True)

    def on_plan(self, plan: Message) -> None:
        """Takes a plan. Raises `Malformed` for a message of another kind."""
        if not isinstance(plan, RoundPlan):
            raise Malformed(f"expected a round plan, got a {type(plan).__name__}")
        before, self.plan = self.plan, plan
        same = before if before is not None and plan.is_of(before.task, before.round) else None
        if self._tasks.runtime is not None and (same is None or plan.differences != same.differences):
            # parts of the global model of a round that is over, or that a restarted aggregator has lost
            self._blobs.drop()
        unchanged = ("phase", "deadline_s", "secure")
        if same is not None and all(getattr(plan, name) == getattr(same, name) for name in unchanged):
            # The same plan again: the aggregator was away, and may not know what was answered. If the broker was
            # restarted, an offer that was sent before the aggregator had subscribed is lost.
            if self._clock() > self.deadline:  # the round is still open: it rested, or the aggregator was away
                self.deadline = self._clock() + plan.deadline_s
            self.take("again")
            return
        if plan.phase == "closed":
            _log.info("no round is open; %d of %d are done", plan.round, plan.rounds)
        else:
            _log.info("round %d of %d: %s", plan.round, plan.rounds, plan.phase)
        if same is None:
            self._store_check.round_begins(self._clock())
        self.deadline = self._clock() + plan.deadline_s
        self._tasks.retry_after_full_disk()
        fits = self._fits(plan, same)
        self.take("fits" if fits else "opens" if plan.phase in IN_PROGRESS else "ends")

    def _fits(self, plan: RoundPlan, same: RoundPlan | None) -> bool:
        """Returns whether what is trained or sent also belongs to this plan.

        :param same: the plan before, if it is of the same round.
        """
        if self.training is None:
            return self.sending.fits(plan, same)
        trained = self.training.plan
        if plan.is_of(trained.task, trained.round):
            self.training.deadline = self.deadline
        return plan.waits_for(trained.task, trained.round)

    def on_answer(self, answer: Message) -> None:
        """Handles an answer to an update; ignores one about another update. Raises `Malformed` for other messages."""
        if (then := self.sending.answered(answer, self.plan, self._tasks.runtime)) is not None:
            self.take(*then)

    # actions: the open round

    def _consider(self) -> Then | None:
        plan, tasks = self.plan, self._tasks
        if plan is None or plan.task != tasks.name:
            return None  # a plan waits until its task is there
        if plan.phase not in IN_PROGRESS or not plan.names(self._device):
            return "skip", None
        if tasks.declined is not None:
            raise Declined(*tasks.declined)
        return None if tasks.runtime is None else self._take_part(plan, tasks.runtime)

    def _take_part(self, plan: RoundPlan, task: TaskRuntime) -> Then | None:
        round = self._round_of(plan, task)
        if round is None:
            return None
        if plan.secure is not None and round.secure.key_of(self._device) is None:
            return "skip", None
        if (waiting := self._unsent(plan)) is not None:
            return self._ready(task, waiting)
        if plan.phase == "unmask":
            return self._ready(task, round.answer()) if self._store_check.may_train() else None
        held = plan.cohort.get(self._device, task.newcomer_digest)
        if held != task.newcomer_digest and not self._store.has_been(plan.task, held):
            if not self._store_check.may_train():
                return None  # the state may come from an earlier card, until the aggregator knows this one
            self._store_check.stop(
                f"the plan of round {plan.round} of {plan.task} says that the aggregator holds a state of this "
                "device that this store has never been in"
            )
        entry = self._store.outbox(plan.task, plan.round)
        if entry is None:
            return self._would_train(plan, task, round)
        if entry.context != (round.secure.context if plan.secure else None):
            raise Declined("error", "this device has committed its update of the round for another sum")
        if not entry.data and (entry.pending or plan.round < (self._store.last_round(plan.task) or 0)):
            raise Declined("error", "this device has committed another round since, and keeps one update")
        return self._ready(task, entry)

    def _unsent(self, plan: RoundPlan) -> OutboxEntry | None:
        """Returns the unacknowledged update of an earlier round that the open one still accepts, or None."""
        taken = (each for each in self._store.waiting() if plan.takes(*each) and each[1] != plan.round)
        return next((self._store.outbox(*each) for each in taken), None)

    def _round_of(self, plan: RoundPlan, task: TaskRuntime) -> AllowedRound | None:
        """Returns the plan's round; None while its membership list is fetched.

        Raises `Declined` for a cohort that this device must not be in.
        """
        if self._round is not None and self._round.plan is plan:
            return self._round
        if plan.secure is None:
            self._round = AllowedRound(task.party, plan)
            return self._round
        try:
            membership_list = self._membership_lists.need(plan.secure.roster)
            if membership_list is None:
                return None
            self._round = AllowedRound(task.party, plan, membership_list)
            key = self._round.secure.key_of(self._device)
        except (WireError, BadInput) as error:
            raise Declined("no-privacy", f"round {plan.round}: {error}") from error
        if key not in (None, self._store.identity.public_key):
            self._round = None
            raise Declined("no-privacy", f"the membership list of round {plan.round} names another key for this device")
        return self._round

    def _ready(self, task: TaskRuntime, entry: OutboxEntry | AnswerEntry | None) -> Then:
        """Returns whether a stored update or answer is to be sent. Raises `Declined` if its owner forbids it now."""
        if isinstance(entry, OutboxEntry):
            task.check_stored(entry)
        if entry is None or not (entry.pending or (entry.status == "acked" and entry.data)):
            return "skip", None
        return "ready", entry

    def _would_train(self, plan: RoundPlan, task: TaskRuntime, round: AllowedRound) -> Then | None:
        """Returns that training begins; None while something is missing. Raises an error with a reason to decline."""
        if self._listens():
            return None  # it would be declined now, and the fleet's statement of the time comes soon
        self._check(round, task)
        if self._retry_at < 0:  # the aggregator withdrew its note of the charge, and notes it again when asked
            self._store_check.ask_again(self._clock(), doubt=True)
            self._retry_at = 0.0
        model = self._model.need(plan, task.spec)
        return None if model is None or not self._store_check.may_train() else ("begin", model)

    def _check(self, round: AllowedRound, task: TaskRuntime) -> None:
        """Raises an error with a reason to decline if this device cannot or must not take part."""
        plan, spec = round.plan, task.spec
        last = self._store.last_round(plan.task)
        if last is not None and plan.round < last:
            raise Declined("error", f"this device has already committed round {last} of the task")
        if self._store.is_charged(plan.task, plan.round):
            raise Declined("error", "an earlier card of this device may have sent an update for this round")
        if spec.memory_mib > self._memory_mib:
            raise Declined("memory", f"the task needs {spec.memory_mib} MiB, this device gives {self._memory_mib} MiB")
        if plan.rounds != spec.rounds or plan.global_bytes != 4 * task.party.method.published_size:
            raise Declined("error", "the plan does not fit the task: its rounds or its model's size differ")
        _ = round.charge  # raises if the owner does not allow it

    def _decline(self, reason: DeclineReason) -> None:
        """Declines the open round.

        A committee member that cannot or will not answer sends nothing, because enough others answer.
        """
        plan = self.plan
        assert plan is not None
        _log.warning("round %d (%s) declined (%s): %s", plan.round, plan.phase, *reason)
        self._retry_at = self._clock() + RETRY_S
        self.decline = None if plan.phase == "unmask" else Decline(plan.task, plan.round, *reason)
        self._say_again()

    def _say_again(self) -> None:
        self.decline_due = self.decline is not None

    def _forget_decline(self) -> None:
        self.decline, self.decline_due = None, False

    def _retry(self) -> Then | None:
        """Considers a declined round again after a time, if it may stay open until this device takes part."""
        plan = self.plan
        if plan is None or not plan.max_staleness or self._clock() < self._retry_at:
            return None
        self._round, self._retry_at = None, -1.0  # an `AllowedRound` keeps the time of its first check
        self._tasks.retry_after_full_disk()
        return "opens", None

    # actions: training

    def _add_differences(self, chain: DifferenceChain) -> bytes | None:
        assert self._tasks.runtime is not None
        return self._handover.add_differences(self._tasks.runtime, chain)

    def _added(self) -> bytes | None:
        assert self._tasks.runtime is not None
        return self._handover.added(self._tasks.runtime)

    def _begin_training(self, model: bytes) -> Then:
        (plan, task), round = self._open, self._round
        assert round is not None
        attempts = self._store.count_attempt("round", f"{plan.task}/{plan.round}")
        if attempts > MAX_ATTEMPTS:
            raise Declined("memory", f"training ended the client abruptly {MAX_ATTEMPTS} times")
        if plan.max_staleness:  # a version may be open for days, and its plan may be old
            self.deadline = self._clock() + plan.deadline_s
        nominal_s = ANSWER_S if round.asks and task.constant_time else task.nominal_s
        training = AnnouncedTraining(plan, round, task, self._clock(), self.deadline, task.constant_time, nominal_s)
        known = self._new_samples.known if self._new_samples is not None and task.spec.after_new else None
        self.training = training
        self._announce("training")
        if training.hides:
            self._quiet(True)
        try:
            self._handover.begin_round(task, round, model, nominal_s=nominal_s, known=known, again=attempts > 1)
        except BaseException:
            self._end_slot()
            raise
        return "look", None

    def _poll(self) -> Then | None:
        """Looks at the worker."""
        outcome = self._handover.poll(self._tasks.runtime)
        if isinstance(outcome, Finished | HeadChosen):
            return "finished", outcome
        if isinstance(outcome, Failed):
            return "failed", outcome
        if isinstance(outcome, Died):
            training = self.training
            # A decline would reveal that the data are the cause; one that also comes without data reveals nothing.
            is_hidden = training is not None and not training.blank and training.round.is_hidden
            return "retry" if is_hidden else "died", outcome
        is_late = self.training is not None and self._clock() > self.training.deadline
        return ("late", None) if is_late else None

    def _commit(self, done: Finished | HeadChosen) -> Then | None:
        """Stores the charge, the update and the state of a trained round; nothing was spent before."""
        training = self._training_now
        task, plan = training.task, training.plan
        try:
            training.outcome = entry = self._handover.commit(done, training.round, task)
            word = "answered" if training.round.asks else "trained"
            _log.info("round %d: %s and committed, %d bytes to send", plan.round, word, len(entry.data))
            task.deaths = 0
            if self._new_samples is not None and isinstance(done, Finished) and done.samples:
                self._new_samples.note(done.samples, task=plan.task)
        except Exception as error:
            training.outcome = decline_reason(error)
        return self._has_ended(training)

    def _failed(self, failed: Failed) -> Then | None:
        training = self._training_now
        training.outcome = DeclineReason(failed.code, failed.reason)
        if failed.of_task:
            self._tasks.stop(training.outcome)
        return self._has_ended(training)

    def _died(self, died: Died) -> Then | None:
        training = self._training_now
        _log.error("round %d: the worker %s", training.plan.round, died.why)
        self._handover.died(died)
        return self._in_vain(training, DeclineReason("memory", f"the training process {died.why}"))

    def _train_without_data(self, died: Died) -> None:
        """Trains as a device without data, after a worker that has died, perhaps because of them."""
        training = self._training_now
        _log.error("round %d: the worker %s, and noise alone is sent", training.plan.round, died.why)
        training.blank = True
        self._handover.died(died)
        model = self._model.need(training.plan, training.task.spec)
        assert model is not None
        self._handover.begin_round(
            training.task, training.round, model, nominal_s=training.nominal_s, known=None, again=True, blank=True
        )

    def _too_late(self) -> Then | None:
        training = self._training_now
        self._handover.give_up()
        training.given_up = True  # at the deadline, which reveals nothing
        return self._in_vain(training, DeclineReason("busy", "the round's deadline passed before training had ended"))

    def _in_vain(self, training: AnnouncedTraining, why: DeclineReason) -> Then | None:
        """Counts a training that had no outcome; after several in a row, each round of the task is declined."""
        training.task.deaths += 1
        training.outcome = why
        if training.task.deaths >= MAX_ATTEMPTS:
            self._tasks.stop(DeclineReason(why.code, f"{why.reason}, {MAX_ATTEMPTS} times in a row"))
        return self._has_ended(training)

    def _give_up(self) -> None:
        """Ends a training whose result could not be used any more."""
        _log.info("training for round %d was given up", self._training_now.plan.round)
        self._handover.give_up()
        self._end_attempt()
        self._end_slot()

    @property
    def _open(self) -> tuple[RoundPlan, TaskRuntime]:
        """The plan and its task, which are there at every action that works for them."""
        assert self.plan is not None
        assert self._tasks.runtime is not None
        return self.plan, self._tasks.runtime

    @property
    def _training_now(self) -> AnnouncedTraining:
        assert self.training is not None
        return self.training

    def _has_ended(self, training: AnnouncedTraining) -> Then | None:
        """Determines when the end is announced: at once, or at the end of a slot that the data do not determine."""
        self._end_attempt()
        self._tidy(training.plan, training.task)
        # A worker that ends before it has measured the nominal time has not looked at the data.
        nominal_s = training.task.nominal_s if training.nominal_s is None else training.nominal_s
        training.ends_at = now = self._clock()
        if training.hides and nominal_s is not None and not training.given_up:
            training.ends_at = announced_at(
                began=training.began,
                ended=now,
                nominal_s=nominal_s,
                deadline=training.deadline,
                deadline_s=training.plan.deadline_s,
            )
        return self._wait_for_slot()

    def _wait_for_slot(self) -> Then | None:
        ends_at = self._training_now.ends_at
        return ("over", None) if ends_at is None or self._clock() >= ends_at else None

    def _end_slot(self) -> Then | None:
        """Announces the end of the training."""
        training, self.training = self._training_now, None
        if training.hides:
            self._quiet(False)
        self._announce("ready")
        if isinstance(training.outcome, OutboxEntry):
            return "ready", training.outcome
        is_newest = self.plan is not None and self.plan.is_of(training.plan.task, training.plan.round)
        return None if training.outcome is None or not is_newest else ("decline", training.outcome)

    def _end_attempt(self) -> None:
        try:
            self._store.end_attempt("round")
        except HushfleetError as error:  # the next round meets the full disk
            _log.error("%s", error)

    def _tidy(self, plan: RoundPlan, task: TaskRuntime) -> None:
        lists = self._membership_lists.kept() if task.spec.privacy.secure else set()
        tidy(self._store, plan, task, membership_lists=lists)

    # actions: the personalized head

    def _look_for_head(self) -> Then | None:
        plan, task = self.plan, self._tasks.runtime
        if not self._has_owner or plan is None or task is None or plan.task != self._tasks.name:
            return None
        found = self._personalized_heads.look(plan, task)
        if found is True:
            self._tidy(plan, task)
        return None if isinstance(found, bool) else ("choose", found)

    def _begin_head(self, wanted: tuple[HeadJob, bytes]) -> None:
        plan, task = self._open
        self._handover.begin_head(task, plan, *wanted)

    def _keep_head(self, chosen: HeadChosen | Finished) -> None:
        plan, task = self._open
        if self._personalized_heads.keep(plan, task, chosen):
            self._tidy(plan, task)
        else:
            self._handover.give_up()

    def _head_failed(self, why: Failed | Died) -> None:
        self._personalized_heads.failed(self._open[0], why.why if isinstance(why, Died) else why.reason)

    def _give_up_head(self) -> None:
        self._handover.give_up()
        self._personalized_heads.again()

    # actions: sending

    def _begin_upload(self, entry: OutboxEntry | AnswerEntry) -> None:
        self.sending.begin(*self._open, entry)

    def _send_wanted(self, upload: Upload) -> None:
        self.sending.upload = upload

    def _offer_again(self) -> None:
        if self.upload is not None:
            self.upload.offer_again()

    def _drop_upload(self) -> None:
        if self.upload is not None:
            _log.warning("round %d went on before what was being sent was acknowledged", self.upload.entry.round)
        self.sending.upload = None

    def drop_upload(self) -> None:
        """Does not send the update: the broker takes no chunk of its size."""
        self.sending.upload, self.state = None, "rest"

    def _conclude(self, answered: tuple[OutboxEntry | AnswerEntry, str]) -> Then | None:
        entry, plan = answered[0], self.plan
        self.sending.conclude(*answered)
        # a round that was announced meanwhile, and also accepts older updates
        is_older = plan is not None and not plan.is_of(entry.task, entry.round) and plan.phase in IN_PROGRESS
        return ("opens", None) if is_older else None
