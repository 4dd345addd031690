"""What the accepted updates of one round amount to: their aggregate, its noise, and what else devices reported.

Nothing here depends on the order in which updates came, so a restarted aggregator that adds the stored ones again has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from hushfleet.aggregator.config.task import RoundSection
from hushfleet.aggregator.ingest.exact_sum import ExactSum
from hushfleet.aggregator.ingest.robust import Sent, robust_sums
from hushfleet.aggregator.publish.model_step import Noise, aggregate_noise_stds, least_noise_stds
from hushfleet.errors import HushfleetError
from hushfleet.methods.method import TaskMethod
from hushfleet.methods.server import ServerArrays
from hushfleet.model.params import ParamLayout
from hushfleet.wire.format.update import UpdateHeader


class RoundAggregate:
    """The sums of one round, and what the accepted headers say beside the values.

    :param before: the global vector float32 `[d]` of the round.
    :param state: of the method's server half.
    :param rules: of the task: what the aggregate is.
    :param stored: reads all that was added once more; not asked where a mean is wanted.
    :param device: the torch device that holds the sums of a mean.
    """

    def __init__(
        self,
        method: TaskMethod,
        layout: ParamLayout,
        before: np.ndarray,
        state: ServerArrays,
        *,
        rules: RoundSection,
        stored: Callable[[], Iterator[Sent]],
        device: torch.device,
    ) -> None:
        self._method = method
        self._layout = layout
        self._before = before
        self._state = state
        self._rules = rules
        self._stored = stored
        self._device = device
        self._sums = ExactSum(layout.size, device=device) if rules.aggregation == "mean" else None
        self._reports: dict[str, tuple[float, ...]] = {}
        self._noise: dict[str, Noise] = {}

    def add(self, sent: Sent, header: UpdateHeader, *, largest: float | None = None) -> None:
        """:param largest: the largest magnitude among the values, where it is known."""
        weight = self._method.server.weight(self._before, sent.values, self._layout)
        if self._sums is not None:
            shared = None if header.value_count == sent.values.size else sent.shared
            self._sums.add(sent.values, shared, weight=weight, largest=largest)
        self._reports[header.device] = header.report
        self._noise[header.device] = Noise(weight, header.noise_stds)

    @property
    def reports(self) -> list[tuple[float, ...]]:
        """In the order of the devices' names."""
        return [report for _, report in sorted(self._reports.items())]

    @property
    def noise_stds(self) -> list[float]:
        """Of the aggregate, in each layer; of a robust one what it is at least."""
        of_aggregate = least_noise_stds if self._sums is None else aggregate_noise_stds
        return of_aggregate(self._noise.values(), layers=len(self._layout.layers))

    def aggregated(self) -> np.ndarray:
        """The method's server half in float64, as float32 `[d]`."""
        before = torch.from_numpy(self._before.astype(np.float64)).to(self._device)
        if self._sums is not None:
            sums, weights = self._sums.sums, self._sums.weights
        else:
            found = robust_sums(self._rules, self._stored, devices=len(self._reports), size=self._layout.size)
            sums, weights = (each.to(self._device) for each in found)
        after = self._method.server.aggregate(self._state, before, sums, weights)
        params: np.ndarray = after.to(torch.float32).cpu().numpy()
        if not np.isfinite(params).all():
            raise HushfleetError(f"{self._method.name}.aggregate gave values that are not finite")
        return params
