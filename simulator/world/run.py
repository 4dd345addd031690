"""Runs a world: a broker, an aggregator and boards act when something has come or is due, and the clock moves on.

A world plays a scenario: boards lose their power or their network, the broker and the aggregator are killed. What is
killed is dropped, with what it holds in memory, and its store is opened again at its next start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from hushfleet.aggregator.config.calendar import Schedule as Windows
from hushfleet.aggregator.payloads.prepare import PreparedTask
from hushfleet.aggregator.results.events import EventLog, OnEvent
from hushfleet.aggregator.rounds.coordinator import LONGEST_SLEEP_S, Coordinator
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.policy import least_devices
from hushfleet.aggregator.rounds.rhythm import Rhythm
from hushfleet.aggregator.storage.enrolment import Enrolment
from hushfleet.aggregator.storage.identity_file import load_or_create, next_epoch
from hushfleet.aggregator.storage.register import DeviceRegister
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.simulator.schedule import Action, Playback, Schedule
from hushfleet.simulator.world.board import WorldBoard
from hushfleet.simulator.world.clock import Actor, WorldClock
from hushfleet.simulator.world.hub import LocalHub, LocalLink
from hushfleet.simulator.world.outcomes import STARTS
from hushfleet.simulator.world.times import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, LOST_NOTICED_S
from hushfleet.wire.format.identity import Identity
from hushfleet.wire.link.interface import Will

SERVER_START_S = 5.0
"""Time from the aggregator's process start until it is connected, mostly for loading and exporting the graphs."""
ROUNDING_S = 1e-3  # added to a time that is a sum, so that rounding does not make it too early
_STREAM = 0x574F524C


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Durations after a link breaks.

    :param lost_noticed_s: until the broker notices; 0 if a process is killed and its system closes the connection, as
        in the live engine.
    :param first_backoff_s: upper end of the first random wait before a new attempt; `longest_backoff_s`: of any wait.
    """

    lost_noticed_s: float = LOST_NOTICED_S
    first_backoff_s: float = FIRST_BACKOFF_S
    longest_backoff_s: float = LONGEST_BACKOFF_S
    server_start_s: float = SERVER_START_S


class WorldServer:
    """The aggregator of a world: one start of its process after the other, on one folder.

    :param starts: date and time at the world's start, in the time zone of the task's schedule.
    :param accept_s: seconds to check and add one update. `close_s`: to close a round.
    :param events: the event log's file; by default in the folder.
    :param key: the file of its key; by default it is the same in each world, and kept nowhere.
    :param on_opened: receives the number of each round that opens, and its cohort.
    :param on_event: as of `EventLog`.
    """

    most_idle_s = 600.0  # between two steps

    def __init__(
        self,
        prepared: PreparedTask,
        folder: Path,
        *,
        clock: WorldClock,
        hub: LocalHub,
        starts: datetime = STARTS,
        accept_s: float = 0.0,
        close_s: float = 0.0,
        on_opened: Callable[[int, list[str]], None] = lambda round, cohort: None,
        on_event: OnEvent = lambda kind, fields: None,
        events: Path | None = None,
        key: Path | None = None,
        engine_options: dict[str, Any] | None = None,
    ) -> None:
        self.prepared, self.folder = prepared, folder
        self._clock, self._hub, self._on_opened, self._on_event = clock, hub, on_opened, on_event
        schedule = prepared.task.schedule
        zone = ZoneInfo(Windows(schedule).zone) if schedule.is_set else ZoneInfo("UTC")
        self._began = starts.replace(tzinfo=zone).timestamp()
        self._accept_s, self._close_s, self._engine_options = accept_s, close_s, engine_options or {}
        self.events_path = events or folder / "events.jsonl"
        self.actor = Actor(clock, self._act)
        self._key, self._starts = key, 0
        self.coordinator: Coordinator | None = None
        self.link: LocalLink | None = None
        self._opened_round = 0
        self._idle_s, self._heard_at = LONGEST_SLEEP_S, 0.0

    @property
    def opens(self) -> float:
        """When the next round may open, in seconds since the world's start; now without an aggregator."""
        return self._clock.now if self.coordinator is None else self.coordinator.rounds.rhythm.opens() - self._began

    @property
    def stuck(self) -> str:
        """Why a round never opens, or why the open one never closes, in words."""
        if self.coordinator is None:
            return "the aggregator never comes back"
        engine, task = self.coordinator.engine, self.prepared.task
        number, rule = engine.closed_rounds + 1, engine.responses
        if engine.plan is None:
            least = least_devices(task.round, devices=task.data.devices, drawn=engine.drawn_at is not None)
            return (
                f"round {number} never opens: {len(self.coordinator.present)} devices are present, and {least} are "
                "needed; set round.min_devices to what can be there at once, or look at [schedule]"
            )
        if task.round.buffer_size:
            came = f"{rule.accepted} updates have come, and round.buffer_size = {task.round.buffer_size}"
            return f"round {number} never closes: {came}"
        return (
            f"round {number} never closes: after {rule.extensions + 1} deadlines {rule.accepted} updates of "
            f"{len(engine.cohort)} devices have come, and round.min_updates = {task.round.min_updates}"
        )

    @property
    def finished(self) -> bool:
        """True if every round is closed, or none may open any more."""
        return self.coordinator is not None and self.coordinator.engine.finished

    def wall(self) -> float:
        """Unix seconds."""
        return self._began + self._clock.now

    def start(self) -> None:
        """Starts the process; it connects at once."""
        self._starts += 1
        clock, key = self._clock, self._key
        identity = Identity.from_bytes(bytes(range(32))) if key is None else load_or_create(key)
        self.store = AggregatorStore(self.folder, durable=False)
        engine = RoundEngine(self.store, self.prepared, clock=self.wall, monotonic=clock, **self._engine_options)
        self.coordinator = Coordinator(
            engine,
            self._connect,
            identity=identity,
            epoch=self._starts if key is None else next_epoch(key, clock=self.wall),
            rhythm=Rhythm(self.prepared.task.schedule, self.store, wall=self.wall, elapsed=clock),
            clock=clock,
            **self.options_of(engine),
        )
        self.coordinator.start()
        self.actor.wake()

    def options_of(self, engine: RoundEngine) -> dict[str, Any]:
        """Opens the register of its boards; returns the coordinator's options that depend on it."""
        self.register: DeviceRegister = DeviceRegister(self.folder / "aggregator", durable=False, wall=self.wall)
        enrolment = Enrolment(self.store, self.register, closed=False, clock=self._clock, wall=self.wall)
        return {
            "enrolment": enrolment,
            "events": EventLog(self.events_path, clock=self._clock, on_event=self._on_event),
        }

    def kill(self) -> None:
        """Ends the process at once; what it has not stored is lost."""
        if self.coordinator is not None:
            self.coordinator = None
            self.store.close()
            self.register.close()

    def _connect(self, will: Will) -> LocalLink:
        self.link = self._hub.link("aggregator", will)
        self.link.on_event = self._hear
        return self.link

    def _act(self) -> float:
        coordinator, link, clock = self.coordinator, self.link, self._clock
        if coordinator is None or link is None:
            return math.inf
        engine = coordinator.engine
        while True:
            link.waits_s = None
            accepted, closed_rounds = engine.accepted, engine.closed_rounds
            coordinator.step(self._idle_s)
            if engine.plan is not None and engine.plan.round > self._opened_round:
                self._opened_round = engine.plan.round
                self._on_opened(engine.plan.round, sorted(engine.cohort))
            closed = engine.closed_rounds - closed_rounds
            busy_s = closed * self._close_s + max(0, engine.accepted - accepted) * self._accept_s
            if busy_s:
                self.actor.busy_until = clock.now + busy_s
                return self.actor.busy_until
            if link.waits_s:
                return clock.now + self._rests_s(link.waits_s)

    def _rests_s(self, waits_s: float) -> float:
        """Returns how long nothing is due: a step's own wait, which is longer and longer while nothing comes.

        The times at which a round opens, rests, or closes without an event are kept exactly.
        """
        coordinator, now = self.coordinator, self._clock.now
        assert coordinator is not None
        self._idle_s = min(2 * self._idle_s, self.most_idle_s)
        rhythm, rule = coordinator.rounds.rhythm, coordinator.engine.responses
        moments = [rhythm.opens() - self.wall(), rhythm.left_s(), rule.deadline - now]
        moments += [self._heard_at + grace_s - now for grace_s in (rule.grace_s, rule.answers_grace_s)]
        return min([waits_s, *(each + ROUNDING_S for each in moments if each > 0)])

    def _hear(self) -> None:
        self._idle_s, self._heard_at = LONGEST_SLEEP_S, self._clock.now
        self.actor.wake()


class World:
    """A broker, an aggregator and boards, and what happens to them from the clock's present time on.

    :param seed: draws the waits before new connections.
    :param first_round: the open or next round of a world that goes on.
    :param on_action: receives each action of the scenario that was carried out.
    """

    def __init__(
        self,
        clock: WorldClock,
        hub: LocalHub,
        server: WorldServer,
        boards: Sequence[WorldBoard],
        *,
        schedule: Schedule,
        options: LinkOptions,
        seed: int,
        first_round: int = 1,
        on_action: Callable[[Action], None] = lambda action: None,
    ) -> None:
        self.clock, self.hub, self.server = clock, hub, server
        self.boards = {board.name: board for board in boards}
        self._options, self._on_action = options, on_action
        self.playback = Playback(schedule, first_round=first_round)
        self._began_at = clock.now
        self._rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_STREAM,))))
        self._broker_up = True
        self._server_down_since = 0.0
        self._server_life = 0

    def start(self) -> None:
        """Starts the aggregator, unless it runs already, and all boards that are not absent."""
        if self.server.coordinator is None:
            self.server.start()
        for name, board in self.boards.items():
            if name not in self.playback.absent:
                board.start(connects=self._broker_up)

    def advance(self, give_up_at: float = math.inf) -> bool:
        """Moves to what comes next, and does it; returns False if nothing comes before `give_up_at`."""
        scheduled_at = self._began_at + self.playback.next_s
        at = min(scheduled_at, self.clock.next_s)
        if at > give_up_at or math.isinf(at):
            return False
        if scheduled_at <= at:
            self.clock.now = max(self.clock.now, at)
            for action in self.playback.due(self.clock.now - self._began_at):
                self._on_action(action)
                self.act(action)
        else:
            self.clock.advance()
        return True

    def round_opened(self, round: int) -> None:
        """Plays what the scenario has for a round that has just opened."""
        self.playback.round_opened(round, self.clock.now - self._began_at)

    def act(self, action: Action) -> None:
        """Carries out one action of a scenario."""
        starts = action.kind == "start"
        if action.target == "aggregator":
            (self._start_server if starts else self._kill_server)()
        elif action.target == "broker":
            (self._start_broker if starts else self._kill_broker)()
        else:
            self._act_on_board(self.boards[action.target], action.kind)

    def _act_on_board(self, board: WorldBoard, kind: str) -> None:
        noticed_s = self._options.lost_noticed_s
        if kind == "start":
            board.start(connects=self._broker_up)
        elif kind == "stop":
            board.stop_client()
        elif kind == "kill":
            board.kill(will_after_s=noticed_s)
        elif kind == "cut":
            board.cut(will_after_s=noticed_s)
        else:
            board.is_cut = False
            self._connect_again(board)

    def _connect_again(self, board: WorldBoard) -> None:
        """Connects a board that is on, at its first attempt after the way is free."""
        if board.is_on and not board.is_cut and self._broker_up:
            board.connect_at(self._attempt_at(board.down_since))

    def _attempt_at(self, down_since: float) -> float:
        """Returns when the first attempt is made from now on; attempts before have failed."""
        at, ceiling_s = down_since, self._options.first_backoff_s
        while True:
            at += self._rng.uniform(0.0, ceiling_s)
            ceiling_s = min(2 * ceiling_s, self._options.longest_backoff_s)
            if at >= self.clock.now:
                return at

    def _kill_broker(self) -> None:
        self._broker_up = False
        self._server_down_since = self.clock.now
        self.hub.crash()
        for board in self.boards.values():
            board.down_since = max(self.clock.now, board.down_since)

    def _start_broker(self) -> None:
        self._broker_up = True
        if self.server.link is not None and self.server.coordinator is not None:
            link = self.server.link
            self.clock.at(self._attempt_at(self._server_down_since), lambda: self._open_server(link))
        for board in self.boards.values():
            self._connect_again(board)

    def _open_server(self, link: LocalLink) -> None:
        if link is self.server.link and self._broker_up and self.server.coordinator is not None:
            link.open()

    def _kill_server(self) -> None:
        self._server_life += 1
        link = self.server.link
        self.server.kill()
        if link is not None:
            self.hub.vanish(link, will_after_s=0.0)

    def _start_server(self) -> None:
        self._server_life += 1
        life = self._server_life

        def started() -> None:
            if life == self._server_life:
                self.server.start()

        self.clock.at(self.clock.now + self._options.server_start_s, started)
