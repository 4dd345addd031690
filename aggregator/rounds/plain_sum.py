"""The updates of a round that the aggregator sees one by one: checked, decoded, added.

Nothing here depends on the order in which updates came, so a restarted aggregator that adds the stored ones again has
the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from hushfleet.aggregator.config.sections import RoundSection
from hushfleet.aggregator.ingest.checks import UpdateChecks
from hushfleet.aggregator.ingest.decoding import decode
from hushfleet.aggregator.ingest.exact_sum import ExactSum
from hushfleet.aggregator.ingest.robust import Sent, robust_sums
from hushfleet.aggregator.publish.model_step import Noise, aggregate_noise_stds, least_noise_stds
from hushfleet.aggregator.rounds.round_sum import Answers, Sound
from hushfleet.aggregator.rounds.server_half import ServerHalf
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.errors import StoreError
from hushfleet.methods.state import PublicState
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import UpdateHeader


class PlainSum:
    """The sums of one round, and what the accepted headers say beside the values.

    :param server: makes the new global vector of them.
    :param rules: of the task: what the aggregate is.
    :param device: that holds the sums of a mean, see `ExactSum`.
    """

    def __init__(
        self,
        plan: RoundPlan,
        server: ServerHalf,
        *,
        checks: UpdateChecks,
        store: AggregatorStore,
        rules: RoundSection,
        device: str,
    ) -> None:
        self._plan, self._server, self._checks, self._store, self._rules = plan, server, checks, store, rules
        self._layout = checks.layout
        self._sums = ExactSum(self._layout.size, device=device) if rules.aggregation == "mean" else None
        self._reports: dict[str, tuple[float, ...]] = {}
        self._noise: dict[str, Noise] = {}

    @property
    def cohort(self) -> Collection[str]:
        return self._plan.cohort

    @property
    def count(self) -> int:
        return len(self._noise)

    def read(self, header: UpdateHeader, data: bytes, *, payload: bytes) -> Sound:
        held = self._checks.held(self._store, header.device)
        admitted = self._checks.check_header(header, data, payload=payload, plan=self._plan, held=held)
        decoded = decode(header, data, admitted.counts, update_format=self._checks.update_format)
        row = self._checks.check_values(admitted, decoded)
        sent = Sent.spread(decoded.values, admitted.shared)
        after = self._server.method.advance_public(admitted.public, sent.values)

        def add() -> None:
            self._add(sent, header, largest=decoded.largest)

        return Sound(header, data, row, admitted.counts, admitted.public, after, add)

    def resume(self) -> list[str]:
        for header, sent in self._stored():
            self._add(sent, header)
        return sorted(self._noise)

    @property
    def answers(self) -> Answers:
        return Answers()

    @property
    def suspected_wraps(self) -> int:
        return 0

    def open(self) -> bool:
        return True

    @property
    def reports(self) -> list[tuple[float, ...]]:
        return [report for _, report in sorted(self._reports.items())]

    @property
    def noise_stds(self) -> list[float]:
        """Of a robust aggregate what it is at least."""
        of_aggregate = least_noise_stds if self._sums is None else aggregate_noise_stds
        return of_aggregate(self._noise.values(), layers=len(self._layout.layers))

    def aggregated(self) -> np.ndarray:
        if self._sums is not None:
            return self._server.aggregated(self._sums.sums, self._sums.weights)
        updates, size = len(self._noise), self._layout.size
        found = robust_sums(self._rules, lambda: (sent for _, sent in self._stored()), devices=updates, size=size)
        return self._server.aggregated(*found)

    def _add(self, sent: Sent, header: UpdateHeader, *, largest: float | None = None) -> None:
        """:param largest: the largest magnitude among the values, where it is known."""
        weight = self._server.weight(sent.values)
        if self._sums is not None:
            shared = None if header.value_count == sent.values.size else sent.shared
            self._sums.add(sent.values, shared, weight=weight, largest=largest)
        self._reports[header.device] = header.report
        self._noise[header.device] = Noise(weight, header.noise_stds)

    def _stored(self) -> Iterator[tuple[UpdateHeader, Sent]]:
        """What was accepted, from its bytes, in the order of the devices' names."""
        number = self._plan.round
        for update in self._store.updates(number):
            stored, device = self._store.update_data(number, update.device), self._store.device(update.device)
            if stored is None or device is None:
                raise StoreError(f"the update of {update.device} in round {number} has lost its bytes")
            data, public_before = stored
            shared = ~PublicState.from_bytes(public_before, size=self._layout.size).mask
            form = self._checks.update_format
            header, _ = form.authenticate(data, public_key=device.public_key)
            yield header, Sent.spread(form.values(header, data, counts=self._checks.counts(shared)), shared)
