"""The fast engine: the same fleet without a network, without processes of its own per device.

Devices are `edge_client.trainer.Trainer` and the server is `aggregator.rounds.RoundEngine`: method, codec, ledger
and round are the field's own code. Only MQTT, and the waiting, are left out. With the same seed it ends in
the same global model as the live engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from aggregator.events import EventLog
from aggregator.round_events import run_fields, update_fields
from aggregator.rounds import RoundEngine
from aggregator.store import AggregatorStore
from hushfleet.errors import HushfleetError
from hushfleet.wire.messages import RoundPlan
from simulator.at_once import train_at_once
from simulator.jobs import Answer, Job, train
from simulator.run_folder import Simulation
from simulator.runtimes import AT_ONCE
from simulator.workers import Crew


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
    if runtime == AT_ONCE:
        return train_at_once(jobs, workers)
    return workers.map(train, jobs)
