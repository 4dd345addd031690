"""The updates of a round that the aggregator sees one by one: checked, decoded, added.

Nothing here depends on the order in which updates came, so a restarted aggregator that adds the stored ones again has
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hushfleet.aggregator.config.sections import RoundSection
from hushfleet.aggregator.ingest.checked_update import CheckedUpdate
from hushfleet.aggregator.ingest.checks import UpdateChecks
from hushfleet.aggregator.ingest.exact_sum import ExactSum
from hushfleet.aggregator.ingest.robust import robust_sums
from hushfleet.aggregator.publish.model_step import Noise, aggregate_noise_stds, least_noise_stds
from hushfleet.aggregator.rounds.round_sum import RoundSum
from hushfleet.aggregator.rounds.server_half import ServerHalf
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.wire.format.messages import RoundPlan


class PlainSum(RoundSum):
    """The sums of one round, and what the accepted headers say beside the values.

    :param server: makes the new global vector of them.
    :param rules: the task's, with the kind of aggregate.
    :param device: holds the sums of a mean, see `ExactSum`.
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
        self._layout, self.cohort = checks.layout, plan.cohort
        self._sums = ExactSum(self._layout.size, device=device) if rules.aggregation == "mean" else None
        self._reports: dict[str, tuple[float, ...]] = {}
        self._noise: dict[str, Noise] = {}

    @property
    def count(self) -> int:
        return len(self._noise)

    def read(self, update: CheckedUpdate) -> None:
        self._checks.check(update, self._plan)

    def add(self, update: CheckedUpdate) -> None:
        values, weight = update.values, self._server.weight(update.values)
        if self._sums is not None:
            shared = None if update.header.value_count == values.size else update.shared
            self._sums.add(values, shared, weight=weight, largest=max(update.peaks, default=None))
        self._reports[update.device] = update.header.report
        self._noise[update.device] = Noise(weight, update.header.noise_stds)

    def resume(self) -> list[str]:
        for update in self._stored():
            self.add(update)
        return sorted(self._noise)

    @property
    def reports(self) -> list[tuple[float, ...]]:
        return [report for _, report in sorted(self._reports.items())]

    @property
    def noise_stds(self) -> list[float]:
        """Standard deviation of the aggregate's noise in each layer; for a robust aggregate, a lower bound."""
        of_aggregate = least_noise_stds if self._sums is None else aggregate_noise_stds
        return of_aggregate(self._noise.values(), layers=len(self._layout.layers))

    def aggregated(self) -> np.ndarray:
        if self._sums is not None:
            return self._server.aggregated(self._sums.sums, self._sums.weights)
        found = robust_sums(self._rules, self._stored, devices=len(self._noise), size=self._layout.size)
        return self._server.aggregated(*found)

    def _stored(self) -> Iterator[CheckedUpdate]:
        """Yields what was accepted, from its bytes, in the order of the devices' names."""
        for row in self._store.updates(self._plan.round):
            yield self._checks.stored(row.device, self._plan.round)
