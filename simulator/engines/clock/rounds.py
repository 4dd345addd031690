"""Trains under the virtual clock: the clock decides which updates arrive in time, and only devices that commit train.

The clock does not depend on the training (sizes are predicted), so a run's times are known before it is trained: an
interrupted run computes the same times again and continues with the round that was open. Log and store contain virtual
seconds, so that display, timeline and report read them like any other run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.rounds.round_events import finished_fields, run_fields
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.atomic_file import write_whole
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.secure.roster import Roster
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock.device import make_devices
from hushfleet.simulator.engines.clock.engine import FleetClock
from hushfleet.simulator.engines.clock.measure import measure_costs
from hushfleet.simulator.engines.clock.sums import clock_of
from hushfleet.simulator.engines.fast.device_file import DeviceFile
from hushfleet.simulator.engines.fast.engine import (
    buffered_place,
    check_participation,
    close_engine,
    hear,
    open_engine,
    train_cohort,
)
from hushfleet.simulator.engines.fast.jobs import JobAnswer
from hushfleet.simulator.engines.fast.sums import key_of, write_roster
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.engines.live.emulation import machine_speed
from hushfleet.simulator.engines.live.engine import RECONNECT_S
from hushfleet.simulator.run_folder import RunFolder, Simulation
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.world.outcomes import Arrival, ClockRound, LogEvent
from hushfleet.simulator.world.run import LinkOptions
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import attach_public

_GROUP = 8  # devices per worker: enough to keep the workers busy, with few updates in memory

Train = Callable[[RoundPlan, Sequence[str]], Iterator[JobAnswer]]
Event = tuple[str, dict[str, Any]]  # name and fields


class VirtualTime:
    """A clock in seconds since the run's start; a call returns the time that was set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_clocked_rounds(
    simulation: Simulation,
    workers: WorkerPool,
    events: EventLog,
    time: VirtualTime,
    *,
    mix: FleetMix,
    runtime: str = "onnx",
    evaluate_every: int = 1,
) -> None:
    """Runs the task's rounds to the end under the virtual clock; continues an interrupted run.

    A round that the schedule's last window leaves open is skipped: no device trains in it, and none is charged.

    :param events: log with `time` as its clock.
    :param mix: a board for each device of the simulation.

    Other arguments as for `hushfleet.simulator.engines.fast.engine.run_rounds`.
    """

    def train(plan: RoundPlan, devices: Sequence[str]) -> Iterator[JobAnswer]:
        evaluate = plan.round >= engine.spec.last_training_round or plan.round % evaluate_every == 0
        return train_cohort(simulation, workers, plan, devices, runtime=runtime, evaluate=evaluate)

    with (
        AggregatorStore(simulation.folder.aggregator, durable=False) as store,
        EventLog(simulation.folder.scenario, clock=time) as scenario,
    ):
        secure = simulation.prepared.spec.privacy.secure
        roster = None if secure is None else write_roster(simulation, store)
        closed_rounds = fleet_clock(simulation, mix, roster=roster).rounds()
        engine = open_engine(simulation, store, clock=time, monotonic=time)
        logs: Any = {"events": events, "scenario": scenario, "group": _GROUP * workers.count}
        if simulation.task.round.buffered:
            outcomes = list(closed_rounds)  # which devices train a version is only known after its last update
            rounds: VirtualRounds = BufferedRounds(simulation, engine, time, outcomes=outcomes, **logs)
            closed_rounds = iter(outcomes)
        else:
            rounds = VirtualRounds(simulation, engine, time, **logs)
        rounds.begin()
        for closed in closed_rounds:
            if engine.finished and closed.round > engine.closed_rounds:
                break
            rounds.play(closed, train)
        else:
            engine.progress.ended = not engine.finished  # after the schedule's last day
        rounds.end()
    close_engine(simulation)


def keep_costs(again: RunFolder, first: RunFolder) -> None:
    """Copies the measured costs of the first run to its repetition, unless that has started already."""
    if first.clock.exists() and not again.clock.exists():
        write_whole(again.clock, first.clock.read_bytes(), durable=False)


def fleet_clock(simulation: Simulation, mix: FleetMix, *, roster: Roster | None = None) -> FleetClock:
    """Returns the clock of a simulation; the costs of its work are measured once and kept in the run folder.

    :param roster: roster for secure sums.
    """
    prepared, fleet = simulation.prepared, simulation.fleet.devices
    if len(mix) != len(fleet):
        raise BadInput(f"there are boards for {len(mix)} devices, but {len(fleet)} devices")
    names = [device.name for device in fleet]
    samples = [len(device.train) for device in fleet]
    path = simulation.folder.clock
    if not path.exists():
        costs = measure_costs(prepared, machine_speed=machine_speed())
        write_whole(path, json.dumps(vars(costs), indent=1).encode(), durable=False)
    costs = Costs(**json.loads(path.read_text()))
    sizes = sizes_of(prepared, name_bytes=len(names[0]))
    schedule = schedule_of(simulation.task, names)
    devices = make_devices(prepared, mix, names=names, samples=samples, costs=costs, sizes=sizes, schedule=schedule)
    # as in the live engine, where the connection of a killed process ends immediately
    options = LinkOptions(lost_noticed_s=0.0, first_backoff_s=RECONNECT_S)
    return clock_of(
        prepared,
        replace(simulation.task.round, rounds=prepared.spec.rounds),
        devices,
        roster=roster,
        costs=costs,
        sizes=sizes,
        schedule=schedule,
        seed=simulation.seed,
        options=options,
        logging=True,
    )


class VirtualRounds:
    """Replays the closed rounds of a `FleetClock` in a `RoundEngine`.

    :param time: the clock of the engine and of both logs.
    :param group: how many devices are trained before their updates are passed to the engine.
    """

    def __init__(
        self,
        simulation: Simulation,
        engine: RoundEngine,
        time: VirtualTime,
        *,
        events: EventLog,
        scenario: EventLog,
        group: int,
    ) -> None:
        self._simulation, self._engine, self._time, self._group = simulation, engine, time, group
        self._events, self._scenario = _Resumed(events), _Resumed(scenario)
        self._devices = {device.name: device for device in simulation.fleet.devices}

    def begin(self) -> None:
        self._time.now = 0.0
        self._write_run()

    def end(self) -> None:
        self._events.write("finished", **finished_fields(self._engine))

    def play(self, closed: ClockRound, train: Train) -> None:
        """Plays one round. Raises `HushfleetError` if engine and clock disagree about it."""
        engine, time, events = self._engine, self._time, iter(closed.events)
        if closed.round <= engine.closed_rounds:
            # Its events are in the log, unless a kill came before the last one.
            self._write_events(events, {}, last=None)
            row = next(row for row in engine.store.rounds() if row.round == closed.round)
            time.now = closed.closed_s
            self._events.write("round_close", **(row.metrics or {}))
            return
        time.now = closed.opened_s
        plan = engine.plan or engine.open_round(closed.cohort)
        same = plan.max_staleness or sorted(engine.cohort) == sorted(closed.cohort)
        if plan.round != closed.round or not same:
            raise HushfleetError(
                f"the clock is at round {closed.round} with {len(closed.cohort)} devices, the aggregator at round "
                f"{plan.round} with {len(engine.cohort)}: the run folder belongs to another fleet or another task"
            )
        self._play(closed, plan, events, train)
        self._write_events(events, {}, last=None)
        check_participation(engine, plan)
        time.now = closed.closed_s
        # no committee is asked here; the clock knows whether enough of its members answered
        self._events.write("round_close", **engine.close(opens=closed.used).to_dict())

    def _play(self, closed: ClockRound, plan: RoundPlan, events: Iterator[LogEvent], train: Train) -> None:
        """Trains the devices that commit, and passes the updates that arrive to the engine."""
        for first in range(0, len(closed.arrivals), self._group):
            group = closed.arrivals[first : first + self._group]
            answers = {answer.device: answer for answer in train(plan, [arrival.device for arrival in group])}
            heard = {}
            for arrival in group:
                self._time.now = arrival.at_s
                heard[arrival.device] = self._hear(plan, answers[arrival.device])
            self._write_events(events, heard, last=group[-1].device)
        for first in range(0, len(closed.late), self._group):
            for answer in train(plan, closed.late[first : first + self._group]):
                self._add(answer)

    def _add(self, answer: JobAnswer | None) -> None:
        """Registers a device that is charged although its update comes too late for the aggregator."""
        if answer is not None:
            board = self._devices[answer.device].board
            self._engine.store.add_device(answer.device, public_key=answer.public_key, board=board)

    def _hear(self, plan: RoundPlan, answer: JobAnswer) -> Event:
        """Passes an answer to the engine; a decline comes at the update's time, because the clock ignores budgets."""
        with_public = partial(self._with_public, plan)
        return hear(answer, self._engine, plan, board=self._devices[answer.device].board, with_public=with_public)

    def _with_public(self, plan: RoundPlan, answer: JobAnswer) -> bytes:
        """Attaches the public state, as `hushfleet.edge_client.net.upload` does after an update that was too late."""
        store = self._store(answer.device)
        entry = store.outbox(plan.task, plan.round)
        if entry is None:
            raise HushfleetError(f"{answer.device} does not remember its update of round {plan.round}")
        return attach_public(answer.update, entry.public_before, identity=store.identity)

    def _store(self, device: str) -> DeviceFile:
        path = self._simulation.folder.device(device).state
        return DeviceFile(path, device=device, identity=key_of(self._simulation.seed, self._devices[device].index))

    # the logs

    def _write_events(self, events: Iterator[LogEvent], heard: dict[str, Event], *, last: str | None) -> None:
        """Writes events up to the update of the device `last`, or all remaining ones."""
        for at_s, event, fields in events:
            self._time.now = at_s
            if event == "scenario":
                self._scenario.write(event, **fields)
            elif event == "run":
                self._write_run()
            elif event == "update":
                event, answered = heard.get(fields["device"], (event, fields))
                self._events.write(event, **answered)
                if fields["device"] == last:
                    return
            else:
                if event == "decline":
                    self._engine.decline(fields["device"], fields["code"], fields["reason"], round=fields["round"])
                self._events.write(event, **fields)

    def _write_run(self) -> None:
        devices = len(self._simulation.fleet.devices)
        self._events.write("run", **run_fields(self._simulation.prepared.spec, engine="fast", devices=devices))


class BufferedRounds(VirtualRounds):
    """The same for buffered rounds: a device trains while the version is open that it starts with, and its answer is
    kept until its update arrives, possibly some versions later.

    :param outcomes: outcomes of all rounds.
    """

    def __init__(self, *arguments: Any, outcomes: Sequence[ClockRound], **options: Any) -> None:
        super().__init__(*arguments, **options)
        made = [(arrival.device, arrival.round) for outcome in outcomes for arrival in outcome.arrivals]
        made += [each for outcome in outcomes for each in outcome.stale]
        self._trains: dict[int, list[str]] = {}
        for device, round in made:
            self._trains.setdefault(round, []).append(device)
        self._answers: dict[tuple[str, int], JobAnswer] = {}

    def play(self, closed: ClockRound, train: Train) -> None:
        super().play(closed, train)
        for device, round in [*((arrival.device, arrival.round) for arrival in closed.arrivals), *closed.stale]:
            place = buffered_place(self._simulation, self._devices[device], round)
            (self._simulation.folder.updates / str(place)).unlink(missing_ok=True)

    def _play(self, closed: ClockRound, plan: RoundPlan, events: Iterator[LogEvent], train: Train) -> None:
        waits = {arrival.device for arrival in closed.arrivals if arrival.round < closed.round}
        trains = self._trains.get(closed.round, [])
        self._train(plan, [device for device in trains if device not in waits], train)
        for arrival in closed.arrivals:
            self._time.now = arrival.at_s
            if arrival.round == closed.round and arrival.device in waits:
                self._train(plan, [arrival.device], train)
            answer = self._answers.pop((arrival.device, arrival.round), None) or self._remembered(plan, arrival)
            own = replace(plan, round=arrival.round)
            heard = {} if answer is None else {arrival.device: self._hear(own, answer)}
            self._write_events(events, heard, last=arrival.device)
        done = {arrival.device for arrival in closed.arrivals if arrival.round == closed.round}
        self._train(plan, [device for device in trains if device in waits - done], train)
        for device, round in closed.stale:
            self._add(self._answers.pop((device, round), None))

    def _train(self, plan: RoundPlan, devices: Sequence[str], train: Train) -> None:
        for answer in train(plan, devices):
            self._answers[answer.device, plan.round] = answer

    def _remembered(self, plan: RoundPlan, arrival: Arrival) -> JobAnswer | None:
        """Reads the answer of an interrupted run; None if the device has moved on because the update was accepted."""
        store = self._store(arrival.device)
        entry = store.outbox(plan.task, arrival.round)
        return None if entry is None else JobAnswer(arrival.device, store.identity.public_key, entry.data)


class _Resumed:
    """A log for a continued run, whose events come in the same order again: events already in it are not repeated."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._known = sum(1 for _ in iterate_events(log.path))

    def write(self, event: str, **fields: Any) -> None:
        if self._known:
            self._known -= 1
        else:
            self._log.write(event, **fields)
