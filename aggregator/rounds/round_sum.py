"""Defines the sum of a round's updates: how an update is read and added, and how the aggregate is computed.

There are two kinds: `plain_sum.PlainSum` sees every update, `secure_sum.SecureSum` opens only their sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from hushfleet.aggregator.payloads.checked_update import CheckedUpdate
from hushfleet.aggregator.rounds.server_half import ServerRound
from hushfleet.aggregator.storage.store import AggregatorStore, ChargeRow
from hushfleet.array_api import Array
from hushfleet.privacy.charge import Charge
from hushfleet.wire.format.messages import RoundPlan


class AnswerCounts(NamedTuple):
    """The number of committee members, of their answers, and of bytes in all answers together."""

    members: int = 0
    answers: int = 0
    size: int = 0


class RoundSum(ABC):
    """The sum of one open round. Nothing in it depends on the order in which updates arrive.

    `cohort` holds the devices that take part. `answers` and `suspected_wraps` (how many values may have wrapped around,
    after `open` returned True; see `Ring`) are only for secure aggregation.
    """

    _plan: RoundPlan
    _server: ServerRound
    cohort: Collection[str]
    answers = AnswerCounts()
    suspected_wraps = 0

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of updates that were added."""

    def plan_of(self, round: int) -> RoundPlan:
        """Returns the plan for which an update of that round was made."""
        return self._plan

    @abstractmethod
    def read(self, update: CheckedUpdate) -> None:
        """Checks an authenticated update and fills in all that `commit` and `add` need. Raises `Refusal`."""

    @abstractmethod
    def add(self, update: CheckedUpdate) -> None:
        """Adds an update that is committed."""

    @abstractmethod
    def resume(self) -> list[str]:
        """Adds the stored updates of the round after a restart; returns their devices."""

    def open(self) -> bool:
        """Opens the sum, and keeps the result; returns whether the sum is known."""
        return True

    @property
    def reports(self) -> list[tuple[float, ...]]:
        """The numbers that devices reported besides their values, in the order of the devices' names."""
        return []

    @property
    @abstractmethod
    def noise_stds(self) -> list[float]:
        """The standard deviation of the aggregate's noise, in each layer."""

    @abstractmethod
    def totals(self) -> tuple[Array, Array]:
        """Returns the weighted sum of the sent values and the sum of their weights, float64 `[d]`, after `open`
        returned True."""

    def aggregated(self) -> np.ndarray:
        """Returns the new global vector before it is encoded, float32 `[d]`."""
        return self._server.aggregated(*self.totals())

    def mean(self) -> np.ndarray:
        """Returns the mean of the sent values, float32 `[d]`."""
        return self._server.mean(*self.totals())


def commit(store: AggregatorStore, update: CheckedUpdate, charge: Charge, *, summed_in: int) -> None:
    """Stores update, the device's next public state and its charge; call it inside `transaction`.

    :param summed_in: the open round.
    """
    header, device, after = update.header, update.device, update.after
    assert update.row is not None, "the update was not read"
    # what is in a partial sum is never read again
    data, before = (b"", b"") if update.summed is not None else (update.data, update.before.to_bytes())
    store.put_update(header.round, update.row, data=data, public_before=before, summed_in=summed_in)
    store.put_public_state(device, digest=after.digest(), state=after.to_bytes())
    update.charge = ChargeRow(
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
    store.put_charge(update.charge)
