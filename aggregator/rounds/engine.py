"""The rounds of a run, without a network: open, accept updates, close. The simulator calls the same class.

Every step that must survive is committed before its effect is visible: an update with the device's new public
state and its privacy charge in one transaction, then it is added to the sums; a checkpoint, then the transaction that
closes the round. A new engine on the same store goes on where the last one
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

from hushfleet.aggregator.ingest.checks import Admitted, UpdateChecks, Verdict
from hushfleet.aggregator.ingest.decoding import Decoded, Refusal, decode
from hushfleet.aggregator.ingest.robust import Sent
from hushfleet.aggregator.observe.metrics import RoundSummary, snr_db
from hushfleet.aggregator.publish.model_step import worth_offering
from hushfleet.aggregator.publish.published_model import NextModel, PublishedModel
from hushfleet.aggregator.rounds.aggregate import RoundAggregate
from hushfleet.aggregator.rounds.policy import ClosingRule, choose_cohort, least_devices
from hushfleet.aggregator.rounds.server_state import server_state_from_bytes, server_state_to_bytes
from hushfleet.aggregator.rounds.summary import summarise
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow, StoredRound, UpdateRow
from hushfleet.errors import BadInput, StoreError, StoreFull
from hushfleet.methods.server import ClosedRound, ServerArrays
from hushfleet.methods.state import PublicState, RoundTerms
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader, decode_update

if TYPE_CHECKING:
    from hushfleet.aggregator.publish.prepare import PreparedTask

log = logging.getLogger("hushfleet.aggregator")


class RoundEngine:
    """Opens and closes the rounds of one task on one store.

    :param device: the torch device for the sums.
    :param clock: unix seconds.
    :param monotonic: the clock of the deadline.
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
        self.checks = UpdateChecks(prepared.spec, prepared.method)
        self.model = PublishedModel(store, self.layout)
        self.checkpoints, self.differences = self.model.checkpoints, self.model.differences
        self._rules = prepared.task.round
        self.responses = ClosingRule(self._rules, least_ready=self.min_devices)
        self._torch_device = torch.device(device)
        self._clock, self._monotonic = clock, monotonic
        self._newcomer = prepared.method.init_state().public
        self._newcomer_digest = self._newcomer.digest()
        self._plan: RoundPlan | None = None
        self._excluded: set[str] = set()
        self._server: ServerArrays = {}
        self._trained_on: dict[str, bytes] = {}
        self._check_same_task()
        self._resume()

    # what is going on

    @property
    def global_params(self) -> np.ndarray:
        """The current global model, float32 `[d]`, read-only."""
        return self.model.params

    @property
    def global_digest(self) -> bytes:
        return self.model.digest

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
        return self.responses.accepted

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
        """Takes an update that came from `device`; whatever the bytes are, the answer is a verdict."""
        known = self.store.device(device)
        try:
            header, payload = self.checks.authenticate(device, data, public_key=known.public_key if known else None)
            verdict = self.admission(device, task=header.task, round=header.round, digest=payload)
            if verdict is not None:
                return replace(verdict, header=header) if verdict.acknowledged else verdict
            plan, held = self._open_plan, self._held(device)
            admitted = self.checks.check_header(header, data, payload=payload, plan=plan, held=held)
            decoded = decode(data, admitted.counts)
            row = self.checks.check_values(admitted, decoded)
            self._commit(admitted, decoded, row)
        except Refusal as refusal:
            return self._refused(device, refusal)
        except StoreFull as error:
            return Verdict("store-full", str(error))
        return Verdict("accepted", "", True, header, admitted.counts, snr_db([row]))

    def admission(self, device: str, *, task: str, round: int, digest: bytes) -> Verdict | None:
        """Whether an update may be taken at present: None, or what to answer instead.

        The one place of these rules: an offer is held to them, and then the update that came.

        :param digest: SHA-256 of the update's bytes, or of its header and values alone.
        """
        plan = self._plan
        if task != self.spec.task:
            return Verdict("late", f"the update is of {task}; this is {self.spec.task}")
        if device in self._excluded:
            return Verdict("unknown-device", f"{device} is no accepted device any more")
        known = self.store.update(round, device)
        if known is not None and digest in (known.digest, known.payload_digest):
            return Verdict("duplicate", acknowledged=True, held=known.digest)
        if known is not None:
            reason = f"another update of {device} was accepted in round {round}"
            return Verdict("duplicate", reason, held=known.digest)
        if plan is None or round != plan.round:
            at = "no round is open" if plan is None else f"round {plan.round} is open"
            return Verdict("late", f"the update is of round {round}, and {at}")
        if device not in plan.cohort:
            return Verdict("not-in-cohort", f"{device} does not take part in round {round}")
        return None

    def decline(self, device: str, code: str, reason: str, *, round: int) -> bool:
        """A cohort member says that it will not send an update. False if it is of no consequence."""
        if self._plan is None or round != self._plan.round or not self.responses.expects(device):
            return False
        self.store.put_decline(round, device, code=code, reason=reason)
        self.responses.answer(device)
        return True

    def lost(self, device: str) -> None:
        """The device's connection died; see `ClosingRule.lost`."""
        self.responses.lost(device, now=self._monotonic())

    def back(self, device: str) -> None:
        self.responses.back(device)

    def exclude(self, *devices: str) -> None:
        """Nothing more is taken from these devices, nor expected of them; what was accepted stays."""
        self._excluded.update(devices)
        self.responses.answer(*devices)

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
        decision = self.responses.decide(self._monotonic() if now is None else now, ready=ready)
        if decision == "extend":
            # another number than before, so that devices see that the plan has changed
            self._plan = replace(plan, deadline_s=self.responses.announced_deadline_s)
        return decision == "close"

    def close(self) -> RoundSummary:
        """Makes the next global model of what was accepted, and commits the round.

        With fewer than `min_updates` the model stays as it is. Raises `StoreFull` if the disk is full; the
        round is then still open, and `close` may be called again.
        """
        plan, row = self._open_plan, self.store.last_round()
        updates = self.store.updates(plan.round)
        enough = len(updates) >= self._rules.min_updates
        following = self._next_model(enough=enough)
        summary = summarise(
            plan,
            updates,
            following.params,
            changed=enough,
            method=self.method,
            rules=self._rules,
            store=self.store,
            held=self._trained_on,
            evaluate=self.prepared.evaluate_global,
            wall_s=max(0.0, self._clock() - row.opened_at) if row is not None else 0.0,
        )
        server = self._advanced(following.params, summary) if enough else self._server
        with self.store.transaction():
            self.model.write(plan.round, following)  # its file is synced before the transaction that names it ends
            self.store.put("server_state", server_state_to_bytes(server))
            self.store.close_round(
                plan.round, result_digest=following.digest, metrics=summary.to_dict(), at=self._clock()
            )
        self.model.advance(plan.round, following)
        self._plan, self.closed_rounds, self._server = None, plan.round, server
        self._trained_on |= dict.fromkeys((update.device for update in updates), plan.global_digest)
        return summary

    # inside

    @property
    def _open_plan(self) -> RoundPlan:
        if self._plan is None:
            raise BadInput("no round is open, so none can be closed")
        return self._plan

    def _resume(self) -> None:
        stored = self.store.get("server_state")
        seed = self.prepared.task.seed
        self._server = self.method.server.initial(seed) if stored is None else server_state_from_bytes(stored)
        last = self.store.last_round()
        self.closed_rounds = 0 if last is None else last.round - (last.phase == "open")
        named = None if last is None else last.global_digest if last.phase == "open" else last.result_digest
        self.model.load(self.closed_rounds, named=named, initial=self.prepared.initial)
        # of each device, the model that it trained on when it was last accepted
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

    def _resume_open(self, row: StoredRound) -> None:
        self._begin(self._plan_of(row.round, row.cohort))
        for header, sent in self._stored_updates(row.round):
            self._aggregate.add(sent, header)
            self.responses.accept(header.device)
        self.responses.answer(*(device for _, device, _, _ in self.store.declines(row.round)))

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
            yield decoded.header, Sent.spread(decoded.values, shared)

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
        self._aggregate = RoundAggregate(
            self.method,
            self.layout,
            self.global_params,
            self._server,
            rules=self._rules,
            stored=lambda: (sent for _, sent in self._stored_updates(plan.round)),
            device=self._torch_device,
        )
        self.responses.begin(plan.cohort, now=self._monotonic())

    def _refused(self, device: str, refusal: Refusal) -> Verdict:
        if refusal.final:
            self.responses.answer(device)
        faults = 0
        if refusal.is_fault and self._plan is not None:
            try:
                faults = self.store.put_fault(self._plan.round, device, code=refusal.code)
            except StoreFull as error:
                log.warning("a fault of %s could not be noted: %s", device, error)
        return Verdict(refusal.code, refusal.reason, faults=faults)

    def _held(self, device: str) -> PublicState:
        stored = self.store.public_state(device)
        return self._newcomer if stored is None else PublicState.from_bytes(stored, size=self.layout.size)

    def _commit(self, admitted: Admitted, decoded: Decoded, update: UpdateRow) -> None:
        header = admitted.header
        device, row = header.device, self.store.device(header.device)
        known = row is not None and row.public_digest == header.public_digest
        # packing a mask takes longer than reading it, so what is there is copied
        before = (self.store.public_state(device) if known else None) or admitted.public.to_bytes()
        sent = Sent.spread(decoded.values, admitted.shared)
        after = self.method.advance_public(admitted.public, sent.values)
        charge = self.method.charge(terms_of(self._open_plan))
        with self.store.transaction():
            self.store.put_update(header.round, update, data=admitted.data, public_before=before)
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
        self._aggregate.add(sent, header, largest=decoded.largest)
        self.responses.accept(device)

    def _next_model(self, *, enough: bool) -> NextModel:
        """What devices get after the open round: at the end, what the method makes of all rounds."""
        before, round = self.global_params, self._open_plan.round
        after = self._aggregate.aggregated() if enough else before
        if round == self.spec.rounds:
            after = self.method.server.final(self._server, after)
        if after is before:
            return NextModel(before, self.global_digest, None)
        noise_stds = self._aggregate.noise_stds if enough else [0.0] * len(self.layout.layers)
        return self.model.step(
            after, task=self.spec.task, round=round, noise_stds=noise_stds, wire=self.prepared.task.wire
        )

    def _advanced(self, params: np.ndarray, summary: RoundSummary) -> ServerArrays:
        outcome = ClosedRound(
            round=summary.round,
            before=self.global_params,
            after=params,
            reports=self._aggregate.reports,
            accuracy=summary.accuracy_global,
            loss=summary.loss,
        )
        return self.method.server.advance(self._server, outcome)


def terms_of(plan: RoundPlan) -> RoundTerms:
    """What the round asks of every device; a device's own preference is known to itself only."""
    return RoundTerms(plan.noise_split, plan.controls)
