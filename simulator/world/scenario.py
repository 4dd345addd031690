"""Plays the scenario on a live fleet: kills, stops, starts, cuts and mends its parts when they are due.

It learns of rounds from the run's event log, and writes its actions to `scenario.jsonl` in the run folder, so that a
run can be explained afterwards: `{"at", "event": "scenario", "action", "target"}`, where `action` is one of `Kind`, or
`not-played` with a `reason`. It runs in the thread that waits for the fleet, because a process dies with the thread
that started it.

When the task is finished, no more failures are played: the server's processes and the networks are restored
immediately, so that all can end properly, and devices that are down stay down. A resumed run plays the actions of the
open round and of later ones; its seconds start again at 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from hushfleet.aggregator.results.events import EventLog, EventTail, iterate_events
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.schedule import Action, Outage, Playback, Schedule
from hushfleet.simulator.world.live import LiveFleet

_TICK_S = 0.1
_UNDONE_BY = {"kill": "start", "stop": "start", "cut": "mend"}


class ScenarioPlayer:
    """Plays a schedule in one live run. Make it before the fleet starts, because it reads the progress of the run.

    :param clock: monotonic seconds.
    """

    def __init__(
        self, simulation: Simulation, schedule: Schedule, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._log = simulation.folder.scenario
        self._events = EventTail(simulation.folder.events)
        history = self._events.read()
        self._opened = _last(history, "round_open")
        self._first_round = 1 + _last(history, "round_close")
        self._playback = Playback(schedule, first_round=self._first_round)
        self._began: float | None = None
        self._is_over = False
        self._down = set(self._playback.absent)
        self._cut: set[str] = set()
        self._to_start: list[str] = []  # to start as soon as their old process has ended

    @property
    def absent(self) -> frozenset[str]:
        """Devices that the fleet must not start at its beginning."""
        return self._playback.absent

    def play(self, fleet: LiveFleet) -> None:
        """Plays until the task is finished and the clients have ended. Raises the errors of `LiveFleet.check`."""
        while not fleet.finished:
            self.tick(fleet)
            fleet.check()
            time.sleep(_TICK_S)
        self.end(fleet)
        fleet.wait()

    def tick(self, fleet: LiveFleet) -> None:
        """Carries out the actions that are due. The first call is the run's start."""
        now = self._clock()
        if self._began is None:
            self._began = now
            self._playback.round_opened(self._opened, 0.0)
            self._log_what_came_back()
            self._log_unplayed(self._playback.left_out, f"the run was resumed in round {self._first_round}")
        now_s = now - self._began
        for event in self._events.read():
            if event.get("event") == "round_open":
                self._playback.round_opened(event["round"], now_s)
            elif event.get("event") == "finished":
                self._is_over = True
        if self._is_over:
            self._restore(fleet)
            return
        for name in [name for name in self._to_start if not fleet.is_running(name)]:
            self._to_start.remove(name)
            self._start(fleet, name)
        for action in self._playback.due(now_s):
            self._do(fleet, action)

    def end(self, fleet: LiveFleet) -> None:
        """Ends a finished task: restores servers and networks, and logs the outages that never happened."""
        self._is_over = True
        self._restore(fleet)
        self._log_unplayed(self._playback.unplayed, "the run was over before")

    def _do(self, fleet: LiveFleet, action: Action) -> None:
        _, kind, name = action
        if kind == "start":
            # Two processes must never share a store, and a stopped device first finishes its batch.
            if fleet.is_running(name):
                self._to_start.append(name)
            else:
                self._start(fleet, name)
        elif kind == "mend":
            self._mend(fleet, name)
        elif kind == "cut":
            self._write(kind, name)
            self._cut.add(name)
            fleet.cut(name)
        else:
            self._write(kind, name)
            if name in self._to_start:
                self._to_start.remove(name)
            self._down.add(name)
            fleet.expected_down.add(name)
            (fleet.kill if kind == "kill" else fleet.stop)(name)

    def _start(self, fleet: LiveFleet, name: str) -> None:
        self._write("start", name)
        fleet.start_again(name)
        self._down.remove(name)
        fleet.expected_down.discard(name)

    def _mend(self, fleet: LiveFleet, name: str) -> None:
        self._write("mend", name)
        fleet.mend(name)
        self._cut.remove(name)

    def _restore(self, fleet: LiveFleet) -> None:
        for name in sorted(self._cut):
            self._mend(fleet, name)
        for name in ("broker", "aggregator"):
            if name in self._down:
                self._start(fleet, name)

    # the log

    def _log_what_came_back(self) -> None:
        """Logs the parts that an interruption has restored, except those that the scenario keeps down."""
        missing: dict[tuple[str, str], None] = {}
        for event in iterate_events(self._log):
            action, target = event["action"], event["target"]
            if action in _UNDONE_BY:
                missing[target, _UNDONE_BY[action]] = None
            else:
                missing.pop((target, action), None)
        for target, action in missing:
            if action == "mend" or target not in self._down:
                self._write(action, target)

    def _log_unplayed(self, windows: Iterable[Outage], reason: str) -> None:
        for window in windows:
            moment: dict[str, Any] = {"at_s": window.ends_s if window.begins_s is None else window.begins_s}
            if window.at_round:
                moment["at_round"] = window.at_round
            self._write("not-played", window.target, **moment, reason=reason)

    def _write(self, action: str, target: str, **more: Any) -> None:
        with EventLog(self._log) as log:
            log.write("scenario", action=action, target=target, **more)


def _last(history: Iterable[dict[str, Any]], kind: str) -> int:
    """Returns the last round with an event of this kind; 0 if there is none."""
    return max((event["round"] for event in history if event.get("event") == kind), default=0)
