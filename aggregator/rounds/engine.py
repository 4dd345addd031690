"""The rounds of a run, without a network: open, accept updates, close. The simulator calls the same class.

Every step that must survive is committed before its effect is visible: an update with the device's new public
state and its privacy charge in one transaction, then it is added to the sums; a checkpoint and the difference that
leads to it, then the transaction that closes the round. A new engine on the same store goes on where the last one
was killed: sums are exact, so re-adding the stored updates of an open round in any order gives the same bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hushfleet.aggregator.ingest.checks import Admitted, Inbox, Verdict, VerifiedUpdate
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode
from hushfleet.aggregator.ingest.robust import Sent
from hushfleet.aggregator.ingest.sum_kernels import find_addition
from hushfleet.aggregator.observe.metrics import RoundSummary, snr_db
from hushfleet.aggregator.publish.difference_files import DifferenceFiles
from hushfleet.aggregator.publish.model_step import make_difference, worth_offering
from hushfleet.aggregator.rounds.aggregate import Collected, dense
from hushfleet.aggregator.rounds.cohort import choose_cohort
from hushfleet.aggregator.rounds.policy import ClosingRule, least_devices
from hushfleet.aggregator.rounds.server_state import server_state_from_bytes, server_state_to_bytes
from hushfleet.aggregator.rounds.summary import summarise
from hushfleet.aggregator.storage.checkpoints import Checkpoints
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow, RoundRow, StoreFull
from hushfleet.errors import BadInput, StoreError
from hushfleet.methods.server import ClosedRound, ServerArrays
from hushfleet.methods.state import PublicState, RoundTerms
from hushfleet.wire.format.difference import EncodedDifference, params_digest
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, decode_update

if TYPE_CHECKING:
    from hushfleet.aggregator.publish.prepare import PreparedTask

log = logging.getLogger("hushfleet.aggregator")


class RoundEngine:
    """Opens and closes the rounds of one task on one store.

    :param device: the torch device for the sums.
    :param clock: unix seconds; :param monotonic: the clock of the deadline.
    """

    def __init__(
        self,
        store: AggregatorStore,
        prepared: PreparedTask,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.prepared = prepared
        self.spec = prepared.spec
        self.method = prepared.method
        self.layout = prepared.spec.model.layout
        self.inbox = Inbox(prepared.spec, prepared.method)
        self.checkpoints = Checkpoints(store.folder, self.layout, durable=store.durable)
        self.differences = DifferenceFiles(store.folder, full_bytes=4 * self.layout.size, durable=store.durable)
        self._rules = prepared.task.round
        self._closing = ClosingRule(self._rules, least_ready=self.min_devices)
        self._torch_device = torch.device(device)
        self._clock, self._monotonic = clock, monotonic
        self._newcomer = prepared.method.init_state().public
        self._newcomer_digest = self._newcomer.digest()
        self._plan: RoundPlan | None = None
        self._excluded: set[str] = set()
        self._resume()

    # what is going on

    @property
    def plan(self) -> RoundPlan | None:
        """The open round; None between rounds."""
        return self._plan

    @property
    def announcement(self) -> RoundPlan:
        """What devices should know at present: the open round, or that none is open, or that all are done."""
        return self._plan or RoundPlan(
            task=self.spec.task,
            round=self.closed_rounds,
            rounds=self.spec.rounds,
            phase="finished" if self.finished else "closed",
            global_digest=self.global_digest,
            global_bytes=4 * self.layout.size,
            cohort={},
            noise_split=1,
            deadline_s=0.0,
        )

    @property
    def finished(self) -> bool:
        return self.closed_rounds >= self.spec.rounds

    @property
    def min_devices(self) -> int:
        """How many devices must be present for a round to open: by default the cohort, or the whole fleet."""
        return least_devices(self._rules, devices=self.prepared.task.data.devices)

    @property
    def accepted(self) -> int:
        """How many updates of the open round were accepted."""
        return self._closing.accepted

    @property
    def extensions(self) -> int:
        """How often the open round's deadline was put off."""
        return self._closing.extensions

    @property
    def deadline(self) -> float:
        """Of the open round, on the monotonic clock."""
        return self._closing.deadline

    def is_expected(self, device: str) -> bool:
        """Whether this cohort member has neither been accepted nor given another final answer."""
        return self._plan is not None and self._closing.expects(device)

    # a round

    def open_round(self, present: Iterable[str]) -> RoundPlan:
        """Opens the next round with a cohort among `present`. Raises `BadInput` where none can be opened."""
        if self._plan is not None or self.finished:
            raise BadInput(f"no round can be opened: round {self.closed_rounds} of {self.spec.rounds}")
        number = self.closed_rounds + 1
        chosen = choose_cohort(present, size=self._rules.cohort_size, seed=self.prepared.task.seed, round=number)
        if not chosen:
            raise BadInput(f"round {number} cannot be opened: no device is present")
        cohort = {}
        for device in chosen:
            row = self.store.device(device)
            cohort[device] = row.public_digest if row and row.public_digest else self._newcomer_digest
        self.store.open_round(number, cohort=cohort, global_digest=self.global_digest, at=self._clock())
        self._begin(self._plan_of(number, cohort))
        return self.announcement

    def accept(self, device: str, data: bytes) -> Verdict:
        """Takes an update that came from `device`; whatever the bytes are, the answer is a verdict.

        Its three parts may be called one by one, with the second in another process and other updates between them.
        """
        admitted = self.admit(device, data)
        if isinstance(admitted, Verdict):
            return admitted
        return self.settle(admitted, self.decode(admitted))

    def admit(self, device: str, data: bytes) -> Admitted | Verdict:
        """The short part before decoding: who sent it, is it new, does it belong to the round, as noisy as asked."""
        try:
            return self._admitted(device, data)
        except Refusal as refusal:
            return self._refused(device, refusal)

    def decode(self, admitted: Admitted) -> Decoded | Refusal:
        """The long part, here and now; it changes nothing."""
        return decode(admitted.data, counts=admitted.counts, walk=find_addition())

    def settle(self, admitted: Admitted, decoded: Decoded | Refusal) -> Verdict:
        """The part after decoding: holds the values to the header, commits the update, adds it.

        The round may have been closed, or another update of the device accepted, since `admit`.
        """
        header = admitted.header
        try:
            earlier = self._earlier(header, admitted.payload)
            if earlier is not None:
                return earlier
            if isinstance(decoded, Refusal):
                raise decoded
            verified = self.inbox.verify(admitted, decoded)
            self._commit(verified)
        except Refusal as refusal:
            return self._refused(header.device, refusal)
        except StoreFull as error:
            return Verdict("store-full", str(error), False)
        return Verdict("accepted", "", True, header, admitted.counts, snr_db([verified.row]))

    def decline(self, device: str, code: str, reason: str, *, round: int) -> bool:
        """A cohort member says that it will not send an update. False if it is of no consequence."""
        if self._plan is None or round != self._plan.round or not self.is_expected(device):
            return False
        self.store.put_decline(round, device, code=code, reason=reason)
        self._closing.answer(device)
        return True

    def lost(self, device: str) -> None:
        """The device's connection died; see `ClosingRule.lost`."""
        self._closing.lost(device, now=self._monotonic())

    def back(self, device: str) -> None:
        self._closing.back(device)

    def exclude(self, *devices: str) -> None:
        """Nothing more is taken from these devices, nor expected of them; what was accepted stays."""
        self._excluded.update(devices)
        self._closing.answer(*devices)

    def include(self, device: str) -> None:
        """The device may take part again, from the next round on."""
        self._excluded.discard(device)

    def should_close(self, now: float | None = None, *, ready: int = 0) -> bool:
        """Whether the open round is over; at a deadline with too few updates it is extended instead.

        :param now: of the monotonic clock.
        :param ready: how many devices are present for a next round.
        """
        plan = self._plan
        if plan is None:
            return False
        decision = self._closing.decide(self._monotonic() if now is None else now, ready=ready)
        if decision == "extend":
            # another number than before, so that devices see that the plan has changed
            self._plan = replace(plan, deadline_s=self._closing.announced_deadline_s)
        return decision == "close"

    def close(self) -> RoundSummary:
        """Makes the next global model of what was accepted, and commits the round.

        With fewer than `min_updates` the model stays as it is. Raises `StoreFull` if the disk is full; the
        round is then still open, and `close` may be called again.
        """
        plan, row = self._plan, self.store.last_round()
        if plan is None or row is None:
            raise BadInput("no round is open, so none can be closed")
        updates = self.store.updates(plan.round)
        enough = len(updates) >= self._rules.min_updates
        params, difference = self._aggregated() if enough else (self.global_params, None)
        digest = params_digest(params)
        summary = summarise(
            plan,
            updates,
            params,
            changed=enough,
            method=self.method,
            rules=self._rules,
            store=self.store,
            held=self._trained_on,
            evaluate=self.prepared.evaluate_global,
            wall_s=max(0.0, self._clock() - row.opened_at),
        )
        server = self._advanced(params, summary) if enough else self._server
        self.checkpoints.write(plan.round, params)
        if difference is not None:
            self.differences.write(difference.data, difference.header)
        with self.store.transaction():
            self.store.put("server_state", server_state_to_bytes(server))
            self.store.close_round(plan.round, result_digest=digest, metrics=summary.to_dict(), at=self._clock())
        self._plan, self.closed_rounds, self._server = None, plan.round, server
        self._trained_on |= dict.fromkeys((update.device for update in updates), plan.global_digest)
        if difference is not None:
            self.differences.advance(difference.data, difference.header)
        elif digest != self.global_digest:
            self.differences.clear()
        self._set_global(params, digest)
        self.checkpoints.drop_old(plan.round)
        return summary

    # inside

    def _resume(self) -> None:
        self._check_same_task()
        stored = self.store.get("server_state")
        seed = self.prepared.task.seed
        begun = self.method.server.initial(seed) if stored is None else server_state_from_bytes(stored)
        self._server: ServerArrays = begun
        last = self.store.last_round()
        self.closed_rounds = 0 if last is None else last.round - (last.phase == "open")
        if last is None and not self.checkpoints.path(0).exists():
            self.checkpoints.write(0, np.ascontiguousarray(self.prepared.initial, np.float32))
        params = self.checkpoints.read(self.closed_rounds)
        digest = params_digest(params)
        if last is not None and digest != (last.global_digest if last.phase == "open" else last.result_digest):
            path = self.checkpoints.path(self.closed_rounds)
            raise StoreError(f"{path} is not the model that the store names; restore it")
        self._set_global(params, digest)
        self.differences.resume(digest)
        self._trained_on = self.store.held_models(until=self.closed_rounds)
        if last is not None and last.phase == "open":
            self._resume_open(last)

    def _check_same_task(self) -> None:
        """A store belongs to one task package: mixing two would spend privacy on a model that is neither."""
        known = self.store.get("spec_digest")
        if known is None:
            with self.store.transaction():
                self.store.put("task", self.spec.task.encode())
                self.store.put("spec_digest", self.prepared.spec_ref.digest)
        elif known != self.prepared.spec_ref.digest:
            task = (self.store.get("task") or b"").decode()
            raise BadInput(
                f"{self.store.folder} holds the run {task}, and the task file or the software has changed "
                "since; go on with what it was begun with, or start anew in another folder"
            )

    def _resume_open(self, row: RoundRow) -> None:
        self._begin(self._plan_of(row.round, row.cohort))
        for header, (values, shared) in self._stored_updates(row.round):
            self._collected.add(values, shared, dense(values, shared), header=header)
            self._closing.accept(header.device)
        self._closing.answer(*(device for _, device, _, _ in self.store.declines(row.round)))

    def _stored_updates(self, round: int) -> Iterator[tuple[UpdateHeader, Sent]]:
        """What was accepted in a round that is open, from its bytes, in the order of the devices' names."""
        for update in self.store.updates(round):
            stored = self.store.update_data(round, update.device)
            device = self.store.device(update.device)
            if stored is None or device is None:
                raise StoreError(f"the update of {update.device} in round {round} has lost its bytes")
            data, public_before = stored
            shared = ~PublicState.from_bytes(public_before, size=self.layout.size).mask
            counts = [int(np.count_nonzero(shared[s.start : s.stop])) for s in self.layout.layers]
            decoded = decode_update(data, public_key=device.public_key, counts=counts)
            yield decoded.header, Sent(decoded.values, shared)

    def _plan_of(self, number: int, cohort: dict[str, bytes]) -> RoundPlan:
        held = [self._trained_on[device] for device in cohort if device in self._trained_on]
        return RoundPlan(
            task=self.spec.task,
            round=number,
            rounds=self.spec.rounds,
            phase="open",
            global_digest=self.global_digest,
            global_bytes=4 * self.layout.size,
            cohort=cohort,
            noise_split=min(self.spec.privacy.noise_split, len(cohort)),
            deadline_s=self._rules.deadline_s,
            controls=self.method.server.controls(self._server, number),
            differences=worth_offering(self.differences.refs, held),
        )

    def _begin(self, plan: RoundPlan) -> None:
        self._plan = plan
        self._collected = Collected(
            self.method,
            self.layout,
            self.global_params,
            rules=self._rules,
            stored=lambda: (sent for _, sent in self._stored_updates(plan.round)),
            device=self._torch_device,
        )
        self._closing.begin(plan.cohort, now=self._monotonic())

    def _admitted(self, device: str, data: bytes) -> Admitted | Verdict:
        row = self.store.device(device)
        header, payload = self.inbox.authenticate(device, data, public_key=None if row is None else row.public_key)
        if header.task != self.spec.task:
            raise Refusal("late", f"the update is of {header.task}; this is {self.spec.task}", final=False)
        earlier = self._earlier(header, payload)
        if earlier is not None:
            return earlier
        plan = self._plan
        if device not in plan.cohort:
            raise Refusal("not-in-cohort", f"{device} does not take part in round {plan.round}")
        return self.inbox.admit(header, data, payload=payload, plan=plan, held=self._held(device))

    def _earlier(self, header: UpdateHeader, payload: bytes) -> Verdict | None:
        """`duplicate` for an update that was accepted before.

        Raises `Refusal` for another one, for a late one, and for one of a device that was put out.
        """
        if header.device in self._excluded:
            raise Refusal("unknown-device", f"{header.device} is no accepted device any more")
        known = self.store.update(header.round, header.device)
        if known is not None:
            if known.payload_digest == payload:
                return Verdict("duplicate", "", True, header)
            reason = f"another update of {header.device} was accepted in round {header.round}"
            raise Refusal("duplicate", reason, final=False)
        plan = self._plan
        if plan is None or header.round != plan.round:
            at = "no round is open" if plan is None else f"round {plan.round} is open"
            raise Refusal("late", f"the update is of round {header.round}, and {at}", final=False)
        return None

    def _refused(self, device: str, refusal: Refusal) -> Verdict:
        if refusal.final:
            self._closing.answer(device)
        faults = 0
        if refusal.is_fault and self._plan is not None:
            try:
                faults = self.store.put_fault(self._plan.round, device, code=refusal.code)
            except StoreFull as error:
                log.warning("a fault of %s could not be noted: %s", device, error)
        return Verdict(refusal.code, refusal.reason, False, faults=faults)

    def _held(self, device: str) -> PublicState:
        stored = self.store.public_state(device)
        return self._newcomer if stored is None else PublicState.from_bytes(stored, size=self.layout.size)

    def _commit(self, verified: VerifiedUpdate) -> None:
        admitted, header = verified.admitted, verified.admitted.header
        device, row = header.device, self.store.device(header.device)
        known = row is not None and row.public_digest == header.public_digest
        # packing a mask takes longer than reading it, so what is there is copied
        before = (self.store.public_state(device) if known else None) or admitted.public.to_bytes()
        decoded = verified.decoded
        sent = dense(decoded.values, admitted.shared)
        after = self.method.advance_public(admitted.public, sent)
        charge = self.method.charge(terms_of(self._plan))
        with self.store.transaction():
            self.store.put_update(header.round, verified.row, data=admitted.data, public_before=before)
            self.store.put_public_state(device, digest=after.digest(), state=after.to_bytes())
            self.store.put_charge(
                ChargeRow(
                    round=header.round,
                    device=device,
                    unit=charge.unit,
                    adjacency=charge.adjacency,
                    noise_multiplier=header.multiplier_server,
                    noise_split=charge.noise_split,
                    sample_rate=charge.sample_rate,
                    steps=charge.steps,
                    device_rounds=header.rounds_charged,
                    device_epsilon=header.epsilon_server,
                    raw="\n".join(charge.raw),
                )
            )
        self._collected.add(decoded.values, admitted.shared, sent, header=header, largest=decoded.largest)
        self._closing.accept(device)

    def _aggregated(self) -> tuple[np.ndarray, EncodedDifference | None]:
        """The new global model float32 `[d]`, and the difference that leads to it.

        It is the old one plus the decoded difference, so that both ways to it give a device the same bits.
        """
        target, wire = self._collected.aggregated(), self.prepared.task.wire
        if wire.downlink == "full" or np.array_equal(target, self.global_params):
            return target, None
        counts = [layer.size for layer in self.layout.layers]
        difference = make_difference(
            self.global_params,
            target,
            task=self.spec.task,
            round=self._plan.round,
            counts=counts,
            noise_stds=self._collected.noise_stds,
            wire=wire,
        )
        if difference is None:
            return target, None
        moved = difference.header.base != difference.header.result
        return difference.result, difference if moved else None

    def _advanced(self, params: np.ndarray, summary: RoundSummary) -> ServerArrays:
        outcome = ClosedRound(
            round=summary.round,
            before=self.global_params,
            after=params,
            reports=self._collected.reports,
            accuracy=summary.accuracy_global,
            loss=summary.loss,
        )
        return self.method.server.advance(self._server, outcome)

    def _set_global(self, params: np.ndarray, digest: bytes) -> None:
        params.setflags(write=False)
        self.global_params, self.global_digest = params, digest


def terms_of(plan: RoundPlan) -> RoundTerms:
    """What the round asks of every device; a device's own preference is known to itself only."""
    return RoundTerms(plan.noise_split, plan.controls)
