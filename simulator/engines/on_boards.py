"""Runs a simulation in a world: real agents on real stores, whose gradients are those of their own samples.

Training is done by the fast engine's workers: a job is handed to them when a board begins it, and its update is taken
when the board has computed it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hushfleet.edge_client.board.config import LimitsSection
from hushfleet.edge_client.metrics import MetricsFile
from hushfleet.edge_client.randomness import SeededRandomness
from hushfleet.edge_client.storage.store import DeviceStore
from hushfleet.edge_client.trainer import DeviceRound, Trainer
from hushfleet.edge_client.worker.job import Job, Outcome
from hushfleet.edge_client.worker.job_store import JobStore
from hushfleet.errors import HushfleetError
from hushfleet.methods.privatize import NoisedUpdate
from hushfleet.simulator.boards import FleetMix
from hushfleet.simulator.engines.fast.loaded_run import loaded_run
from hushfleet.simulator.engines.fast.runtimes import make_noise, make_optimizer
from hushfleet.simulator.engines.fast.sums import key_of
from hushfleet.simulator.engines.fast.workers import WorkerPool
from hushfleet.simulator.engines.live.engine import RECONNECT_S
from hushfleet.simulator.fleet import SimulatedDevice
from hushfleet.simulator.run_folder import Simulation
from hushfleet.simulator.schedule import schedule_of
from hushfleet.simulator.world.board import WorldBoard, board_config, trained
from hushfleet.simulator.world.clock import WorldClock
from hushfleet.simulator.world.hub import LocalHub
from hushfleet.simulator.world.outcomes import fleet_devices
from hushfleet.simulator.world.run import LinkOptions, World, WorldServer
from hushfleet.simulator.world.sizes import sizes_of
from hushfleet.simulator.world.times import Costs
from hushfleet.training.local_round import Trained

LONGEST_ROUND_S = 90 * 86400.0


@dataclass(frozen=True)
class RunJob:
    """A board's job for a worker of the fast engine; all other inputs are in the run folder.

    :param evaluate: whether the device's own model is tested after training.
    """

    path: Path
    runtime: str
    evaluate: bool
    job: Job


def train(each: RunJob) -> Outcome:
    """Trains a round on the device's samples in the run folder."""
    job, run, began = each.job, loaded_run(each.path, each.runtime), time.monotonic()
    device, simulation = job.config.device.id, job.config.simulation
    assert simulation is not None
    folder = run.folder.device(device)
    common, local = (run.folder.common_test, folder.local_test) if each.evaluate else (None, None)
    metrics = MetricsFile(folder.metrics, common, local, run.features)

    def observe(round: DeviceRound, result: Trained, noised: NoisedUpdate) -> None:
        metrics.write(round, result, noised, train_s=time.monotonic() - began)

    trainer = Trainer(
        device=device,
        store=JobStore(job),
        spec=run.spec,
        method=run.method,
        gradient=run.gradient,
        logits_of=run.inference,
        samples=lambda: run.train(device),
        held_out=lambda: run.held_out(device),
        randomness=SeededRandomness(simulation.seed, simulation.index, make_noise),
        limits=job.config.limits,
        observer=observe,
        make_optimizer=make_optimizer,
    )
    return trained(job, trainer)


def run_in_world(
    simulation: Simulation,
    workers: WorkerPool,
    *,
    mix: FleetMix,
    costs: Costs,
    runtime: str = "onnx",
    evaluate_every: int = 1,
) -> World:
    """Runs the task's rounds to the end, and returns the world as it is then.

    :param mix: a board for each device of the simulation.
    :param costs: of the task's work.

    Raises `HushfleetError` if a round never opens or never closes.
    """
    prepared, folder, fleet = simulation.prepared, simulation.folder, simulation.fleet.devices
    names = [device.name for device in fleet]
    schedule = schedule_of(simulation.task, names)
    devices = fleet_devices(
        prepared,
        mix,
        names=names,
        samples=[len(device.train) for device in fleet],
        costs=costs,
        sizes=sizes_of(prepared, name_bytes=len(names[0])),
        schedule=schedule,
    )
    clock = WorldClock()
    hub = LocalHub(clock=clock)
    path, last = folder.path.absolute(), prepared.spec.last_training_round

    def begin(job: Job) -> Iterator[Outcome]:
        evaluate = job.plan.round >= last or job.plan.round % evaluate_every == 0
        return workers.map(train, [RunJob(path, runtime, evaluate, job)])

    def board(device: SimulatedDevice) -> WorldBoard:
        limits = LimitsSection.of_simulation(
            prepared.spec.privacy,
            epsilon_server=device.epsilon_limit,
            noise_preference=device.preference,
            memory_mib=schedule.memory_mib.get(device.name, 0),
        )
        files = folder.device(device.name)
        config = board_config(
            device.name,
            index=device.index,
            seed=simulation.seed,
            board=mix[device.index].profile,
            folder=str(files.path),
            limits=limits,
        )
        key = key_of(simulation.seed, device.index)
        store = partial(DeviceStore, files.store, device=device.name, durable=False, identity=key)
        times = devices[device.index].times
        return WorldBoard(device.name, clock=clock, hub=hub, times=times, config=config, store=store, train=begin)

    server = WorldServer(
        prepared,
        folder.aggregator,
        clock=clock,
        hub=hub,
        accept_s=costs.accept_s,
        close_s=costs.close_s,
        events=folder.events,
        on_opened=lambda round, cohort: world.playback.round_opened(round, clock.now),
    )
    options = LinkOptions(lost_noticed_s=0.0, first_backoff_s=RECONNECT_S)
    world = World(clock, hub, server, [*map(board, fleet)], schedule=schedule, options=options, seed=simulation.seed)
    world.start()
    try:
        while not server.finished:
            if not world.advance(clock.now + LONGEST_ROUND_S):
                raise HushfleetError("a round never opens or never closes: nothing more comes")
    finally:
        for each in world.boards.values():
            each.kill(will_after_s=0.0)
        server.kill()
    return world
