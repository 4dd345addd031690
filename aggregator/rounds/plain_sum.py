"""Sums the updates of a round that the aggregator sees one by one: checks, decodes and adds them.

Nothing here depends on the order in which updates arrive, so a restarted aggregator that adds the stored updates again
gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace

from hushfleet.aggregator.config.round_section import RoundSection
from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.payloads.checks import UpdateChecks
from hushfleet.aggregator.payloads.exact_sum import ExactSum
from hushfleet.aggregator.payloads.model_step import Noise, aggregate_noise_stds, least_noise_stds
from hushfleet.aggregator.payloads.robust import robust_sums
from hushfleet.aggregator.rounds.round_sum import RoundSum
from hushfleet.aggregator.rounds.server_half import ServerRound
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.array_api import Array
from hushfleet.wire.format.messages import RoundPlan


class PlainSum(RoundSum):
    """The sums of one round, and the other data of the accepted headers.

    :param server: computes the new global vector from them.
    :param rules: the task's rules, with the kind of aggregate.
    :param device: holds the sums of a mean, see `ExactSum`.
    """

    def __init__(
        self,
        plan: RoundPlan,
        server: ServerRound,
        *,
        checks: UpdateChecks,
        store: AggregatorStore,
        rules: RoundSection,
        device: str,
    ) -> None:
        self._plan, self._server, self._checks, self._store, self._rules = plan, server, checks, store, rules
        self._layout = checks.layout
        self.cohort = AnyDevice(store) if plan.max_staleness else plan.cohort
        self._sums = ExactSum(self._layout.size, device=device) if rules.aggregation == "mean" else None
        self._reports: dict[tuple[str, int], tuple[float, ...]] = {}  # by device and round, like `_noise`
        self._noise: dict[tuple[str, int], Noise] = {}

    @property
    def count(self) -> int:
        return len(self._noise)

    def plan_of(self, round: int) -> RoundPlan:
        if round == self._plan.round:
            return self._plan
        return replace(self._plan, round=round, controls=self._store.controls().get(round, {}))

    def read(self, update: CheckedUpdate) -> None:
        self._checks.check(update, self.plan_of(update.round))

    def add(self, update: CheckedUpdate) -> None:
        header, summed = update.header, update.summed
        weight = self._server.weight(update.values) if summed is None else summed.weight
        update.staleness = self._plan.round - header.round
        discount = 1 / math.sqrt(1 + update.staleness)
        if self._sums is not None and summed is None:
            values = update.values
            shared = None if header.value_count == values.size else update.shared
            largest = max(update.peaks, default=None)
            self._sums.add(values, shared, weight=weight, discount=discount, largest=largest)
        made = update.device, header.round
        self._reports[made] = header.report
        self._noise[made] = Noise(weight, tuple(discount * std for std in header.noise_stds))

    def merge(self, partial: ExactSum) -> None:
        """Adds the values of updates that `add` has taken without values."""
        assert self._sums is not None
        self._sums.merge(partial)

    def resume(self) -> list[str]:
        for update in self._stored():
            self.add(update)
        return sorted(device for device, _ in self._noise)

    @property
    def reports(self) -> list[tuple[float, ...]]:
        return [report for _, report in sorted(self._reports.items())]

    @property
    def noise_stds(self) -> list[float]:
        """Standard deviation of the aggregate's noise in each layer; for a robust aggregate, a lower bound."""
        of_aggregate = least_noise_stds if self._sums is None else aggregate_noise_stds
        return of_aggregate(self._noise.values(), layers=len(self._layout.layers))

    def totals(self) -> tuple[Array, Array]:
        if self._sums is not None:
            return self._sums.sums, self._sums.weights
        return robust_sums(self._rules, self._stored, devices=len(self._noise), size=self._layout.size)

    def _stored(self) -> Iterator[CheckedUpdate]:
        """Yields the accepted updates, decoded from their bytes, in the order of the devices' names."""
        for row in self._store.updates(self._plan.round):
            yield self._checks.stored(row.device, row.round)


class AnyDevice(Collection[str]):
    """In place of a cohort: any device of the run may take part. Iteration gives the devices known so far."""

    def __init__(self, store: AggregatorStore) -> None:
        self._store = store

    def __contains__(self, device: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return (row.device for row in self._store.devices())

    def __len__(self) -> int:
        return len(self._store.devices())
