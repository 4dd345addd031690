"""Writes the coordinator's event log: each event once, although devices repeat messages and processes crash."""

from __future__ import annotations

import logging
from typing import Any, Literal

from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.round_events import open_fields, run_fields
from hushfleet.errors import StoreError
from hushfleet.wire.format.messages import Offer

log = logging.getLogger("hushfleet.aggregator")


class RunLog:
    """The events of one start of a run.

    :param events: the log; None to write none.
    """

    def __init__(self, events: EventLog | None, engine: RoundEngine) -> None:
        self._events, self._engine = events, engine
        self._offered: dict[str, int] = {}  # the round of each device's newest offer
        self._states: dict[str, str] = {}  # the state of each device
        self._broker_lost = False

    def note(self, kind: str, **fields: Any) -> None:
        """Writes an event; a full disk must not end the run."""
        if self._events is None:
            return
        try:
            self._events.write(kind, **fields)
        except StoreError as error:
            log.warning("%s", error)

    def begin(self) -> None:
        """Writes that the run starts or continues.

        If a process was killed between a transaction and its line in the log, the missing line comes from the store.
        """
        engine = self._engine
        devices = engine.prepared.task.data.devices
        self.note("run", **run_fields(engine.spec, engine="field", devices=devices))
        if self._events is None:
            return
        logged = {(event["event"], event.get("round")) for event in iterate_events(self._events.path)}
        for row in engine.store.rounds():
            if row.metrics is not None and ("round_close", row.round) not in logged:
                self.note("round_close", **row.metrics)
        plan = engine.plan
        if plan is not None and ("round_open", plan.round) not in logged:
            self.note("round_open", **open_fields(engine))

    def link(self, state: Literal["up", "down"]) -> None:
        """Writes a change of the connection to the broker; the first connection is no event."""
        lost = state == "down"
        if lost != self._broker_lost:
            self._broker_lost = lost
            self.note("link", state=state)

    def presence(self, device: str, state: str, *, board: str = "") -> None:
        """Writes the presence of a device if it has changed."""
        if self._states.get(device) != state:
            self._states[device] = state
            self.note("presence", device=device, state=state, board=board)

    def offer(self, device: str, offer: Offer) -> None:
        """Writes the offer of an update for the open round, once for each device and round."""
        plan = self._engine.plan
        if plan is None or device not in self._engine.cohort or (offer.task, offer.round) != (plan.task, plan.round):
            return
        if plan.phase != "open":  # a member's answer, which is no update
            return
        if self._offered.get(device) != offer.round:
            self._offered[device] = offer.round
            self.note("offer", round=offer.round, device=device, bytes=offer.size)
