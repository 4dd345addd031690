"""Keeps the results of a run's closed rounds: global model, state of the server half, and each device's last model.

A closing round stores all of it in one transaction, so a new process finds the state of the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hushfleet.aggregator.payloads.model_step import worth_offering
from hushfleet.aggregator.payloads.published_model import NextModel, PublishedModel
from hushfleet.aggregator.results.metrics import RoundSummary
from hushfleet.aggregator.rounds.policy import rises_no_more
from hushfleet.aggregator.rounds.round_sum import RoundSum
from hushfleet.aggregator.rounds.server_half import ServerRound, server_state_from_bytes, server_state_to_bytes
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.methods.server import ClosedRound, ServerArrays, ServerHalf
from hushfleet.wire.format.difference import params_digest
from hushfleet.wire.format.messages import Phase, RoundPlan, SecurePlan

if TYPE_CHECKING:
    from hushfleet.aggregator.payloads.prepare import PreparedTask


class TaskProgress:
    """The progress of a task, read from the store at its creation. Raises `StoreError` if the store is damaged.

    `trained_on` is, for each device, SHA-256 of the model on which its last accepted update was trained. The caller
    sets `ended`, a reason in words, if no further round opens, for example because of a calendar.
    """

    def __init__(self, store: AggregatorStore, prepared: PreparedTask) -> None:
        self._store, self._prepared = store, prepared
        self._method, self._layout = prepared.method, prepared.spec.model.layout
        self.model = PublishedModel(store, prepared.spec, self._method.server.vectors, period=prepared.period)
        stored = store.get("server_state")
        initial = self._method.server.initial
        self._server = initial(prepared.task.seed) if stored is None else server_state_from_bytes(stored)
        last = store.last_round()
        self.closed_rounds = 0 if last is None else last.round - (last.phase != "closed")
        named = None if last is None else last.global_digest if last.phase != "closed" else last.result_digest
        self.model.load(self.closed_rounds, named=named, initial=prepared.initial)
        self.trained_on: dict[str, bytes] = store.held_models(until=self.closed_rounds)
        metrics = [row.metrics or {} for row in store.rounds()[: self.closed_rounds]]
        self._accuracies: list[float | None] = [each.get("accuracy_global") for each in metrics]
        self.ended = ""

    @property
    def finished(self) -> bool:
        """True if all rounds are closed, the model has not improved for `patience` rounds, or no round will open."""
        rules, closed = self._prepared.task.round, self.closed_rounds >= self._prepared.spec.rounds
        return closed or bool(self.ended) or rises_no_more(self._accuracies, rules.patience)

    @property
    def no_round(self) -> RoundPlan:
        """The plan that devices get while no round is open."""
        phase: Phase = "finished" if self.finished else "closed"
        return self._announced(self.closed_rounds, phase, cohort={}, noise_split=1, deadline_s=0.0)

    def plan(self, number: int, cohort: dict[str, bytes], secure: SecurePlan | None = None) -> RoundPlan:
        """Returns the plan of a round.

        :param cohort: device -> digest of its public state; empty for secure aggregation, whose plan names no devices.
            It is left out if the task's rules have no cohort.
        """
        task, rules = self._prepared.spec, self._prepared.task.round
        cohort = cohort if rules.has_cohort else {}
        secure_spec = task.privacy.secure
        controls = {} if task.asks(number) else self.server_half.controls(task.training_number(number))
        held = [digest for device, digest in self.trained_on.items() if not cohort or device in cohort]
        return self._announced(
            number,
            "unmask" if secure is not None and secure.included else "open",
            cohort=cohort,
            noise_split=secure_spec.honest_devices if secure_spec else min(task.privacy.noise_split, len(cohort) or 1),
            deadline_s=rules.deadline_s,
            controls=controls,
            differences=worth_offering(self.model.differences.refs, held),
            secure=secure,
        )

    def _announced(self, number: int, phase: Phase, **fields: Any) -> RoundPlan:
        spec, model, most = self._prepared.spec, self.model, self._prepared.task.round.max_staleness
        size = model.published.nbytes
        fields["max_staleness"] = most or 0
        return RoundPlan(spec.task, number, spec.rounds, phase, model.digest, size, **fields)

    @property
    def server_half(self) -> ServerRound:
        """The method's server half for the next round, or the open one."""
        return ServerRound(self._method, self.model.params, self._server, self._prepared.task.data.devices)

    def next_model(self, round: int, collected: RoundSum | None) -> NextModel:
        """Returns the model that devices get after the open round; after the last training, the method's final model.

        :param collected: its open sum; None if the model does not change.
        """
        before = self.model.params
        after = before if collected is None else collected.aggregated()
        if round == self._prepared.spec.last_training_round:
            after = self._method.server.final(self._server, after)
            if self._method.server.averages_periods and self._prepared.period > 1:
                first = self.model.first
                after = (first + (after - first) / math.sqrt(self._prepared.period)).astype(np.float32)
        if after is before:
            return NextModel(before, self.model.published, self.model.digest, None)
        return self._step(after, self.model.vectors, round, collected)

    def _step(
        self, target: np.ndarray, vectors: Mapping[str, np.ndarray], round: int, collected: RoundSum | None
    ) -> NextModel:
        noise_stds = [0.0] * len(self._layout.layers) if collected is None else collected.noise_stds
        spec, wire = self._prepared.spec, self._prepared.task.wire
        return self.model.step(target, vectors, task=spec.task, round=round, noise_stds=noise_stds, wire=wire)

    def close(
        self,
        following: NextModel,
        summary: RoundSummary,
        collected: RoundSum | None,
        *,
        at: float,
    ) -> None:
        """Commits the round of `summary`. Raises `StoreFull`, and may then be called again.

        :param collected: as for `next_model`.
        :param at: unix seconds.
        """
        round = summary.round
        server = self._server
        if collected is not None:
            server = self._advanced(following, summary, collected)
            following, server = self._with_vectors(following, server, round, collected)
        with self._store.transaction():
            self.model.write(round, following)  # its file is synced before the transaction that names it ends
            self._store.put("server_state", server_state_to_bytes(server))
            self._store.close_round(round, result_digest=following.digest, metrics=summary.to_dict(), at=at)
        self.model.advance(round, following)
        self.closed_rounds, self._server = round, server
        self._accuracies.append(summary.accuracy_global)
        self.trained_on |= dict(self._store.summed_models(round))

    def _with_vectors(
        self, following: NextModel, server: ServerArrays, round: int, collected: RoundSum
    ) -> tuple[NextModel, ServerArrays]:
        """Returns the model with the new state's vectors, and that state with the vectors in the form devices get."""
        names, params = self._method.server.vectors, following.params
        if not names:
            return following, server
        vectors = {name: np.asarray(server.get(name, np.zeros_like(params)), np.float32) for name in names}
        for name, vector in vectors.items():
            if vector.shape != params.shape or not np.isfinite(vector).all():
                raise HushfleetError(
                    f"{self._method.name}: the server's vector {name!r} is of shape {vector.shape} or not finite; "
                    f"devices take {params.size} finite values"
                )
        found = self._step(following.target, vectors, round, collected)
        if not np.array_equal(found.params, params):  # no difference leads to the tested model, so it is sent whole
            whole = np.concatenate([params, *vectors.values()])
            found = NextModel(following.target, whole, params_digest(whole), None)
        return found, server | self.model.vectors_of(found.published)

    def _advanced(self, following: NextModel, summary: RoundSummary, collected: RoundSum) -> ServerArrays:
        server = self._method.server
        if type(server).advance is ServerHalf.advance:
            return self._server
        outcome = ClosedRound(
            round=self._prepared.spec.training_number(summary.round),
            before=self.model.params,
            after=following.params,
            reports=collected.reports,
            accuracy=summary.accuracy_global,
            loss=summary.loss,
            updates=summary.participants,
            devices=self._prepared.task.data.devices,
            mean=collected.mean(),
        )
        after = server.advance(self._server, outcome)
        if not isinstance(after, dict):
            raise BadInput(
                f"{self._method.name}.advance returned {type(after).__name__}: must return a dict of named arrays, the "
                "server's state"
            )
        return after
