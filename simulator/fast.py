"""The fast engine: the same fleet without a network, without processes of its own per device.

Devices are `edge_client.trainer.Trainer` and the server is `aggregator.rounds.RoundEngine`: method, codec, ledger
and round are the field's own code. Only MQTT, and the waiting, are left out. With the same seed it ends in
the same global model as the live engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from aggregator.events import EventLog
from aggregator.round_events import run_fields, update_fields
from aggregator.rounds import RoundEngine
from aggregator.store import AggregatorStore
from edge_client.metrics import MetricsFile
from edge_client.store import DeviceStore
from edge_client.trainer import SeededRandomness, TrainedRound, Trainer
from hushfleet.errors import HushfleetError
from hushfleet.wire.messages import RoundPlan
from simulator.bench import bench
from simulator.run_folder import RunFolder, Simulation
from simulator.runtimes import make_optimizer
from simulator.workers import Crew


@dataclass(frozen=True)
class Job:
    """One device's part of a round."""

    path: Path
    runtime: str
    device: str
    index: int
    seed: int
    plan: RoundPlan
    evaluate: bool


class Answer(NamedTuple):
    """What a device sends."""

    device: str
    public_key: bytes
    update: bytes


def run_rounds(
    simulation: Simulation, workers: Crew, events: EventLog, *, runtime: str = "onnx", evaluate_every: int = 1
) -> None:
    """Runs the task's rounds to the end, or on from where an interrupted run stopped.

    :param evaluate_every: devices' own models are tested every so many rounds, and after the last one.
    """
    names = [device.name for device in simulation.fleet.devices]
    with AggregatorStore(simulation.folder.aggregator, durable=False) as store:
        engine = RoundEngine(store, simulation.prepared)
        events.write("run", **run_fields(simulation.prepared.spec, engine="fast", devices=len(names)))
        for device in simulation.fleet.devices:
            events.write("presence", device=device.name, state="ready", board=device.board)
        while not engine.finished:
            plan = engine.plan or engine.open_round(names)
            events.write("round_open", round=plan.round, cohort=sorted(plan.cohort))
            for answer in train_cohort(
                simulation, workers, plan, plan.cohort, runtime=runtime, evaluate_every=evaluate_every
            ):
                deliver(answer, engine, plan, events)
            events.write("round_close", **engine.close().to_dict())
    events.write("finished")


def deliver(answer: Answer, engine: RoundEngine, plan: RoundPlan, events: EventLog) -> None:
    """Hands an update to the aggregator, without a network. Raises `HushfleetError` if it is refused."""
    engine.store.add_device(answer.device, public_key=answer.public_key)
    verdict = engine.accept(answer.device, answer.update)
    if not verdict.acknowledged:
        raise HushfleetError(
            f"round {plan.round}: the update of {answer.device} was refused ({verdict.code}), since {verdict.reason}"
        )
    fields = update_fields(verdict, device=answer.device, round=plan.round, payload_bytes=len(answer.update))
    events.write("update", **fields)


def train_cohort(
    simulation: Simulation,
    workers: Crew,
    plan: RoundPlan,
    devices: Collection[str],
    *,
    runtime: str = "onnx",
    evaluate_every: int = 1,
) -> Iterator[Answer]:
    """Trains `devices` of the plan's cohort; their updates come in the fleet's order."""
    jobs = [
        Job(
            path=simulation.folder.path,
            runtime=runtime,
            device=device.name,
            index=device.index,
            seed=simulation.seed,
            plan=plan,
            evaluate=plan.round >= plan.rounds or plan.round % evaluate_every == 0,
        )
        for device in simulation.fleet.devices
        if device.name in devices
    ]
    return workers.map(train_one, jobs)


def train_one(job: Job) -> Answer:
    """A device's round, in a worker: the same `Trainer` as on a board."""
    files = bench(job.path, job.runtime)
    folder = RunFolder(job.path).device(job.device)
    tests = (files.folder.common_test, folder.local_test) if job.evaluate else (None, None)
    metrics = MetricsFile(folder.metrics, *tests)
    began = time.monotonic()
    with DeviceStore(folder.store, device=job.device, durable=False) as store:

        def observe(trained: TrainedRound) -> None:
            spent = store.ledger.epsilon_server(delta=files.spec.privacy.delta)
            metrics.write(trained, files, epsilon_server=spent, train_s=time.monotonic() - began)

        trainer = Trainer(
            device=job.device,
            store=store,
            spec=files.spec,
            gradient=files.gradient,
            samples=files.train(job.device),
            randomness=SeededRandomness(job.seed, job.index),
            epsilon_limit=math.inf,
            delta=files.spec.privacy.delta,
            observer=observe,
            make_optimizer=make_optimizer,
        )
        entry = trainer.run_round(job.plan, files.global_params(job.plan))
        return Answer(job.device, store.identity.public_key, entry.data)
