"""Runs a world: the coordinator and the boards act when something has come or is due, and then the clock moves on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hushfleet.aggregator.devices.enrolment import Enrolment
from hushfleet.aggregator.devices.register import DeviceRegister
from hushfleet.aggregator.publish.prepare import PreparedTask
from hushfleet.aggregator.results.events import EventLog
from hushfleet.aggregator.rounds.coordinator import LONGEST_SLEEP_S, Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.world.board import WorldBoard
from hushfleet.simulator.world.clock import Actor, WorldClock
from hushfleet.simulator.world.hub import LocalHub, LocalLink
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.link.interface import Will


class WorldServer:
    """The aggregator of a world: one start of its process after the other, on one folder.

    :param began: unix seconds at the world's start.
    :param accept_s: seconds to check and add one update. `close_s`: to close a round.
    """

    def __init__(
        self,
        prepared: PreparedTask,
        folder: Path,
        *,
        clock: WorldClock,
        hub: LocalHub,
        began: float = 0.0,
        accept_s: float = 0.0,
        close_s: float = 0.0,
        engine_options: dict[str, Any] | None = None,
    ) -> None:
        self.prepared, self.folder = prepared, folder
        self._clock, self._hub, self._began = clock, hub, began
        self._accept_s, self._close_s, self._engine_options = accept_s, close_s, engine_options or {}
        self.actor = Actor(clock, self._act)
        self.identity, self.epoch = Identity.from_bytes(bytes(range(32))), 0
        self.coordinator: Coordinator | None = None

    def _wall(self) -> float:
        return self._began + self._clock.now

    def start(self) -> None:
        self.epoch += 1
        self.actor.is_off = False
        clock = self._clock
        self.store = AggregatorStore(self.folder, durable=False)
        self.register = DeviceRegister(self.folder / "aggregator", durable=False, wall=self._wall)
        engine = RoundEngine(self.store, self.prepared, clock=self._wall, monotonic=clock, **self._engine_options)
        self.coordinator = Coordinator(
            engine,
            self._link,
            identity=self.identity,
            epoch=self.epoch,
            enrolment=Enrolment(self.store, self.register, closed=False, clock=clock, wall=self._wall),
            rhythm=Rhythm(self.prepared.task.schedule, self.store, wall=self._wall, elapsed=clock),
            events=EventLog(self.folder / "events.jsonl", clock=self._wall),
            clock=clock,
        )
        self.coordinator.start()
        self.actor.wake()

    def _link(self, will: Will) -> LocalLink:
        self.link = self._hub.link("aggregator", will)
        self.link.on_event = self.actor.wake
        return self.link

    def _act(self) -> float:
        coordinator, link, clock = self.coordinator, self.link, self._clock
        if coordinator is None:
            return math.inf
        engine = coordinator.engine
        while True:
            link.waits_s = None
            before = engine.accepted, engine.closed_rounds
            coordinator.step(LONGEST_SLEEP_S)
            closed, accepted = engine.closed_rounds - before[1], max(0, engine.accepted - before[0])
            busy_s = closed * self._close_s + accepted * self._accept_s
            if busy_s:
                self.actor.busy_until = clock.now + busy_s
                return self.actor.busy_until
            if link.waits_s:
                return clock.now + link.waits_s


class World:
    """A broker, an aggregator and boards."""

    def __init__(self, clock: WorldClock, server: WorldServer, boards: Sequence[WorldBoard]) -> None:
        self.clock, self.server, self.boards = clock, server, boards

    def run(self, until: Callable[[], bool]) -> None:
        while not until() and self.clock.next_s < math.inf:
            self.clock.advance()
