"""Hands jobs to a workshop, and takes what comes back: the guardian's side of the pipe.

A worker runs programs from the network, so its words are untrusted. It may say how the round went, and what it has
trained; it cannot choose what the round costs, for which round the update is, or what the public state was. That the
values are clipped and noised is the worker's work, which nobody can check afterwards.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from hushfleet.edge_client.board.config import DeviceConfig
from hushfleet.edge_client.board.notes import notes_in
from hushfleet.edge_client.download import DifferenceChain
from hushfleet.edge_client.optional import drift
from hushfleet.edge_client.storage.kept import ChosenAccelerator
from hushfleet.edge_client.storage.round_commit import CodedRound, OutboxEntry
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.allowed import AllowedRound
from hushfleet.edge_client.worker.job import (
    Applied,
    Died,
    Finished,
    HeadChosen,
    HeadJob,
    Job,
    NeedsFeatures,
    Outcome,
    Told,
    Workshop,
)
from hushfleet.edge_client.worker.runtime import TaskRuntime
from hushfleet.errors import HushfleetError, Malformed, StoreError
from hushfleet.methods.public_bytes import public_digest
from hushfleet.schema import pack, unpack
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.spec import BlobRef
from hushfleet.wire.format.update import max_public_bytes, max_update_bytes, read_header, signed

MAX_LINES = 200
"""Lines of the log that are taken from one job."""
MOST_VECTORS = 16
"""A method's private state takes at most so many vectors of the model's size."""
MOST_APPLYING_S = 60.0
"""A worker may add differences to a model for so long."""
_ROOM_BYTES = 1 << 20

_log = logging.getLogger("hushfleet.edge")


class Handover:
    """Makes jobs from the store, and checks and stores their outcomes.

    A worker that has finished its job is kept for the next one of the same task, `worker.keep_s` seconds.

    :param clock: monotonic seconds.
    """

    def __init__(
        self,
        config: DeviceConfig,
        store: DeviceStore,
        workshop: Workshop,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._store, self._workshop, self._clock = config, store, workshop, clock
        self._order_of_features: list[Literal["make", "kept", "none"]] = []
        self._kept_for: tuple[bytes, bool, str] | None = None  # what a worker serves without a new start
        self._kept_until: float | None = None  # None: it trains, or there is none
        self._state_dir = config.store_path.parent
        self._data_note, self._training_note = notes_in(None if config.simulation else self._state_dir)
        self._lines = 0
        self._job: Job | None = None

    def begin_round(
        self,
        task: TaskRuntime,
        round: AllowedRound,
        model: bytes,
        *,
        nominal_s: float | None,
        known: bytes | None,
        again: bool,
        blank: bool = False,
    ) -> None:
        """Starts the training of a round. Raises `HushfleetError` or `OSError`.

        :param known: as `Job.trained_samples`.
        :param again: whether the client, or a worker, has ended abruptly in this round.
        :param blank: as `Job.blank`.
        """
        plan, continues = round.plan, task.spec.continues
        state = self._store.stored_state(plan.task)
        no_earlier = state is not None or continues is None
        features = "none" if round.asks else self._features(task)
        package, graphs = task.package(graphs=features == "none")
        accelerator = self._store.accelerator()
        tells_drift = self._config.limits.tell_drift
        self._begin(
            Job(
                self._config,
                package,
                graphs,
                plan,
                model,
                round.at,
                charge=round.charge,
                membership_list=None if round.membership_list is None else round.membership_list.to_bytes(),
                mask_keys=round.mask_keys,
                state=state,
                earlier=None if no_earlier or continues is None else self._store.stored_state(continues.task),
                spent=self._store.ledger.totals(plan.task),
                hides=task.constant_time,
                nominal_s=nominal_s,
                worse=drift.has_become_worse(drift.read_tests(self._state_dir)) if tells_drift else None,
                accelerator=None if accelerator is None else pack(accelerator),
                processor_only=again or task.deaths > 0,
                trained_samples=known,
                arrivals=self._store.arrivals.all() if task.spec.data_window_s else (),
                blank=blank,
                features=features,
            )
        )

    def _features(self, task: TaskRuntime) -> Literal["none", "kept"]:
        """Returns whether the task trains on features from the board's file: on those of all samples."""
        model = task.spec.model
        is_kept = model.is_linear and model.features is not None and not task.spec.data_window_s
        return "kept" if is_kept and self._config.simulation is None else "none"

    def begin_head(self, task: TaskRuntime, plan: RoundPlan, head: HeadJob, model: bytes) -> None:
        """Starts the choice of a personalized head. Raises `HushfleetError` or `OSError`."""
        features = "none" if head.unlabelled or task.spec.held_out else self._features(task)
        package, graphs = task.package(graphs=features == "none")
        self._begin(Job(self._config, package, graphs, plan, model, task.party.now(), head=head, features=features))

    def add_differences(self, task: TaskRuntime, chain: DifferenceChain) -> bytes | None:
        """Has the worker that will train add differences to a model; `added` returns the sum.

        A simulation has no memory to spare, and gets the sum at once. Raises `Malformed` or `OSError`.
        """
        if "numpy" in sys.modules:  # a simulation, which has no memory to spare
            from hushfleet.wire.format.difference import apply_all

            return apply_all(chain.base, chain.differences, chain.plan.task, chain.counts)
        package, _ = task.package(graphs=False)
        job = Job(self._config, package, (), chain.plan, chain.base, task.party.now())
        adding = replace(job, processor_only=task.deaths > 0, differences=chain.differences, counts=chain.counts)
        self._begin(replace(adding, features=self._features(task)))  # as the round's job, which the worker is kept for
        self._kept_until = self._clock() + MOST_APPLYING_S
        return None

    def added(self, task: TaskRuntime) -> bytes | None:
        """Returns the model that the differences lead to; None while the worker adds. Raises `Malformed`."""
        outcome = self.poll(task)
        if outcome is None and self._kept_until is not None and self._clock() < self._kept_until:
            return None
        if not isinstance(outcome, Applied):
            self.give_up()
            why = getattr(outcome, "reason", "") or getattr(outcome, "why", "it took too long")
            raise Malformed(f"the differences were not added: {why}")
        return outcome.model

    def _begin(self, job: Job) -> None:
        self._lines, self._kept_until = 0, None
        self._order_of_features = ["make", "kept", "none"] if job.features == "kept" else []
        self._start(job)

    def _start(self, job: Job) -> None:
        serves = BlobRef.of(job.package).digest, job.processor_only, job.features
        if serves != self._kept_for:
            self._workshop.give_up()
        self._kept_for = serves
        self._workshop.begin(job)
        self._job = job if self._order_of_features else job.light()

    def poll(self, task: TaskRuntime | None) -> Outcome | None:
        """Returns the outcome, once; None while the worker works."""
        outcome = self._workshop.poll()
        for told in self._workshop.told():  # before its worker is given up
            self._hear(told, task)
        if isinstance(outcome, NeedsFeatures):
            outcome = self._goes_on(task)
        if outcome is not None and self._job is not None:
            self._job, self._order_of_features = self._job.light(), []
        if outcome is not None:  # after a failure nobody knows what state it is in
            keep_s = self._config.worker.keep_s if isinstance(outcome, Finished | HeadChosen) else 0.0
            if isinstance(outcome, Applied):  # the round begins now
                keep_s = max(MOST_APPLYING_S, self._config.worker.keep_s)
            self._kept_until = self._clock() + keep_s
            self.rest()
        return outcome

    def _goes_on(self, task: TaskRuntime | None) -> Died | None:
        """Begins the job's next process: one that makes the features, then the round with them, or at last without the
        file, if it could not be written."""
        if task is None or self._job is None or not self._order_of_features:
            return Died("lacks features where there are none")
        features = self._order_of_features.pop(0)
        try:
            _, graphs = task.package(graphs=features != "kept")
            self._start(replace(self._job, features=features, graphs=graphs))
        except (OSError, HushfleetError) as error:
            return Died(f"could not be started: {error}")
        return None

    def rest(self, *, at_once: bool = False) -> None:
        """Ends a worker that has waited for the next job, or added differences, long enough.

        :param at_once: whether no next one is expected.
        """
        if self._kept_until is not None and (at_once or self._clock() >= self._kept_until):
            self.give_up()

    def give_up(self) -> None:
        """Ends the worker, also with a job; nothing was spent."""
        self._kept_until = None
        self._workshop.give_up()

    def died(self, died: Died) -> None:
        """Notes a worker that ended without an outcome: the GPU's driver may be the cause."""
        kept = self._store.accelerator()
        if kept is not None and kept.used == "cuda":
            self._store.keep_accelerator(replace(kept, failed=f"the training process {died.why}"))

    def commit(self, done: Finished | HeadChosen, round: AllowedRound, task: TaskRuntime) -> OutboxEntry:
        """Signs and stores a trained round. Raises `Malformed` for one that is not what was ordered, and `StoreError`.

        The keys of new samples are on the disk before the round is.
        """
        try:
            if not isinstance(done, Finished):
                raise Malformed("the worker has chosen a head where a round was wanted")
            coded = self._checked(done, round, task)
        except Malformed:
            self.give_up()
            raise
        if done.arrived:
            self._store.arrivals.of(done.arrived, now=round.at)
        entry = self._store.commit_coded(coded)
        self._training_note.keep(done.failed)
        return entry

    def _checked(self, done: Finished, round: AllowedRound, task: TaskRuntime) -> CodedRound:
        plan, charge, state, job = round.plan, round.charge, done.state, self._job
        assert job is not None
        size = round.party.spec.model.layout.size
        most = MOST_VECTORS * 4 * size + _ROOM_BYTES
        sizes_fit = (
            len(done.update) <= max_update_bytes(size if plan.secure is None else round.secure.sent)
            and len(state.public) <= max_public_bytes(size)
            and len(state.private) <= most
            and (state.own is None or len(state.own) == 4 * size)
        )
        if done.charge != charge or state.size != size or not sizes_fit:
            raise Malformed("a worker's round has another charge or another size than the plan")
        public_digest(state.public, size=size)
        before = public_digest(done.public_before, size=size)
        held = task.newcomer_digest if job.state is None else public_digest(job.state.public, size=size)
        header = read_header(done.update)
        found = header.task, header.round, header.device, header.multiplier_server, header.noise_split
        wanted = plan.task, plan.round, round.party.device, charge.noise_multiplier, charge.noise_split
        if found != wanted or not header.public_digest == before == held:
            raise Malformed("a worker's update is for another round, or names another charge or state")
        return CodedRound(
            plan.task,
            plan.round,
            charge,
            state,
            signed(done.update, identity=self._store.identity),
            done.public_before,
            context=None if plan.secure is None else round.secure.context,
            package=round.party.package,
            at=round.party.now(),
            window=round.window,
        )

    def _hear(self, told: Told, task: TaskRuntime | None) -> None:
        if told.level and self._lines < MAX_LINES:
            self._lines += 1
            _log.log(told.level, "%s", told.text)
        if told.nominal_s is not None and task is not None:
            task.nominal_s = told.nominal_s
        if told.data_use is not None:
            self._data_note.keep(told.data_use)
        if told.accelerator is not None:
            try:
                self._store.keep_accelerator(unpack(ChosenAccelerator, told.accelerator, what="the choice"))
            except (Malformed, StoreError) as error:  # a full disk must not end a round that goes on
                _log.error("%s", error)
