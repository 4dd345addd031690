"""What a device does about the open round: decide, train, and see its update through.

One plan at a time. It is settled when there is nothing left to decide: the update is on its way or
acknowledged, the round was declined, or this device is not in the cohort.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from hushfleet.edge_client.board.constant_time import announced_at
from hushfleet.edge_client.board.pacing import Pacer
from hushfleet.edge_client.net.fetch import BlobSource
from hushfleet.edge_client.net.global_model import GlobalModel
from hushfleet.edge_client.net.store_copies import Standing
from hushfleet.edge_client.net.upload import Sending
from hushfleet.edge_client.refusals import Declined, Refusal, refusal_of
from hushfleet.edge_client.runtime import TaskRuntime
from hushfleet.edge_client.storage.store import DeviceStore, OutboxEntry
from hushfleet.edge_client.tasks import MAX_ATTEMPTS, TaskDesk
from hushfleet.errors import CopiedStore, Malformed, StoreError
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import Ack, Decline, DeviceStatus, Message, Missing, Refused, RoundPlan

MOST_RESENDS = 20
"""How many times over an update's chunks are sent again, in one process: enough for a link that loses 19 of 20."""

_TRANSIENT = ("state-unknown", "store-full")

_log = logging.getLogger("hushfleet.edge")


class Superseded(Exception):
    """Training was given up: its result could not be used any more."""


class Stopped(Exception):
    """Training was given up because the client is asked to stop."""


class RoundDesk:
    """The plan that the aggregator announced last, and what became of it here.

    :param standing: whether the store is the newest one of its device.
    :param memory_mib: what training may use.
    :param say: announces the device's state.
    :param between_batches: called with the plan before each batch; may raise `Superseded` or `Stopped`.
    :param clock: monotonic seconds.
    :param pacer: makes training as slow as a simulated board's.
    """

    def __init__(
        self,
        *,
        device: str,
        store: DeviceStore,
        blobs: BlobSource,
        tasks: TaskDesk,
        standing: Standing,
        memory_mib: int,
        say: Callable[[DeviceStatus], None],
        between_batches: Callable[[RoundPlan], None],
        clock: Callable[[], float],
        pacer: Pacer,
    ) -> None:
        self._device = device
        self._store = store
        self._blobs = blobs
        self._model = GlobalModel(store, blobs)
        self._tasks = tasks
        self._standing = standing
        self._memory_mib = memory_mib
        self._say = say
        self._between_batches = between_batches
        self._clock = clock
        self._pacer = pacer
        self.plan: RoundPlan | None = None
        self.deadline = 0.0
        self.sending: Sending | None = None
        self.decline: Decline | None = None
        self.decline_due = False
        self.quiet_until: float | None = None  # a round is committed, and its end is announced then
        self._settled = True
        self._resent: tuple[str, int, int] = ("", 0, 0)  # task, round, chunks that were asked for again

    @property
    def finished(self) -> bool:
        """The announced task has ended, and nothing is left to send."""
        plan = self.plan
        return plan is not None and plan.phase == "finished" and plan.task == self._tasks.name and self.sending is None

    def resume(self) -> None:
        """The link or the aggregator came back: say again what it may not have heard."""
        if self.sending is not None:
            self.sending.offer_again()
        self.decline_due = self.decline is not None

    # what comes in

    def on_new_task(self) -> None:
        """Another task was announced: the plan may belong to it."""
        if self.quiet_until is not None:
            self._end_quiet()
        self.sending = None
        self._reconsider()

    def on_plan(self, plan: Message) -> None:
        """Raises `Malformed` for a message of another kind."""
        if not isinstance(plan, RoundPlan):
            raise Malformed(f"a {type(plan).__name__} came where a round plan belongs")
        before, self.plan = self.plan, plan
        again = before is not None and same_round(before, plan)
        if self._tasks.runtime is not None and not (again and plan.differences == before.differences):
            # parts of the global model of a round that is over, or that an aggregator which came back has lost
            self._blobs.drop()
        if again and (plan.phase, plan.deadline_s) == (before.phase, before.deadline_s):
            # The same plan again: the aggregator was away, and may not know what was answered. Where the broker was
            # restarted, an offer that came before the aggregator had subscribed is lost.
            self.resume()
            if self.decline is None and self.sending is None:
                self._settled = plan.phase != "open"
            return
        _log.info("round %d of %d: %s", plan.round, plan.rounds, plan.phase)
        if self.quiet_until is not None and not (again and plan.phase == "open"):
            self._end_quiet()  # the round is over for everybody, whatever they have
        self.deadline = self._clock() + plan.deadline_s
        self._tasks.retry_after_full_disk()
        sending = self.sending
        if sending is not None and not (plan.phase == "open" and _is_of(sending.entry, plan)):
            _log.warning("round %d closed before its update was acknowledged", sending.entry.round)
            self.sending = None
        self._reconsider()

    def on_answer(self, answer: Message) -> None:
        """Raises `Malformed` for a message of another kind; answers about other updates change nothing."""
        if not isinstance(answer, (Ack, Missing, Refused)):
            raise Malformed(f"a {type(answer).__name__} came where an answer to an update belongs")
        sending = self.sending or self._revived(answer)
        if sending is None or not sending.concerns(answer.task, answer.round, answer.digest):
            return
        now = self._clock()
        if isinstance(answer, Ack):
            self._conclude(sending.entry, "acked")
        elif isinstance(answer, Missing):
            if answer.digest == sending.offer.digest and self._may_resend(sending):
                sending.lacking(answer, now)
                self._count_resent(sending)
                self.sending = sending
        elif sending.entry.status == "acked" and answer.code not in _TRANSIENT:
            _log.warning("round %d: acknowledged, so a refusal (%s) is passed over", answer.round, answer.code)
        elif answer.code == "state-unknown" and not sending.with_public:
            self.sending = self._noted(sending.attached(now))
        elif answer.code == "store-full":
            _log.warning("the aggregator has no room for the update; it is offered again later")
            sending.wait_longer(now)
            self.sending = sending
        else:
            _log.warning("round %d: refused (%s): %s", answer.round, answer.code, answer.reason)
            self._conclude(sending.entry, f"refused:{answer.code}")
            if answer.code == "duplicate":  # of which update does the aggregator speak?
                self._standing.ask_again(now, doubt=True)

    def _revived(self, answer: Ack | Missing | Refused) -> Sending | None:
        """The aggregator speaks of an update that is not being sent: it may have lost its own store."""
        plan, task = self.plan, self._tasks.runtime
        if plan is None or task is None or plan.phase != "open":
            return None
        entry = self._store.outbox(plan.task, plan.round) if same_round(plan, answer) else None
        if entry is None or entry.status.startswith("refused"):
            return None
        return self._make_sending(plan, task, entry, push=False)

    def _may_resend(self, sending: Sending) -> bool:
        """Whether chunks may go out again: a recorded answer, published without end, must not use up a metered link."""
        task, number, chunks = self._resent
        same = (task, number) == (sending.entry.task, sending.entry.round)
        return not same or chunks < MOST_RESENDS * sending.chunks

    def _count_resent(self, sending: Sending) -> None:
        task, number, chunks = self._resent
        same = (task, number) == (sending.entry.task, sending.entry.round)
        self._resent = (sending.entry.task, sending.entry.round, sending.queued + (chunks if same else 0))

    def _conclude(self, entry: OutboxEntry, status: str) -> None:
        self.sending = None
        if entry.status != status:
            _log.info("round %d: the update is %s", entry.round, status)
            self._store.set_status(entry.task, entry.round, status)

    def _reconsider(self) -> None:
        self._settled = self.plan is None or self.plan.phase != "open" or self.sending is not None
        self.decline, self.decline_due = None, False

    # what is done about it

    def advance(self) -> None:
        """Does what can be done now for the open round; training happens in here."""
        plan, tasks = self.plan, self._tasks
        if self.quiet_until is not None:
            if self._clock() < self.quiet_until:
                return
            self._end_quiet()
        if plan is None or self._settled or plan.task != tasks.name:
            return  # without its task, a plan waits
        if self._device not in plan.cohort:
            self._settled = True
        elif tasks.refusal is not None:
            self.settle(tasks.refusal)
        elif tasks.runtime is not None:
            try:
                self._see_through(plan, tasks.runtime)
            except (Stopped, CopiedStore):
                raise
            except Exception as error:
                self.settle(refusal_of(error))

    def _end_quiet(self) -> None:
        self.quiet_until = None
        self._say("ready")

    def settle(self, refusal: Refusal) -> None:
        """Declines the open round, unless it is settled already, or committed and about to be announced."""
        plan = self.plan
        if plan is None or self._settled or self.quiet_until is not None:
            return
        _log.warning("round %d declined (%s): %s", plan.round, *refusal)
        self._settled = True
        self.decline = Decline(plan.task, plan.round, *refusal)
        self.decline_due = True

    def _see_through(self, plan: RoundPlan, task: TaskRuntime) -> None:
        held = plan.cohort[self._device]
        if held != task.newcomer_digest and not self._store.has_been(plan.task, held):
            self._standing.stop(
                f"the plan of round {plan.round} of {plan.task} says that the aggregator holds a state of this device "
                "that this store has never been in"
            )
        entry = self._store.outbox(plan.task, plan.round)
        if entry is None:
            entry = self._trained(plan, task)
        if entry is None or self.quiet_until is not None:
            return
        self._settled = True
        if entry.pending:
            self.sending = self._make_sending(plan, task, entry, push=True)
        elif entry.status == "acked" and entry.data:
            # The plan came again. An aggregator that has the update says so in one small message.
            self.sending = self._make_sending(plan, task, entry, push=False)

    def _trained(self, plan: RoundPlan, task: TaskRuntime) -> OutboxEntry | None:
        """The committed update; None while the global model is still to come, or if the plan was overtaken."""
        spec = task.spec
        last = self._store.last_round(plan.task)
        if last is not None and plan.round < last:
            raise Declined("error", f"this device has already committed round {last} of the task")
        if spec.memory_mib > self._memory_mib:
            raise Declined("memory", f"the task needs {spec.memory_mib} MiB, this device gives {self._memory_mib} MiB")
        if plan.rounds != spec.rounds or plan.global_bytes != 4 * spec.model.layout.size:
            raise Declined("error", "the plan does not fit the task: its rounds or its model's size differ")
        trainer = task.trainer()
        trainer.check_round(plan)
        if not task.constant_time:  # reading the data takes as long as there are records
            task.data.samples()
        model = self._model.need(plan, spec)
        if model is None or not self._standing.may_train():
            return None
        params = np.frombuffer(model, "<f4")
        if self._store.count_attempt("round", f"{plan.task}/{plan.round}") > MAX_ATTEMPTS:
            raise Declined("memory", f"training ended the client abruptly {MAX_ATTEMPTS} times")
        nominal_s = task.nominal_seconds(params, clock=self._clock) if task.constant_time else None
        self._say("training")
        began = self._clock()
        try:
            with self._pacer.checked_by(lambda: self._between_batches(plan)):
                entry = trainer.run_round(plan, params, on_batch=lambda done, total: self._pacer.step())
            if nominal_s is not None:
                self.quiet_until = announced_at(
                    began=began,
                    ended=self._clock(),
                    nominal_s=nominal_s * self._pacer.slowdown,
                    deadline=self.deadline,
                    deadline_s=plan.deadline_s,
                )
        except Superseded as reason:
            _log.info("training for round %d was given up: %s", plan.round, reason)
            if self._clock() > self.deadline:
                raise Declined("busy", "the round's deadline passed before training had ended") from reason
            self._settled = True  # the newer plan is among the events that wait
            return None
        finally:
            self._pacer.begin()  # a simulation's tests of the model, just made, are no work of the board's
            self._tidy(task, plan.global_digest)
            if self.quiet_until is None:
                self._say("ready")
        _log.info("round %d: trained and committed, %d bytes to send", plan.round, len(entry.data))
        return entry

    def _tidy(self, task: TaskRuntime, global_digest: bytes) -> None:
        """What must not spoil a round that is committed: a full disk shows up at the next one."""
        try:
            self._store.end_attempt("round")
            self._store.set_current(task_digest=task.digest, global_digest=global_digest)
            self._store.drop_blobs(keep=task.blobs() | {global_digest})
        except StoreError as error:
            _log.error("%s", error)

    def _make_sending(self, plan: RoundPlan, task: TaskRuntime, entry: OutboxEntry, *, push: bool) -> Sending:
        before = PublicState.from_bytes(entry.public_before, size=task.spec.model.layout.size)
        return self._noted(
            Sending(
                entry,
                identity=self._store.identity,
                with_public=plan.cohort.get(self._device) != before.digest(),
                chunk_bytes=task.spec.wire.chunk_bytes,
                push=push,
                now=self._clock(),
            )
        )

    def _noted(self, sending: Sending) -> Sending:
        """The other digest is stored before a byte leaves under it, so that the store knows it as its own."""
        if sending.with_public and sending.entry.attached_digest != sending.offer.digest:
            self._store.note_attached(sending.entry.task, sending.entry.round, sending.offer.digest)
        return sending


def same_round(one: RoundPlan, other: RoundPlan | Ack | Missing | Refused) -> bool:
    return (one.task, one.round) == (other.task, other.round)


def _is_of(entry: OutboxEntry, plan: RoundPlan) -> bool:
    return (entry.task, entry.round) == (plan.task, plan.round)
