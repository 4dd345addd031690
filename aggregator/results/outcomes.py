"""Counts the outcomes of each round from a run's event log: who answered, declined, came too late or was lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import get_args

from hushfleet.aggregator.results.fleet_state import Event, FleetState, Outcome

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
UNPAID: tuple[Outcome, ...] = ("accepted", "declined")
"""After another outcome a device may have trained, and been charged, without an update of it in a model."""

Rounds = Mapping[int, Collection[str]]


class Outcomes(FleetState):
    """The outcomes of the closed rounds of a run.

    `of_round` has the number of devices by outcome, for each closed round. `in_vain` has, by device, in how many rounds
    it may have trained although no update of it was accepted.

    :param accepted: by round, the devices whose updates the store has, because a kill may have cut a line of the log.
    :param declined: by round, the devices whose declines the store has.
    """

    def __init__(self, events: Iterable[Event], *, accepted: Rounds, declined: Rounds) -> None:
        super().__init__()
        self.of_round: dict[int, Counter[Outcome]] = {}
        self.in_vain: Counter[str] = Counter()
        self._accepted, self._declined = accepted, declined
        for event in events:
            self.apply(event)

    def _close(self, number: int) -> None:
        stored, declined = self._accepted.get(number, ()), self._declined.get(number, ())
        counts: Counter[Outcome] = Counter()
        for name, device in self.devices.items():
            if name in stored:
                device.part = "accepted"
            elif name in declined and device.is_open:
                device.part = "declined"
            if (outcome := self._outcome(device)) is not None:
                counts[outcome] += 1
                self.in_vain[name] += outcome not in UNPAID
        self.of_round[number] = counts
        super()._close(number)
