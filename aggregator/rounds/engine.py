"""Runs the rounds of a task without a network: opens them, accepts updates, closes them; also used by the simulator.

Every step that must survive is committed before its effect is visible: an update is stored with the device's new public
state and its privacy charge in one transaction, then added to the sums; for secure aggregation the set of its devices
is stored, then a committee's answers for that set; a checkpoint is written, then a transaction closes the round. A new
engine on the same store continues where the last one was killed: sums are exact, so adding the stored updates of an
open round again in any order gives the same bits.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate, Refusal
from hushfleet.aggregator.results.metrics import RoundSummary
from hushfleet.aggregator.rounds.admission import is_new
from hushfleet.aggregator.rounds.kinds import RoundKind, RoundKinds
from hushfleet.aggregator.rounds.plain_sum import PlainSum
from hushfleet.aggregator.rounds.policy import ClosingRule, Decision, choose_cohort, least_devices
from hushfleet.aggregator.rounds.progress import TaskProgress
from hushfleet.aggregator.rounds.round_sum import commit
from hushfleet.aggregator.rounds.summary import summarise
from hushfleet.aggregator.storage.store import AggregatorStore, StoredRound
from hushfleet.at_need import at_need
from hushfleet.errors import BadInput, StoreFull, WireError
from hushfleet.methods.cost import RoundTerms
from hushfleet.privacy.charge import Charge
from hushfleet.schema import pack, unpack
from hushfleet.secure.membership_list import MembershipList
from hushfleet.secure.unmasking_share import is_answer, read_answer_header
from hushfleet.wire.format.messages import RoundPlan, SecurePlan
from hushfleet.wire.format.spec import BlobRef
from hushfleet.wire.format.update_values import SIGNED, UpdateFormat

if TYPE_CHECKING:
    from hushfleet.aggregator.payloads.prepare import PreparedTask
    from hushfleet.aggregator.rounds import secure_aggregation
    from hushfleet.aggregator.rounds.secure_aggregation import SecureAggregation
    from hushfleet.secure import secure_round
else:
    secure_aggregation = at_need("hushfleet.aggregator.rounds.secure_aggregation")
    secure_round = at_need("hushfleet.secure.secure_round")

log = logging.getLogger("hushfleet.aggregator")


class RoundEngine:
    """Opens and closes the rounds of one task on one store.

    :param device: the compute device that holds the sums, see `ExactSum`.
    :param clock: unix seconds.
    :param monotonic: the clock of the deadline.
    :param masked: False, FOR SIMULATION ONLY: devices send zeros as masks, because masks cancel, and no committee is
        asked.
    :param update_format: a format other than the field's is FOR SIMULATION ONLY.
    """

    def __init__(
        self,
        store: AggregatorStore,
        prepared: PreparedTask,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        masked: bool = True,
        update_format: UpdateFormat = SIGNED,
    ) -> None:
        self.store = store
        self.prepared = prepared
        self.spec = prepared.spec
        self.method = prepared.method
        self.layout = prepared.spec.model.layout
        self._kinds = RoundKinds(prepared, store, update_format)
        self.checks = self._kinds.training.checks
        self._rules = prepared.task.round
        least = least_devices(self._rules, devices=prepared.task.data.devices, drawn=self.drawn_at is not None)
        self.responses = ClosingRule(self._rules, least_ready=least)
        self._device = device
        self._clock, self._monotonic = clock, monotonic
        self._masked = masked
        self._newcomer_digest = self.checks.newcomer.digest()
        self._plan: RoundPlan | None = None
        self._sum: PlainSum | SecureAggregation | None = None
        self.membership_list: bytes | None = store.get("roster")
        self._excluded: set[str] = set()
        store.check_same_task(self.spec.task, prepared.spec_ref.digest)
        self.progress = TaskProgress(store, prepared)
        self.model = self.progress.model
        last = store.last_round()
        if last is not None and last.phase != "closed":
            self._resume(last)

    # state

    @property
    def global_params(self) -> np.ndarray:
        """The current global model, float32 `[d]`, read-only."""
        return self.model.params

    @property
    def global_digest(self) -> bytes:
        """SHA-256 of the current model in the form that devices get."""
        return self.model.digest

    @property
    def plan(self) -> RoundPlan | None:
        """The open round; None between rounds."""
        return self._plan

    @property
    def announcement(self) -> RoundPlan:
        """The plan that devices should know at present: the open round, or that none is open, or that all are done."""
        return self._plan or self.progress.no_round

    @property
    def collects_updates(self) -> bool:
        """True if a round is open, and the devices of its sum are not fixed yet."""
        return self._plan is not None and self._plan.phase == "open"

    @property
    def closed_rounds(self) -> int:
        """Number of closed rounds."""
        return self.progress.closed_rounds

    @property
    def finished(self) -> bool:
        """True if no further round will open."""
        return self.progress.finished

    @property
    def next_charge(self) -> Charge:
        """The charge of a device for the next round, with the standard noise."""
        number, controls = self.closed_rounds + 1, dict[str, float]()
        if not self.spec.asks(number):
            controls = self.progress.server_half.controls(self.spec.training_number(number))
        return self._kinds.of(number).method.charge(RoundTerms(self.spec.privacy.noise_split, controls))

    @property
    def drawn_at(self) -> float | None:
        """Probability that a device is drawn for secure aggregation; None if cohorts are chosen."""
        return None if self.spec.privacy.secure is None else self.prepared.task.sampling_rate

    @property
    def accepted(self) -> int:
        """Number of accepted updates of the open round."""
        return 0 if self._sum is None else self._sum.count

    def find_blob(self, digest: bytes) -> bytes | None:
        """Returns a blob that devices may ask for: the task package, a graph, the current model, a difference that
        leads to it, or the membership list of the newest secure aggregation; None for an unknown digest."""
        found = self.prepared.blobs.get(digest) or self.model.find(digest)
        if (
            found is None
            and self.membership_list is not None
            and hashlib.sha256(self.membership_list).digest() == digest
        ):
            return self.membership_list
        return found

    @property
    def kind(self) -> RoundKind:
        """The kind of the open round."""
        return self._kinds.of(self._open_plan.round)

    @property
    def cohort(self) -> Collection[str]:
        """The devices that take part in the open round, whether its plan names them or not."""
        return () if self._sum is None else self._sum.cohort

    # a round

    def open_round(self, present: Iterable[str], *, membership_list: MembershipList | None = None) -> RoundPlan:
        """Opens the next round. Raises `BadInput` if none can be opened.

        :param present: the devices among which a cohort is chosen; the cohort of secure aggregation depends only on the
            roster.
        :param membership_list: for secure aggregation; by default all devices that the store knows and that are not
            excluded.
        """
        if self._plan is not None or self.finished:
            raise BadInput(f"no round can be opened: round {self.closed_rounds} of {self.spec.rounds}")
        number = self.closed_rounds + 1
        if self.spec.privacy.secure is not None:
            self._open_secure(
                number, membership_list or secure_aggregation.membership_list_of(self.store, excluded=self._excluded)
            )
        else:
            self._open_plain(number, present)
        return self.announcement

    def _open_plain(self, number: int, present: Iterable[str]) -> None:
        chosen = choose_cohort(present, size=self._rules.cohort_size, seed=self.prepared.task.seed, round=number)
        if not chosen:
            raise BadInput(f"round {number} cannot be opened: no device is present")
        with self.store.read_ahead(number, chosen):
            plan = self.progress.plan(number, {device: self._held(device) for device in chosen})
        with self.store.transaction():
            if plan.max_staleness:
                self.store.put_controls(number, plan.controls, since=number - plan.max_staleness)
            self.store.open_round(number, cohort=plan.cohort, global_digest=self.global_digest, at=self._clock())
        self._plan = plan
        self._begin(plan)

    def _held(self, device: str) -> bytes:
        """Returns the digest of the public state that the aggregator holds for the device, 16 bytes."""
        row = self.store.device(device)
        return row.public_digest if row and row.public_digest else self._newcomer_digest

    def keys_changed(self, devices: Collection[str]) -> bool:
        """Notes devices with a new key, such as new cards; returns whether the open round's plan has changed.

        The round waits for them again: they may take part, unless they know that an earlier card may have done so.
        """
        if self.collects_updates:
            self.responses.keys_changed(*devices)
        return self._look_at_states()

    def _look_at_states(self) -> bool:
        """Updates the open plan if a device has a new key and starts again; returns whether the plan has changed.

        If a plan named the former board's state, the new board would consider itself a restored copy.
        """
        if self._plan is None:
            return False
        plan = self._plan
        sent = {update.device for update in self.store.updates(plan.round)}
        cohort = {device: digest if device in sent else self._held(device) for device, digest in plan.cohort.items()}
        self._plan = replace(plan, cohort=cohort)
        return cohort != plan.cohort

    def _open_secure(self, number: int, membership_list: MembershipList) -> None:
        data, wanted = membership_list.to_bytes(), self._rules.cohort_size
        secure = SecurePlan(BlobRef.of(data), min(1.0, wanted / len(membership_list.devices)) if wanted else 1.0)
        if (spec := self.spec.privacy.secure) is not None:
            secure_round.check_membership_list(spec, membership_list, rate=secure.rate)  # no draw can correct this
        self.membership_list = data
        plan = self.progress.plan(number, {}, secure)
        self._begin(plan)
        with self.store.transaction():
            if data != self.store.get("roster"):
                self.store.put("roster", data)
            self.store.open_round(
                number, cohort={}, global_digest=self.global_digest, at=self._clock(), secure=pack(secure)
            )
        self._plan = plan

    def accept(self, device: str, data: bytes) -> CheckedUpdate:
        """Takes an update, or a member's answer, from `device`. The bytes may be anything; the `code` of the returned
        update is the result."""
        return self.accept_many([(device, data)])[0]

    def accept_many(self, items: Sequence[tuple[str, bytes]]) -> list[CheckedUpdate]:
        """Takes the updates of several devices as `accept` would take one after the other, in one transaction.

        If the disk is full, all new ones are refused as `store-full`. A second update of a device, and a member's
        answer, are read after the updates before them are stored.
        """
        updates = [CheckedUpdate(device, data) for device, data in items]
        if len(updates) == 1 or self._plan is None:
            self._accept(updates)
        else:
            with self.store.read_ahead(self._plan.round, (update.device for update in updates)):
                self._accept(updates)
        return updates

    def _accept(self, updates: Sequence[CheckedUpdate]) -> None:
        new: dict[str, CheckedUpdate] = {}
        for update in updates:
            is_of_member = is_answer(update.data)
            if update.device in new or is_of_member:
                self._add(new.values())
                new = {}
            try:
                if is_of_member:
                    self._take_answer(update)
                elif self._check(update):
                    new[update.device] = update
            except Refusal as refusal:
                self._refuse(update, refusal)
            except StoreFull as error:
                update.refuse("store-full", str(error))
        self._add(new.values())

    def _check(self, update: CheckedUpdate) -> bool:
        """Checks an update; returns whether it is a new one. Raises `Refusal`."""
        known = self.store.device(update.device)
        self.checks.authenticate(update, public_key=known.public_key if known else None)
        is_new_one = self._is_new(update)
        if is_new_one:
            self._open_sum.read(update)
        return is_new_one

    def _add(self, updates: Collection[CheckedUpdate]) -> None:
        """Stores checked updates of different devices, then adds them to the sum."""
        if not updates:
            return
        collected, checks = self._open_sum, self.kind.checks
        try:
            with self.store.transaction():
                for update in updates:
                    charge = checks.agreed(collected.plan_of(update.round)).charge
                    commit(self.store, update, charge, summed_in=self._open_plan.round)
        except StoreFull as error:
            for update in updates:
                update.refuse("store-full", str(error))
            return
        for update in updates:
            collected.add(update)
            self.responses.accept(update.device)
            update.acknowledge("accepted")

    def _take_answer(self, update: CheckedUpdate) -> None:
        update.kind = "answer"
        try:
            header = read_answer_header(update.data)
        except WireError as error:
            raise Refusal("malformed", str(error), final=False) from error
        update.task, update.round, update.digest = header.task, header.round, hashlib.sha256(update.data).digest()
        if not self._is_new(update):
            return
        if self._sum is None or isinstance(self._sum, PlainSum):
            raise Refusal("malformed", "this task has no secure aggregation", final=False)
        self._sum.take_answer(update)
        update.acknowledge("accepted")

    def merge(self, partial: Any) -> None:
        """Adds a partial sum of the values of accepted updates, as the round's sum has it. FOR SIMULATION ONLY."""
        self._open_sum.merge(partial)

    def admit(self, update: CheckedUpdate) -> bool:
        """Returns whether an offered update or answer may be sent at present; if not, its `code` says why."""
        try:
            return self._is_new(update)
        except Refusal as refusal:
            update.refuse(refusal.code, refusal.reason)
            return False

    def _is_new(self, update: CheckedUpdate) -> bool:
        """Applies the rules of `admission`. Raises `Refusal`."""
        if update.task != self.spec.task:
            raise Refusal("late", f"the update is of {update.task}; this is {self.spec.task}", final=False)
        if update.device in self._excluded:
            raise Refusal("unknown-device", f"{update.device} is not an accepted device any more", final=False)
        plan = None if self._sum is None else self._plan
        return is_new(
            update,
            self.store,
            plan,
            cohort=self.cohort,
            expects=self.responses.expects,
            has_answers=self.spec.privacy.secure is not None,
        )

    def decline(self, device: str, code: str, reason: str, *, round: int) -> bool:
        """Notes that a cohort member will not send an update; returns False if this has no effect, such as after the
        devices of a sum are fixed: a device that was too slow to train still answers as a member."""
        if not self.collects_updates or round != self._open_plan.round or not self.responses.expects(device):
            return False
        self.store.put_decline(round, device, code=code, reason=reason)
        self.responses.decline(device, code)
        return True

    def lost(self, device: str) -> None:
        """Notes that the device's connection died; see `ClosingRule.lost`."""
        self.responses.lost(device, now=self._monotonic())

    def back(self, device: str) -> None:
        """Notes that a lost device is connected again."""
        self.responses.back(device)

    def exclude(self, *devices: str) -> None:
        """Accepts nothing more from these devices and waits for none of them; accepted updates stay."""
        self._excluded.update(devices)
        self.responses.answer(*devices, is_final=False)

    def include(self, device: str) -> None:
        """Lets the device take part again, from the next round on."""
        self._excluded.discard(device)

    def should_close(self, now: float | None = None, *, ready: int = 0) -> bool:
        """Returns whether the open round is over; at a deadline with too few updates it extends the round instead.

        :param now: seconds of the monotonic clock.
        :param ready: how many devices are present for a next round.
        """
        if self._plan is None:
            return False
        if self._sum is None:
            return True  # too few devices were drawn
        now = self._monotonic() if now is None else now
        decision = self.responses.decide(now, ready=ready)
        if decision == "close" and not isinstance(self._sum, PlainSum):
            decision = self._closing(self._sum, now)
        if decision == "extend":
            # a new number, so that devices see that the plan has changed
            self._plan = replace(self._open_plan, deadline_s=self.responses.announced_deadline_s)
        return decision == "close"

    def _closing(self, collected: SecureAggregation, now: float) -> Decision:
        """Fixes the set of devices if no update is expected any more, or tries to open the sum if no answer is."""
        if not collected.asks_members:
            return collected.closing(now)
        if collected.count < self.responses.min_updates:
            return "close"
        plan = collected.fixed()
        self.store.fix_sum(plan.round, secure=pack(plan.secure))
        self._plan = plan
        collected.ask(plan, excluded=self._excluded)
        return "wait"

    def close(self, *, opens: bool = True) -> RoundSummary:
        """Computes the next global model from the accepted updates, and commits the round.

        With fewer than `min_updates`, or if secure aggregation cannot be opened (in a simulation: if not `opens`), the
        model does not change. Raises `StoreFull` if the disk is full; the round stays open, and `close` may be called
        again.
        """
        plan, row = self._open_plan, self.store.last_round()
        updates = self.store.updates(plan.round)
        enough = opens and len(updates) >= self.responses.min_updates and self._open_sum.open()
        kind, opened = self.kind, self._open_sum if enough else None
        collected, answer = (opened, None) if kind.question is None else (None, opened)
        following = self.progress.next_model(plan.round, collected)
        summary = summarise(
            plan,
            updates,
            following.params,
            changed=enough,
            method=kind.method,
            rules=kind.rules,
            wire=kind.checks.spec.wire,
            store=self.store,
            held=self.progress.trained_on,
            evaluate=self.prepared.evaluate_global if kind.question is None else None,
            wall_s=max(0.0, self._clock() - row.opened_at) if row is not None else 0.0,
            cohort=len(self.cohort),
            collected=self._sum,
            question=kind.question,
            answer=answer,
        )
        self.progress.close(following, summary, collected, at=self._clock())
        self._plan, self._sum = None, None
        return summary

    # internal

    @property
    def _open_plan(self) -> RoundPlan:
        if self._plan is None:
            raise BadInput("no round is open, so none can be closed")
        return self._plan

    @property
    def _open_sum(self) -> PlainSum | SecureAggregation:
        if self._sum is None:
            raise BadInput("no round is open, so it has no sum")
        return self._sum

    def _resume(self, row: StoredRound) -> None:
        secure = None if row.secure is None else unpack(SecurePlan, row.secure, what="the stored plan")
        plan = self.progress.plan(row.round, row.cohort, secure)
        self._begin(plan)
        self._plan, collected = plan, self._sum
        if collected is None:
            return
        added = collected.resume()
        if not isinstance(collected, PlainSum) and row.phase == "unmask":
            collected.ask(plan, excluded=self._excluded)
            return
        self._look_at_states()
        self.responses.keys_changed(*self.store.new_cards(row.round))
        for device in added:
            self.responses.accept(device)
        for _, declined, code, _ in self.store.declines(row.round):
            self.responses.decline(declined, code)

    def _sum_of(self, plan: RoundPlan) -> PlainSum | SecureAggregation:
        half, of_sums = self.progress.server_half, {"responses": self.responses, "monotonic": self._monotonic}
        return self._kinds.of(plan.round).sum(
            plan,
            half,
            store=self.store,
            device=self._device,
            membership_list=self.membership_list,
            masked=self._masked,
            **of_sums,
        )

    def _begin(self, plan: RoundPlan) -> None:
        """Begins the sum of a plan. Raises `BadInput` if this is impossible, unless it is due only to this draw."""
        try:
            self._sum = self._sum_of(plan)
        except BadInput as error:
            if plan.secure is None or plan.secure.rate == 1:
                raise
            log.warning("round %d is given up at once, since too few were drawn: %s", plan.round, error)
            self._sum = None
        self.responses.begin(self.cohort, now=self._monotonic())
        self.responses.answer(*self._excluded, is_final=False)

    def _refuse(self, update: CheckedUpdate, refusal: Refusal) -> None:
        """Writes a refusal into the update; stores the fault if the device itself is responsible."""
        update.refuse(refusal.code, refusal.reason)
        if refusal.final:
            self.responses.answer(update.device)
        if refusal.is_fault and self._plan is not None:
            try:
                update.faults = self.store.put_fault(self._plan.round, update.device, code=refusal.code)
            except StoreFull as error:
                log.warning("a fault of %s could not be noted: %s", update.device, error)
