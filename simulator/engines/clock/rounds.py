"""Training under the virtual clock: the clock says whose updates come in time, and only who commits is trained.

The clock needs nothing of what is learned (sizes are predicted), so a run's time is settled before it is trained: a
run that was interrupted computes the same hours again and goes on with the round that was open. Everything is stamped
in virtual seconds, in the log and in the store, so that display, timeline and report read it like any other run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hushfleet.aggregator.observe.events import EventLog, read_events
from hushfleet.aggregator.observe.round_events import run_fields, update_fields
from hushfleet.aggregator.rounds.engine import RoundEngine
from hushfleet.aggregator.storage.store import AggregatorStore
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.clock.device_time import Costs
from hushfleet.simulator.engines.clock.engine import FleetClock
from hushfleet.simulator.engines.clock.fleet import make_devices
from hushfleet.simulator.engines.clock.links import LinkOptions
from hushfleet.simulator.engines.clock.measure import measure_costs
from hushfleet.simulator.engines.clock.outcome import Note, RoundOutcome
from hushfleet.simulator.engines.clock.sizes import sizes_of
from hushfleet.simulator.engines.fast.engine import Answer, check_participation, hear_decline, train_cohort
from hushfleet.simulator.engines.fast.workers import Crew
from hushfleet.simulator.engines.live.emulation import machine_speed
from hushfleet.simulator.engines.live.engine import RECONNECT_S
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.schedule import schedule_of
from hushfleet.wire.format.messages import RoundPlan
from hushfleet.wire.format.update import attach_public

_AT_ONCE = 8  # devices a worker: enough to keep them busy, and few updates in memory

Train = Callable[[RoundPlan, Sequence[str]], Iterator[Answer]]
Heard = tuple[str, dict[str, Any]]  # an event and its fields


class VirtualTime:
    """Seconds since the run's start; whoever is given it as a clock is told what it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_clocked_rounds(
    simulation: Simulation,
    workers: Crew,
    events: EventLog,
    time: VirtualTime,
    *,
    mix: FleetMix,
    runtime: str = "onnx",
    evaluate_every: int = 1,
) -> None:
    """Runs the task's rounds to the end under the virtual clock, or on from where an interrupted run stopped.

    :param events: made with `time` as its clock.
    :param mix: a board for each device of the simulation.

    Other arguments as for `hushfleet.simulator.engines.fast.engine.run_rounds`.
    """

    def train(plan: RoundPlan, devices: Sequence[str]) -> Iterator[Answer]:
        return train_cohort(simulation, workers, plan, devices, runtime=runtime, evaluate_every=evaluate_every)

    outcomes = fleet_clock(simulation, mix).rounds()
    with (
        AggregatorStore(simulation.folder.aggregator, durable=False) as store,
        EventLog(simulation.folder.scenario, clock=time) as scenario,
    ):
        engine = RoundEngine(store, simulation.prepared, clock=time, monotonic=time)
        rounds = VirtualRounds(
            simulation, engine, time, events=events, scenario=scenario, at_once=_AT_ONCE * workers.count
        )
        rounds.begin()
        for outcome in outcomes:
            rounds.play(outcome, train)
        rounds.end()


def fleet_clock(simulation: Simulation, mix: FleetMix) -> FleetClock:
    """The clock of a simulation; what its work costs is measured once and kept in the run folder."""
    prepared, fleet = simulation.prepared, simulation.fleet.devices
    if len(mix) != len(fleet):
        raise BadInput(f"there are boards for {len(mix)} devices, but {len(fleet)} devices")
    names = [device.name for device in fleet]
    costs = _costs(simulation)
    sizes = sizes_of(prepared, name_bytes=max(len(name) for name in names))
    schedule = schedule_of(simulation.task, names)
    devices = make_devices(
        prepared,
        mix,
        names=names,
        samples=[len(device.train) for device in fleet],
        costs=costs,
        sizes=sizes,
        schedule=schedule,
    )
    return FleetClock(
        simulation.task.round,
        devices,
        costs=costs,
        sizes=sizes,
        schedule=schedule,
        seed=simulation.seed,
        # as in the live engine, where a killed process's connection ends at once
        options=LinkOptions(lost_noticed_s=0.0, first_backoff_s=RECONNECT_S),
        noting=True,
    )


def _costs(simulation: Simulation) -> Costs:
    path = simulation.folder.clock
    if path.exists():
        return Costs(**json.loads(path.read_text()))
    costs = measure_costs(simulation.prepared, machine_speed=machine_speed())
    path.write_text(json.dumps(costs.to_plain(), indent=1))
    return costs


class VirtualRounds:
    """Leads a `RoundEngine` through the outcomes of a `FleetClock`.

    :param time: the clock of the engine and of both logs.
    :param at_once: how many devices are trained before their updates are handed over.
    """

    def __init__(
        self,
        simulation: Simulation,
        engine: RoundEngine,
        time: VirtualTime,
        *,
        events: EventLog,
        scenario: EventLog,
        at_once: int,
    ) -> None:
        self._simulation, self._engine, self._time = simulation, engine, time
        self._at_once = at_once
        self._events, self._scenario = _Resumed(events), _Resumed(scenario)
        self._boards = {device.name: device.board for device in simulation.fleet.devices}

    def begin(self) -> None:
        self._run_event(0.0)

    def end(self) -> None:
        self._write("finished")

    def play(self, outcome: RoundOutcome, train: Train) -> None:
        """One round. Raises `HushfleetError` if the engine sees it otherwise than the clock."""
        notes = iter(outcome.notes)
        if outcome.round <= self._engine.closed_rounds:
            self._play_again(outcome)
            return
        engine, time = self._engine, self._time
        time.now = outcome.opened_s
        plan = engine.plan or engine.open_round(outcome.cohort)
        if (plan.round, sorted(plan.cohort)) != (outcome.round, list(outcome.cohort)):
            raise HushfleetError(
                f"the clock is at round {outcome.round} with {len(outcome.cohort)} devices, the aggregator at round "
                f"{plan.round} with {len(plan.cohort)}: the run folder belongs to another fleet or another task"
            )
        left = list(outcome.arrivals)
        while left:
            part, left = left[: self._at_once], left[self._at_once :]
            answers = {answer.device: answer for answer in train(plan, [each.device for each in part])}
            heard = {}
            for arrival in part:
                time.now = arrival.at_s
                heard[arrival.device] = self._hear(plan, answers[arrival.device])
            self._write_notes(notes, heard, last=part[-1].device)
        for first in range(0, len(outcome.late), self._at_once):
            for answer in train(plan, outcome.late[first : first + self._at_once]):
                # it is charged and has moved on; its bytes come too late for the aggregator
                engine.store.add_device(answer.device, public_key=answer.public_key, board=self._boards[answer.device])
        self._write_notes(notes, {}, last=None)
        check_participation(engine, plan)
        time.now = outcome.closed_s
        self._write("round_close", **engine.close().to_dict())

    def _hear(self, plan: RoundPlan, answer: Answer) -> Heard:
        """The aggregator takes an answer; one that lacks the device's public state is given it.

        A device that declines is heard when its update would have come: the clock knows nothing of budgets.
        """
        engine, data = self._engine, answer.update
        engine.store.add_device(answer.device, public_key=answer.public_key, board=self._boards[answer.device])
        if answer.refusal is not None:
            return "decline", hear_decline(answer, engine, plan)
        verdict = engine.accept(answer.device, data)
        if verdict.code == "state-unknown":
            data = self._with_public(plan, answer)
            verdict = engine.accept(answer.device, data)
        if not verdict.acknowledged:
            raise HushfleetError(
                f"round {plan.round}: the update of {answer.device} was refused ({verdict.code}): {verdict.reason}"
            )
        return "update", update_fields(verdict, device=answer.device, round=plan.round, payload_bytes=len(data))

    def _with_public(self, plan: RoundPlan, answer: Answer) -> bytes:
        """As `hushfleet.edge_client.net.upload` does for a device whose last update came too late."""
        path = self._simulation.folder.device(answer.device).store
        with DeviceStore(path, device=answer.device, durable=False) as store:
            entry = store.outbox(plan.task, plan.round)
            if entry is None:
                raise HushfleetError(f"{answer.device} does not remember its update of round {plan.round}")
            return attach_public(answer.update, entry.public_before, identity=store.identity)

    # the logs

    def _play_again(self, outcome: RoundOutcome) -> None:
        """A round that is closed already: its events are in the log, unless a kill came before the last one."""
        self._write_notes(iter(outcome.notes), {}, last=None)
        self._time.now = outcome.closed_s
        row = next(row for row in self._engine.store.rounds() if row.round == outcome.round)
        self._write("round_close", **(row.metrics or {}))

    def _write_notes(self, notes: Iterator[Note], heard: dict[str, Heard], *, last: str | None) -> None:
        """Writes notes up to the update of the device `last`, or all that are left."""
        for note in notes:
            self._time.now = note.at_s
            if note.event == "scenario":
                self._scenario.write(note.event, note.fields)
            elif note.event == "run":
                self._run_event(note.at_s)
            elif note.event == "decline":
                self._engine.decline(
                    note.fields["device"], note.fields["code"], note.fields["reason"], round=note.fields["round"]
                )
                self._write(note.event, **note.fields)
            elif note.event == "update":
                device = note.fields["device"]
                event, fields = heard.get(device, (note.event, note.fields))
                self._write(event, **fields)
                if device == last:
                    return
            else:
                self._write(note.event, **note.fields)

    def _run_event(self, at_s: float) -> None:
        self._time.now = at_s
        devices = len(self._simulation.fleet.devices)
        self._write("run", **run_fields(self._simulation.prepared.spec, engine="fast", devices=devices))

    def _write(self, event: str, **fields: Any) -> None:
        self._events.write(event, fields)


class _Resumed:
    """A log whose events come in the same order in every life of the run: those that are in it are not repeated."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._known = len(read_events(log.path)[0])

    def write(self, event: str, fields: dict[str, Any]) -> None:
        if self._known:
            self._known -= 1
        else:
            self._log.write(event, **fields)
