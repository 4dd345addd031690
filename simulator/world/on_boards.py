"""Runs a simulation in a world: real agents on real stores, whose gradients are those of their own samples.

Training is done by the fast engine's workers: a job is handed to them when a board begins it, and its update is taken
when the board has computed it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hushfleet.aggregator.results.events import EventLog, iterate_events
from hushfleet.atomic_file import write_whole
from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.worker.job import Job, Outcome
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.edge_client.worker.metrics import append_line
from hushfleet.edge_client.worker.randomness import SeededRandomness
from hushfleet.errors import BadInput, HushfleetError
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.closed_round import OnRound, tell
from hushfleet.simulator.engines.fast.chunks import trainer_of
from hushfleet.simulator.engines.fast.engine import ALL_SPENT, too_few_can_pay
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.runtimes import make_noise
from hushfleet.simulator.engines.fast.sums import key_of
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.fleet import SimulatedDevice
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.schedule import Action, Outage, schedule_of
from hushfleet.simulator.world.board import WorldBoard, board_config, trained
from hushfleet.simulator.world.clock import WorldClock
from hushfleet.simulator.world.fleet import NO_WINDOW
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.simulator.world.live import RECONNECT_S
from hushfleet.simulator.world.measure import machine_speed, measure_costs
from hushfleet.simulator.world.outcomes import fleet_devices
from hushfleet.simulator.world.run import LinkOptions, World, WorldServer
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs, DeviceTimes

LONGEST_ROUND_S = 90 * 86400.0


@dataclass(frozen=True)
class RunJob:
    """A board's job for a worker of the fast engine; all other inputs are in the run folder.

    :param evaluate: whether the device's personalized model is tested after training.
    """

    path: Path
    runtime: str
    evaluate: bool
    job: Job


def train(each: RunJob) -> Outcome:
    """Trains a round on the device's samples in the run folder."""
    job, simulation = each.job, each.job.config.simulation
    assert simulation is not None
    randomness = SeededRandomness(simulation.seed, simulation.index, make_noise)
    run, limits = loaded_run(each.path, each.runtime), job.config.limits
    device, store = job.config.device.id, JobStore(job)
    keep = partial(append_line, run.folder.device(device).metrics)
    trainer = trainer_of(run, device, randomness, evaluate=each.evaluate, keep=keep, store=store, limits=limits)
    return trained(job, trainer)


def run_on_boards(
    simulation: Simulation,
    workers: WorkerPool,
    *,
    mix: FleetMix,
    runtime: str = "onnx",
    evaluate_every: int = 1,
    on_round: OnRound | None = None,
) -> float:
    """Runs the task's rounds to the end, and returns the seconds that they have taken; continues an interrupted run.

    An interruption is like a power cut of everything: each store is opened again, and all start anew.

    :param mix: a board for each device of the simulation.

    Other arguments as for `hushfleet.simulator.engines.fast.engine.run_rounds`. Raises `HushfleetError` if a round
    never opens or never closes.
    """
    if len(mix) != len(simulation.fleet.devices):
        raise BadInput(f"there are boards for {len(mix)} devices, but {len(simulation.fleet.devices)} devices")
    folder, clock = simulation.folder, WorldClock()
    clock.now = max((event["at"] for event in iterate_events(folder.events)), default=0.0)
    with EventLog(folder.scenario, clock=clock) as scenario:
        how: dict[str, Any] = {"runtime": runtime, "evaluate_every": evaluate_every, "on_round": on_round}
        run = _Run(simulation, workers, clock, scenario, mix=mix, **how)
        try:
            run.play()
        finally:
            run.end()
    return clock.now


class _Run:
    """The world of a simulation."""

    def __init__(
        self,
        simulation: Simulation,
        workers: WorkerPool,
        clock: WorldClock,
        scenario: EventLog,
        *,
        mix: FleetMix,
        runtime: str,
        evaluate_every: int,
        on_round: OnRound | None,
    ) -> None:
        self._simulation, self._workers, self._clock, self._scenario = simulation, workers, clock, scenario
        self._mix, self._runtime, self._every = mix, runtime, evaluate_every
        self._names = [device.name for device in simulation.fleet.devices]
        self._schedule = schedule_of(simulation.task, self._names)
        hub, costs = LocalHub(clock=clock), kept_costs(simulation)
        self._on_round = on_round
        self._server = WorldServer(
            simulation.prepared,
            simulation.folder.aggregator,
            clock=clock,
            hub=hub,
            accept_s=costs.accept_s,
            close_s=costs.close_s,
            events=simulation.folder.events,
            key=simulation.folder.path / "aggregator.key",
            on_opened=lambda round, cohort: self.world.round_opened(round),
            on_event=self._heard,
        )
        self._server.start()
        first_round = self._server.store.last_closed_round + 1
        self.world = World(
            clock,
            hub,
            self._server,
            self._boards(hub, costs),
            schedule=self._schedule,
            options=LinkOptions(lost_noticed_s=0.0, first_backoff_s=RECONNECT_S),
            seed=simulation.seed,
            first_round=first_round,
            on_action=self._played,
        )

    def _heard(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Calls the program's function when a round has closed: the next one is not open yet."""
        if kind == "round_close" and self._server.coordinator is not None:
            tell(self._on_round, self._server.coordinator.engine, fields)

    def _played(self, action: Action) -> None:
        self._scenario.write("scenario", action=action.kind, target=action.target)

    def play(self) -> None:
        world, server, closed = self.world, self._server, -1
        world.start()
        self._note_unplayed(world.playback.left_out, "the run was resumed in a later round")
        if math.isinf(server.opens):
            raise BadInput(NO_WINDOW)
        give_up_at = server.opens + LONGEST_ROUND_S
        while not server.finished:
            if not world.advance(give_up_at):
                raise HushfleetError(server.stuck)
            if server.coordinator is None or server.coordinator.engine.closed_rounds == closed:
                continue
            closed, give_up_at = server.coordinator.engine.closed_rounds, server.opens + LONGEST_ROUND_S
            if too_few_can_pay(server.store, self._names, least=self._simulation.task.round.min_updates):
                with EventLog(server.events_path, clock=self._clock) as events:
                    events.write("finished", reason=ALL_SPENT)
                break
        self._note_unplayed(world.playback.unplayed, "the run was over before")

    def _note_unplayed(self, windows: Iterable[Outage], reason: str) -> None:
        for window in windows:
            at = {"at_s": window.ends_s if window.begins_s is None else window.begins_s}
            at |= {"at_round": window.at_round} if window.at_round else {}
            self._scenario.write("scenario", action="not-played", target=window.target, **at, reason=reason)

    def end(self) -> None:
        """Closes all stores."""
        for board in self.world.boards.values():
            board.kill(will_after_s=0.0)
        self._server.kill()

    def _boards(self, hub: LocalHub, costs: Costs) -> list[WorldBoard]:
        simulation = self._simulation
        prepared, fleet = simulation.prepared, simulation.fleet.devices
        devices = fleet_devices(
            prepared,
            self._mix,
            names=self._names,
            samples=[len(device.train) for device in fleet],
            costs=costs,
            sizes=sizes_of(prepared, name_bytes=len(self._names[0])),
            schedule=self._schedule,
        )
        return [self._board(device, made.times, hub) for device, made in zip(fleet, devices, strict=True)]

    def _board(self, device: SimulatedDevice, times: DeviceTimes, hub: LocalHub) -> WorldBoard:
        simulation, files = self._simulation, self._simulation.folder.device(device.name)
        files.path.mkdir(parents=True, exist_ok=True)
        limits = LimitsSection.of_simulation(
            simulation.prepared.spec.privacy,
            epsilon_server=device.epsilon_limit,
            noise_preference=device.preference,
            memory_mib=self._schedule.memory_mib.get(device.name, 0),
        )
        config = board_config(
            device.name,
            index=device.index,
            seed=simulation.seed,
            board=self._mix[device.index].profile,
            folder=str(files.path),
            limits=limits,
        )
        key = key_of(simulation.seed, device.index)
        store = partial(DeviceStore, files.store, device=device.name, durable=False, identity=key)
        return WorldBoard(
            device.name, clock=self._clock, hub=hub, times=times, config=config, store=store, train=self._train
        )

    def _train(self, job: Job) -> Iterator[Outcome]:
        """Hands a job to the workers."""
        last = self._simulation.prepared.spec.last_training_round
        evaluate = job.plan.round >= last or job.plan.round % self._every == 0
        return self._workers.map(train, [RunJob(self._simulation.folder.path.absolute(), self._runtime, evaluate, job)])


def kept_costs(simulation: Simulation) -> Costs:
    """Returns the costs of the task's work, which are measured once and kept in the run folder."""
    path = simulation.folder.clock
    if not path.exists():
        costs = measure_costs(simulation.prepared, machine_speed=machine_speed())
        write_whole(path, json.dumps(vars(costs), indent=1).encode(), durable=False)
    return Costs(**json.loads(path.read_text()))
